"""The mark of a complete checkpoint: `trainer.json`, written last, with a checksum of every other file.

The checksum of a file is that of the CRC-32 of its parts. Parts are read by several threads, so that a checkpoint costs
a second for each gigabyte and core. It finds zeroed, flipped, exchanged and missing bytes; it is no protection against
attackers. The mark itself is sealed. A checkpoint of an older Headway has neither, and is used unchecked.
"""

import json
import os
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import TrainerError
from headway.weights.base import compute_checksum

MARK_FILE = "trainer.json"
_LISTING_FILE = "files.json"
"""Belongs to whoever keeps the checkpoint, and is written later."""
_TRAINER_ONLY = frozenset({"optimizer.safetensors", "critic.safetensors"})
"""Files that a model is used without."""
_FORMAT = 1
_PART_BYTES = 32 << 20
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """What a trainer says about its checkpoint."""

    version: int
    kl: dict[str, float]
    """State of the KL controller."""
    files: Mapping[str, str] | None
    """Checksum by file name; `None` if it was written without checksums."""


def write_completion_mark(directory: Path, *, version: int, kl: Mapping[str, float]) -> None:
    """Declare the checkpoint complete. Its files must not change from now on."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name not in (MARK_FILE, _LISTING_FILE)]
    names = sorted(path.relative_to(directory).as_posix() for path in paths)
    files = {name: compute_file_checksum(directory / name) for name in names}
    state = {"format": _FORMAT, "version": version, "kl": dict(kl), "files": files}
    (directory / MARK_FILE).write_text(json.dumps({**state, "seal": _seal(state)}, indent=1), encoding="utf-8")


def read_completion_mark(directory: Path) -> CheckpointMark:
    """Return the mark. Raise `TrainerError` if there is none or it is damaged."""
    try:
        state = json.loads((directory / MARK_FILE).read_text(encoding="utf-8"))
        seal = state.pop("seal", None)
        if (seal is not None or "files" in state) and seal != _seal(state):
            raise TrainerError(f"{directory / MARK_FILE} is damaged: its checksum differs")
        if state.get("format", _FORMAT) != _FORMAT:
            raise TrainerError(f"{directory}: format {state['format']}, this build reads {_FORMAT}")
        kl = {str(key): float(value) for key, value in state.get("kl", {}).items()}
        return CheckpointMark(version=int(state["version"]), kl=kl, files=state.get("files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerError(f"{directory} holds no complete checkpoint: {error!r}") from error


def verify_checkpoint(directory: Path, needed: Collection[str]) -> list[str]:
    """Check the files of a checkpoint by their checksums, and return what is wrong with files that are not `needed`.

    Raise `TrainerError` if a needed one is damaged. A checkpoint without checksums is said to be unchecked.
    """
    mark = read_completion_mark(directory)
    if mark.files is None:
        return [f"{directory} was written by an older Headway without checksums: it is used unchecked"]
    for name in needed:
        problem = _find_damage(directory / name, mark.files.get(name))
        if problem:
            raise TrainerError(f"{directory / name} is damaged: {problem}")
    others = {name: _find_damage(directory / name, mark.files[name]) for name in mark.files.keys() - set(needed)}
    return [f"{directory / name} is damaged: {problem}" for name, problem in sorted(others.items()) if problem]


def verify_model(directory: Path) -> None:
    """Check the files of a checkpoint that evaluating or serving its model needs. Raise `TrainerError` if damaged."""
    mark = read_completion_mark(directory)
    for name in sorted((mark.files or {}).keys() - _TRAINER_ONLY):
        problem = _find_damage(directory / name, (mark.files or {})[name])
        if problem:
            raise TrainerError(f"{directory / name} is damaged: {problem}")


def compute_file_checksum(path: Path) -> str:
    """Return the checksum of a file's contents, with its length."""
    size = path.stat().st_size
    handle = os.open(path, os.O_RDONLY)

    def compute_part(start: int) -> int:
        return zlib.crc32(os.pread(handle, _PART_BYTES, start))

    try:
        starts = range(0, size, _PART_BYTES)
        if len(starts) < 2:
            parts = list(map(compute_part, starts))
        else:
            with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
                parts = list(threads.map(compute_part, starts))
    finally:
        os.close(handle)
    return f"{compute_checksum(b''.join(part.to_bytes(4, 'little') for part in parts))}:{size}"


def _find_damage(path: Path, expected: str | None) -> str:
    """Return what is wrong with a file, in words; an empty text if nothing is."""
    if expected is None:
        return "it was not part of the checkpoint"
    try:
        found = compute_file_checksum(path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    size, expected_size = found.rpartition(":")[2], expected.rpartition(":")[2]
    if size != expected_size:
        return f"it has {size} bytes instead of {expected_size}"
    return "" if found == expected else "its checksum differs"


def _seal(state: Mapping[str, Any]) -> str:
    return compute_checksum(json.dumps(state, sort_keys=True).encode())
