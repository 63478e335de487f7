"""Keeps a checkpoint on disk while another process reads it, for example `headway eval` of a run at work.

A reader holds a shared lock on the list of the checkpoint's files. A run removes a checkpoint only under the exclusive
lock, so one that is held stays until a later removal. A lock ends with its process, and with a kill.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LISTING_FILE = "files.json"
_held: dict[Path, BinaryIO] = {}


def hold_checkpoint(directory: Path) -> bool:
    """Keep a checkpoint from being removed until it is released. Return whether it is still there.

    A checkpoint without a list of files was not written by a run, and nobody removes it.
    """
    path = directory.resolve()
    if path in _held or not (path / LISTING_FILE).exists():
        return path.is_dir()
    try:
        file = (path / LISTING_FILE).open("rb")
    except OSError:
        return path.is_dir()
    fcntl.flock(file, fcntl.LOCK_SH)
    if not (path / LISTING_FILE).exists():  # it was renamed for removal before the lock was taken
        file.close()
        return False
    _held[path] = file
    return True


def release_checkpoint(directory: Path) -> None:
    """Let a checkpoint be removed again. Nothing happens if it is not held."""
    file = _held.pop(directory.resolve(), None)
    if file is not None:
        file.close()


@contextmanager
def lock_for_removal(directory: Path) -> Iterator[bool]:
    """Yield whether nobody reads the checkpoint; until the end of the block nobody begins to."""
    try:
        file = (directory / LISTING_FILE).open("rb")
    except OSError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
