"""Code of the user's own, named in a configuration: `package.module:thing`, or `path/to/file.py:thing`.

It is imported, so it runs; nothing else in a configuration is. Whatever is wrong with it is a `ConfigError` that names
the key and what was written there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headway.errors import ConfigError


def import_object(path: str, *, key: str, kind: str) -> Any:
    """What `path` names. `kind` is what it should be, for people: a class, a function."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ConfigError("names nothing", key=key, value=path, hint=_hint(kind))
    found: Any = _module(module, path, key, kind)
    for step in name.split("."):
        if not hasattr(found, step):
            near = get_close_matches(step, dir(found), n=1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"has no {step!r}{meant}", key=key, value=path)
        found = getattr(found, step)
    return found


def import_function(path: str, *, key: str) -> Callable[..., Any]:
    """What `path` names, if it can be called."""
    found = import_object(path, key=key, kind="function")
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}, not a function", key=key, value=path)
    return found  # type: ignore[no-any-return]


def _module(module: str, path: str, key: str, kind: str) -> Any:
    try:
        if not module.endswith(".py"):
            here = str(Path.cwd())
            if here not in sys.path:  # as `python -m` has it, and the installed command has not
                sys.path.append(here)
            return importlib.import_module(module)
        return _from_file(Path(module), path, key)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot be imported: {type(error).__name__}: {error}",
            key=key,
            value=path,
            hint=_hint(kind),
        ) from error


def _hint(kind: str) -> str:
    return f"package.module:{kind}, or path/to/file.py:{kind}"


def _from_file(file: Path, path: str, key: str) -> Any:
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"there is no such file{where}", key=key, value=path)
    name = f"headway_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
