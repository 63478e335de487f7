"""The trainer's side of a transfer: consistent copies of the newest versions, given out bucket by bucket.

`publish` copies the live tensors into one flat buffer, on the thread that trains and between two steps; from then on
the trainer may change them. Checksums are computed when a version is first gathered, on another thread, while the
trainer goes on. The newest two versions are held, if not told otherwise: the one that may still be on its way, and the
one after it.

Guarantees: a bucket that `gather` gave out never changes, even when its version is dropped while it is on its way (a
heap buffer lives as long as one of its buckets; a shared one is overwritten only by the third version after it, and
then the receiver's checksum tells). Buckets of a dropped version raise `TransferError`.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, ObjectSlice, SharedSlice, TensorEntry, compute_checksum
from headway.weights.shared_memory import SharedSegment, put_object
from headway.weights.weight_layout import (
    Buffer,
    ReadTensor,
    compute_layout,
    make_tensor_entries,
    pack_tensors,
    split_into_buckets,
)

_HELD_VERSIONS = 2
_MB = 1 << 20


class Arena(ABC):
    """Memory in which versions are kept. A version is known by a key."""

    @abstractmethod
    def take(self, size: int) -> Any:
        """Return the key of a buffer of `size` bytes for the next version."""

    def view(self, key: Any) -> Buffer | Tensor:
        """Return the bytes for writing."""
        buffer: Buffer | Tensor = key
        return buffer

    def seal(self, key: Any) -> None:
        """Finish writing: from now on other threads read the version."""

    def checksum(self, key: Any, place: slice) -> str:
        """Compute the checksum of these bytes."""
        return compute_checksum(self.view(key)[place])

    @abstractmethod
    def payload(self, key: Any, place: slice) -> Any:
        """Return what travels in a bucket for these bytes."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class HeapArena(Arena):
    """Memory of this process: a new buffer for each version, freed with its last bucket."""

    def take(self, size: int) -> Buffer:
        return memoryview(bytearray(size))

    def payload(self, key: Buffer, place: slice) -> Buffer:
        return key[place]


class SharedArena(Arena):
    """Segments of shared memory that versions take in turn.

    There is one segment more than versions are held, so that the next version to be published does not disturb a
    receiver that loads the older one.
    """

    def __init__(self, segments: int = _HELD_VERSIONS + 1) -> None:
        self._segments: list[SharedSegment] = []
        self._most = segments

    def take(self, size: int) -> SharedSegment:
        if len(self._segments) < self._most:
            self._segments.append(SharedSegment.create(size))
            return self._segments[-1]
        oldest = self._segments.pop(0)
        if oldest.size < size:
            oldest.close()
            oldest = SharedSegment.create(size)
        self._segments.append(oldest)
        return oldest

    def view(self, key: SharedSegment) -> Buffer:
        return key.buffer

    def payload(self, key: SharedSegment, place: slice) -> SharedSlice:
        return SharedSlice(segment=key.name, start=place.start, size=place.stop - place.start)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class StoredVersion:
    """One version of an `ObjectArena`: first on the heap, then bucket by bucket in the object store."""

    size: int
    heap: Buffer | None
    """Freed when all of it is stored."""
    slices: dict[int, ObjectSlice] = field(default_factory=dict)
    """Slices that are stored, by their first byte."""


class ObjectArena(Arena):
    """The object store of a Ray cluster: each bucket is put once, when its checksum is computed, on a thread.

    Ray counts the references. A node fetches the bytes when they are first read there, and frees them when no process
    holds them any more. They are lost with the process that put them.
    """

    def take(self, size: int) -> StoredVersion:
        return StoredVersion(size=size, heap=memoryview(bytearray(size)))

    def view(self, key: StoredVersion) -> Buffer:
        if key.heap is None:
            raise TransferError("the version is stored, and can no longer be written")
        return key.heap

    def checksum(self, key: StoredVersion, place: slice) -> str:
        found = super().checksum(key, place)
        self.payload(key, place)
        return found

    def payload(self, key: StoredVersion, place: slice) -> ObjectSlice:
        if place.start not in key.slices:
            key.slices[place.start] = put_object(self.view(key)[place])
            if sum(part.size for part in key.slices.values()) == key.size:
                key.heap = None
        return key.slices[place.start]


@dataclass(slots=True, kw_only=True, eq=False)
class _HeldVersion:
    """One packed version."""

    version: int
    entries: tuple[TensorEntry, ...]
    total: int
    key: Any
    manifest: Manifest | None = None


class WeightStore:
    """A `WeightSource` that a trainer publishes into.

    `wire_dtype` is the type in which floating tensors are sent; `None`: as they are. `versions` is the number of newest
    versions that are held. One is enough where engines wait for a version before the next is made.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 512,
        wire_dtype: torch.dtype | None = torch.bfloat16,
        arena: Arena | None = None,
        versions: int = _HELD_VERSIONS,
    ) -> None:
        self._bucket_bytes = int(bucket_mb * _MB)
        self.wire_dtype = wire_dtype
        self._arena: Arena = arena or HeapArena()
        self._versions = versions
        self._held: dict[int, _HeldVersion] = {}
        self._lock = threading.Lock()

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: ReadTensor | None = None) -> None:
        """Hold a copy of `tensors` as `version`, and drop what is too old. Any thread.

        Where the values lie in many processes, `tensors` only describes them, and `read` returns one by its name, in
        the order of `make_tensor_entries`.
        """
        entries = make_tensor_entries(tensors, self.wire_dtype)
        extents, total = compute_layout(entries)
        with self._lock:
            self._held.pop(version, None)
            while len(self._held) >= self._versions:
                del self._held[next(iter(self._held))]
            key = self._arena.take(total)
        pack_tensors(read or tensors.__getitem__, extents, self._arena.view(key))
        self._arena.seal(key)
        with self._lock:
            self._held[version] = _HeldVersion(version=version, entries=entries, total=total, key=key)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        self.clear()
        self._arena.close()

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        held = self._held.get(version)
        if held is None:
            raise TransferError(f"version {version} is not held; there are {sorted(self._held)}")
        if held.manifest is None:
            held.manifest = await asyncio.to_thread(self._make_manifest, held)
            self._check_held(held)
        return held.manifest, self._iterate_buckets(held, held.manifest)

    async def _iterate_buckets(self, held: _HeldVersion, manifest: Manifest) -> AsyncIterator[Bucket]:
        for index, place in enumerate(split_into_buckets(held.total, self._bucket_bytes)):
            self._check_held(held)
            payload = self._arena.payload(held.key, place)
            yield Bucket(version=held.version, index=index, checksum=manifest.checksums[index], payload=payload)

    def _make_manifest(self, held: _HeldVersion) -> Manifest:
        places = split_into_buckets(held.total, self._bucket_bytes)
        sums = tuple(self._arena.checksum(held.key, place) for place in places)
        return Manifest(version=held.version, tensors=held.entries, checksums=sums, total_bytes=held.total)

    def _check_held(self, held: _HeldVersion) -> None:
        if self._held.get(held.version) is not held:
            raise TransferError(f"version {held.version} was given up while it was gathered")


class NonPublishingStore:
    """The store of ranks that publish nothing. It reads all tensors in the same order as the store of rank 0.

    Reading a sharded tensor is a collective operation, in which every rank takes part.
    """

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self.wire_dtype = wire_dtype

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: ReadTensor | None = None) -> None:
        for entry in make_tensor_entries(tensors, self.wire_dtype):
            if read is not None and all(entry.shape):
                read(entry.name)

    def clear(self) -> None:
        """Do nothing: no version is held."""

    def close(self) -> None:
        """Do nothing: no memory is held."""

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        raise TransferError(f"version {version} is published by rank 0")
