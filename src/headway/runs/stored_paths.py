"""Relative paths in the configuration that a run has written, seen from another working directory or after a move.

A run writes its configuration as it was given, and beside it the working directory of that moment. Whoever reads it
from elsewhere gets absolute paths: relative ones are those of the first working directory, if they exist there, and
paths inside the run directory follow it when it is moved.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKING_DIRECTORY = "working_directory"
"""Key of the working directory in the file that identifies a run."""
_PATH_OPTIONS = frozenset(
    {"pretrain", "model_name_or_path", "checkpoint_dir", "dataset_dir", "directory", "file", "file_name", "plugins"}
)
_PATH_SUFFIXES = (".py", ".json", ".jsonl", ".csv", ".parquet", ".yaml")
_PREFIX = "hf:"


def read_working_directory(identity_file: Path) -> Path:
    """Return where the run was started; the working directory of now if nobody knows, or if that one is gone."""
    try:
        found = Path(json.loads(identity_file.read_text(encoding="utf-8"))[WORKING_DIRECTORY])
    except (OSError, ValueError, KeyError, TypeError):
        return Path.cwd()
    return found if found.is_dir() else Path.cwd()


def make_paths_absolute(tree: Mapping[str, Any], base: Path, moved_to: Path | None = None) -> dict[str, Any]:
    """Return the options of a run that was started in `base`, with paths that mean the same everywhere.

    `moved_to` is where its directory is now: paths inside `output_dir` are renamed to it.
    """
    output_dir = tree.get("output_dir")
    old = base / str(output_dir) if output_dir else None

    def change(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: change(str(name), one) for name, one in value.items()}
        if isinstance(value, list):
            return [change(key, one) for one in value]
        return (
            _change_path(key, value, base, old, moved_to) if isinstance(value, str) and key != "output_dir" else value
        )

    return {name: change(str(name), value) for name, value in tree.items()}


def _change_path(key: str, value: str, base: Path, old: Path | None, moved_to: Path | None) -> str:
    prefix = _PREFIX if value.startswith(_PREFIX) else ""
    name, colon, rest = value.removeprefix(prefix).partition(":")  # `file.py:function`
    if not name or not (key in _PATH_OPTIONS or name.endswith(_PATH_SUFFIXES)):
        return value
    path = base / name
    if old is not None and moved_to is not None and path != old and path.is_relative_to(old):
        path = moved_to / path.relative_to(old)
    elif not path.exists():
        return value
    return f"{prefix}{path}{colon}{rest}"


def is_same_path(before: str, after: str, base: Path) -> bool:
    """Return whether two paths name the same thing; `before` was written in `base`, and may have been moved since."""
    old, new = base / before, Path.cwd() / after
    if old.exists() and new.exists():
        return old.samefile(new)
    return not old.exists() and new.exists() and old.name == new.name
