"""Shared memory that cannot outlive its owner, and the reader that opens payloads wherever they lie.

On Linux a segment is an anonymous file (`memfd_create`): it has no name in any directory, is not bounded by the size
of `/dev/shm`, and the kernel frees it with the last process that has it open, however that process ended. Other
processes open it through the owner's entry in `/proc`, as long as the owner lives and has it open. On other systems a
segment is a file in the temporary directory whose name begins with its owner's process id; the first segment of any
process removes the files of dead owners. Closing a segment never harms a process that has it open already.

Objects are those of a Ray cluster's object store. A process that puts or reads them must be connected to Ray.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from headway.errors import TransferError
from headway.weights.base import FileSlice, ObjectSlice, SharedSlice

SEGMENT_PREFIX = "headway"
_ANONYMOUS = re.compile(r"memfd-(\d+)-(\d+)-([0-9a-f]+)")
"""Process, descriptor and a random word, which tells a segment from a file that gets its descriptor later."""
_OBJECT_READ_S = 300.0
"""How long a bucket may take to come from another node."""
_NAMED = re.compile(rf"{SEGMENT_PREFIX}-(\d+)-[0-9a-f]+")


class SharedSegment:
    """A block of memory that other processes can open by its name."""

    def __init__(self, name: str, descriptor: int, *, path: Path | None = None) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._path = path
        """File that is removed with the segment."""
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """Make a segment of `size` bytes that this process owns."""
        try:
            return cls._anonymous(max(size, 1)) if hasattr(os, "memfd_create") else cls._named(max(size, 1))
        except OSError as error:
            raise TransferError(f"{size} bytes of shared memory cannot be had: {error}") from error

    @classmethod
    def _anonymous(cls, size: int) -> SharedSegment:
        word = secrets.token_hex(8)
        descriptor = os.memfd_create(f"{SEGMENT_PREFIX}-{word}")
        os.ftruncate(descriptor, size)
        return cls(f"memfd-{os.getpid()}-{descriptor}-{word}", descriptor)

    @classmethod
    def _named(cls, size: int) -> SharedSegment:
        _remove_stale_segments_once()
        path = _directory() / f"{SEGMENT_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        return cls(path.name, descriptor, path=path)

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """Open a segment of another process. Raises `TransferError` if it is gone."""
        try:
            return cls(name, _open_segment(name))
        except (OSError, ValueError) as error:
            raise TransferError(f"shared memory {name!r} cannot be opened: {error}") from error

    @property
    def buffer(self) -> memoryview:
        """The whole memory. Views keep it mapped after `close`."""
        if self._memory is None:
            raise TransferError(f"shared memory {self.name} was closed")
        return memoryview(self._memory)

    def try_lock(self, *, shared: bool) -> bool:
        """Lock the segment until `close` or the end of this process, alone or together with other shared locks.

        Returns false if another process has locked it.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the segment, which its last view still keeps mapped. No process can open ours any more. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        os.close(self._descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        with suppress(BufferError):  # a tensor still uses it
            memory.close()


class PayloadReader:
    """Opens payloads in the process that reads them. The segments read last stay mapped, older ones are closed."""

    def __init__(self, max_attached: int = 3) -> None:
        self._attached: dict[str, SharedSegment] = {}
        """Ordered by when they were last read."""
        self._max_attached = max_attached

    def open(self, payload: Any) -> memoryview:
        """Return the bytes of a payload, wherever they are. Raises `TransferError` if they are gone."""
        if isinstance(payload, FileSlice):
            return _read_files(payload)
        if isinstance(payload, ObjectSlice):
            return read_object(payload)
        if not isinstance(payload, SharedSlice):
            return memoryview(payload).cast("B")
        segment = self._attached.pop(payload.segment, None) or SharedSegment.attach(payload.segment)
        self._attached[payload.segment] = segment
        while len(self._attached) > self._max_attached:
            self._attached.pop(next(iter(self._attached))).close()
        end = payload.start + payload.size
        if not 0 <= payload.start <= end <= segment.size:
            raise TransferError(f"bytes {payload.start} to {end} of shared memory of {segment.size}")
        return segment.buffer[payload.start : end]

    def close(self) -> None:
        """Close all segments. Idempotent."""
        while self._attached:
            self._attached.popitem()[1].close()


def _read_files(payload: FileSlice) -> memoryview:
    """Return the bytes of a bucket in files. Raises `TransferError` if they are gone or cut short."""
    data = memoryview(bytearray(sum(size for _, _, size in payload.spans)))
    place = 0
    for path, start, size in payload.spans:
        try:
            with Path(path).open("rb", buffering=0) as file:
                file.seek(start)
                end = place + size
                while place < end:
                    got = file.readinto(data[place:end])
                    if not got:
                        raise TransferError(f"{path} ends {end - place} bytes before it should")
                    place += got
        except OSError as error:
            raise TransferError(f"{path} cannot be read: {error.strerror}") from error
    return data


def remove_stale_segments() -> list[str]:
    """Remove the files of dead owners and return their names."""
    removed = []
    for path in _directory().glob(f"{SEGMENT_PREFIX}-*-*"):
        found = _NAMED.fullmatch(path.name)
        if found and not _is_alive(int(found[1])):
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


@cache
def _remove_stale_segments_once() -> None:
    remove_stale_segments()


def _directory() -> Path:
    return Path(tempfile.gettempdir())


def _open_segment(name: str) -> int:
    anonymous = _ANONYMOUS.fullmatch(name)
    if anonymous is None:
        if not _NAMED.fullmatch(name):
            raise ValueError("not the name of a segment")
        return os.open(_directory() / name, os.O_RDWR)
    process, number, word = anonymous.groups()
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    if f"{SEGMENT_PREFIX}-{word}" not in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115
        os.close(descriptor)
        raise ValueError("its owner has closed it")
    return descriptor


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def put_object(data: memoryview) -> ObjectSlice:
    """Put bytes into the object store of the cluster. Raises `TransferError` if it is full."""
    import numpy as np
    import ray
    from ray.exceptions import RayError

    try:
        ref: Any = ray.put(np.frombuffer(data, dtype=np.uint8))
    except RayError as error:
        raise TransferError(f"{data.nbytes} bytes cannot be stored: {error}") from error
    return ObjectSlice(ref=ref, size=data.nbytes)


def read_object(payload: ObjectSlice, timeout_s: float = _OBJECT_READ_S) -> memoryview:
    """Return the bytes of an object, which this node fetches if needed, read-only. Raises `TransferError` if gone."""
    from ray.exceptions import RayError

    try:
        found = memoryview(payload.ref.future().result(timeout_s)).cast("B")
    except (RayError, TimeoutError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise TransferError(f"a stored bucket cannot be read: {type(error).__name__}: {why}") from error
    if found.nbytes != payload.size:
        raise TransferError(f"a stored bucket has {found.nbytes} bytes instead of {payload.size}")
    return found
