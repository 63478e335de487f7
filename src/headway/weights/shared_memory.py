"""Shared memory that cannot outlive its owner.

On Linux a segment is an anonymous file (`memfd_create`): it has no name in any directory, is not bounded by the size
of `/dev/shm`, and the kernel frees it with the last process that has it open, however that process ended. Others
open it through the owner's entry in `/proc`, as long as the owner lives and has it open. Elsewhere a segment is a file
in the temporary directory whose name begins with its owner's process id; the first segment of any process removes the
files of dead owners.

Closing never harms who has the memory open already.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from headway.errors import TransferError
from headway.weights.base import Bucket, FileSlice, Manifest, ObjectSlice, SharedSlice, TensorEntry, WeightReceiver
from headway.weights.object_store import read_object_slice

SEGMENT_PREFIX = "headway"
_ANONYMOUS = re.compile(r"memfd-(\d+)-(\d+)-([0-9a-f]+)")
"""Process, descriptor and a random word; the word tells a segment from whatever has its descriptor later."""
_NAMED = re.compile(rf"{SEGMENT_PREFIX}-(\d+)-[0-9a-f]+")


class SharedSegment:
    """A stretch of memory that other processes can open by its name."""

    def __init__(self, name: str, descriptor: int, *, path: Path | None = None) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._path = path
        """Removed with the segment: a file of our own."""
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """A new one of `size` bytes, owned by this process."""
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
        _sweep_once()
        path = _directory() / f"{SEGMENT_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        return cls(path.name, descriptor, path=path)

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """One made by another process. Raises `TransferError` when it is gone."""
        try:
            return cls(name, _opened(name))
        except (OSError, ValueError) as error:
            raise TransferError(f"shared memory {name!r} cannot be opened: {error}") from error

    @property
    def buffer(self) -> memoryview:
        """All of it. Views keep the memory mapped after `close`."""
        if self._memory is None:
            raise TransferError(f"shared memory {self.name} was closed")
        return memoryview(self._memory)

    def locked(self, *, shared: bool) -> bool:
        """Have it alone, or together with others that have it so, until `close` or the end of this process.

        False where that cannot be now.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Nobody can open it any more, if it is ours; unmapped as soon as nobody has a view. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        os.close(self._descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        with suppress(BufferError):  # a tensor still looks at it: unmapped when the last one goes
            memory.close()


class PayloadReader:
    """Opens slices in the process that reads them. The segments read last stay mapped, older ones are let go."""

    def __init__(self, most: int = 3) -> None:
        self._attached: dict[str, SharedSegment] = {}
        """The one read last at the end."""
        self._most = most

    def buffer(self, payload: Any) -> memoryview:
        """The bytes of a bucket's payload, wherever they are. Raises `TransferError` when they are gone."""
        if isinstance(payload, FileSlice):
            return _read(payload)
        if isinstance(payload, ObjectSlice):
            return read_object_slice(payload)
        if not isinstance(payload, SharedSlice):
            return memoryview(payload).cast("B")
        segment = self._attached.pop(payload.segment, None) or SharedSegment.attach(payload.segment)
        self._attached[payload.segment] = segment
        while len(self._attached) > self._most:
            self._attached.pop(next(iter(self._attached))).close()
        end = payload.start + payload.size
        if not 0 <= payload.start <= end <= segment.size:
            raise TransferError(f"bytes {payload.start} to {end} of shared memory of {segment.size}")
        return segment.buffer[payload.start : end]

    def close(self) -> None:
        """Let everything go."""
        while self._attached:
            self._attached.popitem()[1].close()


def _read(payload: FileSlice) -> memoryview:
    """The bytes of a bucket that lies in files. Raises `TransferError` when they are gone or cut short."""
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
    """Remove the files of dead owners; returns their names."""
    removed = []
    for path in _directory().glob(f"{SEGMENT_PREFIX}-*-*"):
        found = _NAMED.fullmatch(path.name)
        if found and not _alive(int(found[1])):
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


@cache
def _sweep_once() -> None:
    remove_stale_segments()


def _directory() -> Path:
    return Path(tempfile.gettempdir())


def _opened(name: str) -> int:
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


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_VERSIONS = 2


class InProcessTransport:
    """Hands buckets over."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        return bucket

    def close(self) -> None:
        """Do nothing: it holds nothing."""


class SharedMemoryTransport:
    """Puts buckets where another process can read them. Two versions at a time: older ones are refused.

    A version has one segment per bucket, taken over by the version after the next.
    """

    def __init__(self) -> None:
        self._versions: dict[int, dict[int, SharedSegment]] = {}
        self._lock = asyncio.Lock()
        self._closed = False

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        if isinstance(bucket.payload, SharedSlice):
            return bucket
        data = memoryview(bucket.payload).cast("B")
        async with self._lock:
            segment = self._placed(bucket.version).get(bucket.index)
            if segment is None:
                segment = await asyncio.to_thread(self._copy, bucket, data)
        return replace(bucket, payload=SharedSlice(segment=segment.name, start=0, size=data.nbytes))

    def close(self) -> None:
        """Remove the segments. Idempotent."""
        self._closed = True
        for segments in self._versions.values():
            for segment in segments.values():
                segment.close()
        self._versions.clear()

    def _placed(self, version: int) -> dict[int, SharedSegment]:
        """The segments of `version`; room is made for a new one."""
        if self._closed:
            raise TransferError("the transport was closed")
        if version not in self._versions:
            if len(self._versions) >= _VERSIONS and version < min(self._versions):
                raise TransferError(f"version {version} is older than {sorted(self._versions)}, which are on their way")
            while len(self._versions) >= _VERSIONS:
                for segment in self._versions.pop(min(self._versions)).values():
                    segment.close()
            self._versions[version] = {}
        return self._versions[version]

    def _copy(self, bucket: Bucket, data: memoryview) -> SharedSegment:
        segment = SharedSegment.create(data.nbytes)
        segment.buffer[: data.nbytes] = data
        self._versions[bucket.version][bucket.index] = segment
        return segment


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Plain lists and numbers."""
    tensors = [[entry.name, list(entry.shape), entry.dtype] for entry in manifest.tensors]
    return {**asdict(manifest), "tensors": tensors, "checksums": list(manifest.checksums)}


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """Raises `TransferError` for anything else than what `manifest_to_json` gave."""
    try:
        return Manifest(
            version=int(data["version"]),
            tensors=tuple(
                TensorEntry(name=str(name), shape=tuple(int(n) for n in shape), dtype=str(dtype))
                for name, shape, dtype in data["tensors"]
            ),
            checksums=tuple(str(one) for one in data["checksums"]),
            total_bytes=int(data["total_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"not a manifest: {error!r}") from error


def bucket_to_json(bucket: Bucket) -> dict[str, Any]:
    """Of a bucket in shared memory."""
    if not isinstance(bucket.payload, SharedSlice):
        raise TransferError(f"bucket {bucket.index} of version {bucket.version} is not in shared memory")
    return asdict(bucket)


def bucket_from_json(data: Mapping[str, Any]) -> Bucket:
    """Raises `TransferError` for anything else than what `bucket_to_json` gave."""
    try:
        payload = SharedSlice(**data["payload"])
        return Bucket(
            version=int(data["version"]), index=int(data["index"]), checksum=str(data["checksum"]), payload=payload
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"not a bucket: {error!r}") from error
