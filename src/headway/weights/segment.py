"""Named shared memory whose names do not outlive their owner.

A segment belongs to the process that made it. Three things remove its name: `close` of the owner; the resource
tracker, a process of Python's own that outlives a killed owner; and `sweep`, which whoever starts next calls, for the
case that the tracker was killed as well. Names begin with the owner's process id for that.

A process that only attaches must not be tracked: up to Python 3.12 its tracker would remove the name when that process
ends, under the feet of the owner (and, where both share a tracker, forget the owner's claim). Removing a name never
harms who has the memory open.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from headway.errors import TransferError

PREFIX = "headway"
_DIRECTORY = Path("/dev/shm")
"""Where Linux shows the names; elsewhere they cannot be listed and `sweep` does nothing."""
_attaching = threading.Lock()


class Segment:
    """A stretch of memory that other processes can open by its name."""

    def __init__(self, memory: shared_memory.SharedMemory, *, owned: bool) -> None:
        self._memory = memory
        self._owned = owned
        self._closed = False

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new one of at least `size` bytes, owned by this process."""
        name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            return cls(shared_memory.SharedMemory(name, create=True, size=max(size, 1)), owned=True)
        except OSError as error:
            raise TransferError(f"{size} bytes of shared memory cannot be had: {error}") from error

    @classmethod
    def attach(cls, name: str) -> Segment:
        """One made by another process. Raises `TransferError` when it is gone."""
        try:
            return cls(_untracked(name), owned=False)
        except (OSError, ValueError) as error:
            raise TransferError(f"shared memory {name!r} cannot be opened: {error}") from error

    @property
    def name(self) -> str:
        return self._memory.name

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def buffer(self) -> memoryview:
        """All of it. Views keep the memory mapped after `close`."""
        if self._closed or self._memory.buf is None:
            raise TransferError(f"shared memory {self.name} was closed")
        return self._memory.buf

    def close(self) -> None:
        """Remove the name if it is ours, and unmap as soon as nobody has a view. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._owned:
            with suppress(FileNotFoundError):
                self._memory.unlink()
        try:
            self._memory.close()
        except BufferError:  # a tensor still looks at it: unmapped when the last one goes
            _leave_to_collector(self._memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlice:
    """The payload of a bucket that lies in shared memory: three words instead of the bytes."""

    segment: str
    start: int
    size: int


class SharedReader:
    """Opens slices in the process that reads them, and keeps segments mapped as long as versions still use them."""

    def __init__(self) -> None:
        self._attached: dict[str, Segment] = {}
        self._read: set[str] = set()
        """Segments that were read since the last `next_version`."""

    def buffer(self, payload: Any) -> memoryview:
        """The bytes of a bucket's payload, wherever they are. Raises `TransferError` when they are gone."""
        if not isinstance(payload, SharedSlice):
            return memoryview(payload).cast("B")
        segment = self._attached.get(payload.segment)
        if segment is None:
            segment = self._attached[payload.segment] = Segment.attach(payload.segment)
        self._read.add(payload.segment)
        end = payload.start + payload.size
        if not 0 <= payload.start <= end <= segment.size:
            raise TransferError(f"bytes {payload.start} to {end} of shared memory of {segment.size}")
        return segment.buffer[payload.start : end]

    def next_version(self) -> None:
        """Let go what the version before did not use."""
        for name in self._attached.keys() - self._read:
            self._attached.pop(name).close()
        self._read.clear()

    def close(self) -> None:
        """Let everything go."""
        self._read.clear()
        self.next_version()


def sweep() -> list[str]:
    """Remove what dead owners left behind; returns their names."""
    if not _DIRECTORY.is_dir():
        return []
    removed = []
    for path in _DIRECTORY.glob(f"{PREFIX}-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and not _alive(int(owner)):
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _untracked(name: str) -> shared_memory.SharedMemory:
    if sys.version_info >= (3, 13):
        return shared_memory.SharedMemory(name, track=False)
    tracker: Any = shared_memory.resource_tracker  # type: ignore[attr-defined]
    with _attaching:
        register = tracker.register
        tracker.register = lambda *_: None
        try:
            return shared_memory.SharedMemory(name)
        finally:
            tracker.register = register


def _leave_to_collector(memory: Any) -> None:
    """Forget the mapping without closing it: the views that are left own it, and the descriptor is not needed."""
    memory._buf = memory._mmap = None
    if memory._fd >= 0:
        os.close(memory._fd)
        memory._fd = -1
