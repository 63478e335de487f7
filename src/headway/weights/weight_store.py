"""The trainer's side: consistent copies of the newest versions, given out bucket by bucket.

`publish` copies the live tensors into one flat buffer, on the thread that trains and between two steps; from then on
the trainer may do what it likes. Checksums are counted when a version is first gathered, on another thread, while the
trainer goes on. The newest two versions are held: the one that may still be on its way, and the one after it.

Guarantees: what `gather` gives out never changes, even when the version is dropped while it is on its way (a heap
buffer lives as long as somebody holds a bucket of it; a shared one is overwritten only by the third version after it,
and then the receiver's checksum says so). Buckets of a dropped version raise `TransferError`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, SharedSlice, TensorEntry, compute_checksum
from headway.weights.shared_memory import SharedSegment
from headway.weights.weight_layout import (
    Buffer,
    ReadTensor,
    compute_layout,
    make_tensor_entries,
    pack_tensors,
    split_into_buckets,
)

_HELD = 2
_MB = 1 << 20


class Arena(Protocol):
    """Where versions are kept."""

    def take(self, size: int) -> Any:
        """A buffer of `size` bytes for the next version, known by a key."""
        ...

    def view(self, key: Any) -> Buffer | Tensor:
        """Its bytes, for writing."""
        ...

    def sealed(self, key: Any) -> None:
        """It was written: from now on others read it, in other threads."""
        ...

    def checksum(self, key: Any, place: slice) -> str:
        """Of these bytes."""
        ...

    def payload(self, key: Any, place: slice) -> Any:
        """What travels in a bucket for these bytes."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class HeapArena:
    """Plain memory of this process; a fresh buffer for each version, freed with its last bucket."""

    def take(self, size: int) -> Buffer:
        return memoryview(bytearray(size))

    def view(self, key: Buffer) -> Buffer:
        return key

    def sealed(self, key: Buffer) -> None:
        """Whoever holds the buffer can read it."""

    def checksum(self, key: Buffer, place: slice) -> str:
        return compute_checksum(key[place])

    def payload(self, key: Buffer, place: slice) -> Buffer:
        return key[place]

    def close(self) -> None:
        """Nothing is kept here."""


class SharedArena:
    """Segments of shared memory that versions take in turn.

    One more than there are versions held: whoever loads the older one is not disturbed by the next to be published.
    """

    def __init__(self, segments: int = _HELD + 1) -> None:
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

    def sealed(self, key: SharedSegment) -> None:
        """Whoever opens the segment can read it."""

    def checksum(self, key: SharedSegment, place: slice) -> str:
        return compute_checksum(key.buffer[place])

    def payload(self, key: SharedSegment, place: slice) -> SharedSlice:
        return SharedSlice(segment=key.name, start=place.start, size=place.stop - place.start)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """One version, packed."""

    version: int
    entries: tuple[TensorEntry, ...]
    total: int
    key: Any
    manifest: Manifest | None = None


class WeightStore:
    """A `WeightSource` that a trainer publishes into. `wire` is what floating tensors travel as; None: as they are."""

    def __init__(
        self, *, bucket_mb: float = 512, wire: torch.dtype | None = torch.bfloat16, arena: Arena | None = None
    ) -> None:
        self._bucket_bytes = int(bucket_mb * _MB)
        self._wire = wire
        self._arena: Arena = arena or HeapArena()
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: ReadTensor | None = None) -> None:
        """Hold a copy of `tensors` as `version`, and forget what is older than the one before. Any thread.

        Where they are only described by `tensors`, as those are that lie in many processes, `read` gives one by its
        name, in the order of `make_tensor_entries`.
        """
        entries = make_tensor_entries(tensors, self._wire)
        extents, total = compute_layout(entries)
        with self._lock:
            self._held.pop(version, None)
            while len(self._held) >= _HELD:
                del self._held[next(iter(self._held))]
            key = self._arena.take(total)
        pack_tensors(read or tensors.__getitem__, extents, self._arena.view(key))
        self._arena.sealed(key)
        with self._lock:
            self._held[version] = _Held(version=version, entries=entries, total=total, key=key)

    def clear(self) -> None:
        """Hold nothing: the trainer is gone, or about to become something else."""
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.clear()
        self._arena.close()

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        held = self._held.get(version)
        if held is None:
            raise TransferError(f"version {version} is not held; there are {sorted(self._held)}")
        if held.manifest is None:
            held.manifest = await asyncio.to_thread(self._manifest_of, held)
            self._check(held)
        return held.manifest, self._buckets(held, held.manifest)

    async def _buckets(self, held: _Held, manifest: Manifest) -> AsyncIterator[Bucket]:
        for index, place in enumerate(split_into_buckets(held.total, self._bucket_bytes)):
            self._check(held)
            payload = self._arena.payload(held.key, place)
            yield Bucket(version=held.version, index=index, checksum=manifest.checksums[index], payload=payload)

    def _manifest_of(self, held: _Held) -> Manifest:
        sums = tuple(
            self._arena.checksum(held.key, place) for place in split_into_buckets(held.total, self._bucket_bytes)
        )
        return Manifest(version=held.version, tensors=held.entries, checksums=sums, total_bytes=held.total)

    def _check(self, held: _Held) -> None:
        if self._held.get(held.version) is not held:
            raise TransferError(f"version {held.version} was given up while it was gathered")


class NonPublishingStore:
    """The store of the ranks that publish nothing: helps to gather what rank 0 publishes, in the same order."""

    def __init__(self, wire: torch.dtype | None) -> None:
        self._wire = wire

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: ReadTensor | None = None) -> None:
        for entry in make_tensor_entries(tensors, self._wire):
            if read is not None and all(entry.shape):
                read(entry.name)

    def clear(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        raise TransferError(f"version {version} is published by rank 0")
