"""Import code that a configuration names: `package.module:object`, or `path/to/file.py:object`.

Such code runs when it is imported; nothing else in a configuration is ever executed. Whatever is wrong with it is a
`ConfigError` that names the key and the value.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from headway.errors import ConfigError


def import_object(path: str, *, key: str, kind: str) -> Any:
    """Return the object that `path` names. `kind` says in error messages what it should be: a class, a function."""
    module, _, name = path.rpartition(":")
    hint = f"package.module:{kind}, or path/to/file.py:{kind}"
    if not module or not name:
        raise ConfigError("names nothing", key=key, value=path, hint=hint)
    found: Any = _import_module(module, path, key, hint)
    for step in name.split("."):
        if not hasattr(found, step):
            near = get_close_matches(step, dir(found), n=1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"has no {step!r}{meant}", key=key, value=path)
        found = getattr(found, step)
    return found


def import_function(path: str, *, key: str) -> Callable[..., Any]:
    """Return the function that `path` names. Raise `ConfigError` if it cannot be called."""
    found = import_object(path, key=key, kind="function")
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a function", key=key, value=path)
    return found  # type: ignore[no-any-return]


def import_user_module(module: str, *, key: str) -> ModuleType:
    """Import a module by dotted name, or by the path of its file. Raise `ConfigError` for `key` if that fails."""
    return _import_module(module, module, key, "package.module, or path/to/file.py")


def locate_user_code(error: BaseException) -> str:
    """Return ` at file:line` for the innermost line of an imported file that an error passed through, or nothing."""
    files = {str(file) for file in _IMPORTED_FILES}
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename in files]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _import_module(module: str, written: str, key: str, hint: str) -> ModuleType:
    try:
        if module.endswith(".py"):
            return _import_file(Path(module), written, key)
        here = str(Path.cwd())
        if here not in sys.path:  # `python -m` puts it there, the installed command does not
            sys.path.append(here)
        return importlib.import_module(module)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(problem, key=key, value=written, hint=hint) from error


def _import_file(file: Path, written: str, key: str) -> ModuleType:
    """Import a file once; a file that has changed since is imported again."""
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"there is no such file{where}", key=key, value=written)
    file = file.resolve()
    changed_ns = file.stat().st_mtime_ns
    if file in _IMPORTED_FILES and _IMPORTED_FILES[file][0] == changed_ns:
        return _IMPORTED_FILES[file][1]
    name = f"headway_user_{file.stem}"
    if any(other.__name__ == name for path, (_, other) in _IMPORTED_FILES.items() if path != file):
        name += f"_{len(_IMPORTED_FILES)}"  # another file has the same stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _IMPORTED_FILES[file] = changed_ns, module
    return module


_IMPORTED_FILES: dict[Path, tuple[int, ModuleType]] = {}
"""Files that were imported, with the time of their last change and their module."""
