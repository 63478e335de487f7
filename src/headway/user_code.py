"""Import code that a configuration names: `package.module:object`, or `path/to/file.py:object`.

Such code runs when it is imported; nothing else in a configuration is ever executed. Whatever is wrong with it is a
`ConfigError` that names the key and the value.
"""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, NoReturn

from headway.errors import ConfigError, HeadwayError, PluginError


class ScriptStopped(BaseException):
    """Ends the import of a script at its call of `headway.train`; no `except Exception` of the script takes it."""


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
            if module == "__main__":
                meant, hint = ": it was defined in a notebook or a session that is gone", f"{key}=my_file.py:{name}"
            raise ConfigError(f"has no {step!r}{meant}", key=key, value=path, hint=hint)
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


def find_import_path(found: Any) -> str | None:
    """Return the path by which another process can import a function or a class, or `None` if there is none.

    Closures have none. The script that was started has one if it does its work under `if __name__ == "__main__"`, so
    that importing it starts nothing.
    """
    module, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", "<none>")
    loaded = sys.modules.get(module or "")
    file = getattr(loaded, "__file__", None)
    if "<" in qualified or loaded is None or file is None:
        return None
    present: Any = loaded
    for step in qualified.split("."):
        present = getattr(present, step, None)
    if getattr(present, "definition", present) is not found:
        return None  # a decorator has put something else under its name
    if module == "__main__" and not _has_main_guard(Path(file)):
        return None
    is_file = module == "__main__" or loaded.__name__.startswith(_FILE_PREFIX)
    return f"{Path(file).resolve()}:{qualified}" if is_file else f"{module}:{qualified}"


def make_import_path_absolute(path: str) -> str:
    """Return `file.py:object` with the absolute path of the file, and any other path as it is."""
    module, colon, name = path.rpartition(":")
    return f"{Path(module).resolve()}:{name}" if colon and module.endswith(".py") else path


@contextmanager
def preserve_working_directory() -> Iterator[None]:
    """Return to the working directory that there was, if code of a user has changed it."""
    before = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        with suppress(OSError):
            os.fchdir(before)
        os.close(before)


class WorkingDirectory:
    """The working directory of this process, which the code called `owner` may change."""

    def __init__(self, owner: str) -> None:
        self._owner, self._path, self._has_told = owner, os.getcwd(), False  # noqa: PTH109

    def restore(self) -> None:
        """Return to the directory that there was; say once that this was needed."""
        with suppress(OSError):
            if os.path.samefile(".", self._path):  # noqa: PTH121
                return
        with suppress(OSError):
            os.chdir(self._path)
        if not self._has_told:
            print(f"{self._owner} changed the working directory; it is {self._path} again", file=sys.stderr)
            self._has_told = True


def locate_user_code(error: BaseException) -> str:
    """Return ` at file:line` for the innermost line of an imported file that an error passed through, or nothing."""
    files = {str(file) for file in _IMPORTED_FILES}
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename in files]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def raise_plugin_error(kind: str, name: str, definition: object, error: BaseException) -> NoReturn:
    """Raise a `PluginError` that names a plugin by what it raised, or the error itself if it is Headway's own doing."""
    module = getattr(definition, "__module__", "") or ""
    if isinstance(error, HeadwayError | BaseExceptionGroup) or module.split(".")[0] == "headway":
        raise error
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    raise PluginError(f"the {kind} {name!r} raised {what}{where}") from error


def _import_module(module: str, written: str, key: str, hint: str) -> ModuleType:
    try:
        with preserve_working_directory():
            if module.endswith(".py"):
                return _import_file(Path(module), written, key)
            here = str(Path.cwd())
            if here not in sys.path:  # `python -m` puts it there, the installed command does not
                sys.path.append(here)
            return importlib.import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(problem, key=key, value=written, hint=hint) from error


def _import_file(file: Path, written: str, key: str) -> ModuleType:
    """Import a file once; a file that has changed since is imported again."""
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"there is no such file{where}", key=key, value=written)
    file = file.resolve()
    if file == _find_started_script():
        return sys.modules["__main__"]
    changed_ns = file.stat().st_mtime_ns
    if file in _IMPORTED_FILES and _IMPORTED_FILES[file][0] == changed_ns:
        return _IMPORTED_FILES[file][1]
    name = f"{_FILE_PREFIX}{file.stem}"
    if any(other.__name__ == name for path, (_, other) in _IMPORTED_FILES.items() if path != file):
        name += f"_{len(_IMPORTED_FILES)}"  # another file has the same stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _FILES_BEING_IMPORTED.append(file)
    try:
        spec.loader.exec_module(module)
    except ScriptStopped:
        pass  # what a script hands to a run is defined above its call
    finally:
        _FILES_BEING_IMPORTED.pop()
    _IMPORTED_FILES[file] = changed_ns, module
    return module


def stop_imported_script() -> None:
    """Raise `ScriptStopped` if a script that is imported for a function is about to start its own run again."""
    if _FILES_BEING_IMPORTED:
        raise ScriptStopped


def _find_started_script() -> Path | None:
    """Return the file of the program that runs, unless it is a command or an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None


def _has_main_guard(file: Path) -> bool:
    """Return whether a script does something only if it is the program that was started."""
    with suppress(OSError, SyntaxError, ValueError):
        tests = [node.test for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.If)]
        return any(ast.unparse(test).replace('"', "'") == "__name__ == '__main__'" for test in tests)
    return False


_FILES_BEING_IMPORTED: list[Path] = []
_PACKAGE = str(Path(__file__).parent)
_FILE_PREFIX = "headway_user_"
"""Names of the modules of imported files begin with this."""
_IMPORTED_FILES: dict[Path, tuple[int, ModuleType]] = {}
"""Files that were imported, with the time of their last change and their module."""
