"""Transports through the memory of hosts: in one process, in shared memory, and in the object store of a cluster.

In one process a bucket is handed over as it is: the receiver copies out of it. Between processes the bytes lie where
both can read them, and only a reference travels. A source that publishes there itself (`SharedArena`, `ObjectArena`)
costs no further copy; buckets from the heap are copied once, whatever the number of engines.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace

from headway.errors import TransferError
from headway.weights.base import Bucket, ObjectSlice, PayloadRef, SharedSlice, WeightReceiver
from headway.weights.shared_memory import SharedSegment, put_object

_VERSIONS = 2


class InProcessTransport:
    """Hands buckets over as they are."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        return bucket

    def close(self) -> None:
        """Do nothing: it holds nothing."""


class _CopyingTransport(ABC):
    """Copies buckets to where other processes can read them. Keeps two versions at a time and refuses older ones."""

    def __init__(self) -> None:
        self._versions: dict[int, dict[tuple[int, str], PayloadRef]] = {}
        self._lock = asyncio.Lock()
        self._closed = False

    @abstractmethod
    def _copy(self, data: memoryview) -> PayloadRef:
        """Copy the bytes of a bucket. Runs on a thread."""

    def _release(self, ref: PayloadRef) -> None:
        """Free what `_copy` has made."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        if isinstance(bucket.payload, PayloadRef):
            return bucket
        key = bucket.index, bucket.checksum
        async with self._lock:
            refs = self._open_version(bucket.version)
            if key not in refs:
                refs[key] = await asyncio.to_thread(self._copy, memoryview(bucket.payload).cast("B"))
        return replace(bucket, payload=refs[key])

    def close(self) -> None:
        """Free all copies. Idempotent."""
        self._closed = True
        for version in list(self._versions):
            self._drop(version)

    def _open_version(self, version: int) -> dict[tuple[int, str], PayloadRef]:
        if self._closed:
            raise TransferError("the transport was closed")
        if version not in self._versions:
            if len(self._versions) >= _VERSIONS and version < min(self._versions):
                raise TransferError(f"version {version} is older than {sorted(self._versions)}, which are on their way")
            while len(self._versions) >= _VERSIONS:
                self._drop(min(self._versions))
            self._versions[version] = {}
        return self._versions[version]

    def _drop(self, version: int) -> None:
        for ref in self._versions.pop(version).values():
            self._release(ref)


class SharedMemoryTransport(_CopyingTransport):
    """Copies buckets into segments of shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[str, SharedSegment] = {}

    def _copy(self, data: memoryview) -> SharedSlice:
        segment = SharedSegment.create(data.nbytes)
        segment.buffer[: data.nbytes] = data
        self._segments[segment.name] = segment
        return SharedSlice(segment=segment.name, start=0, size=data.nbytes)

    def _release(self, ref: PayloadRef) -> None:
        assert isinstance(ref, SharedSlice)
        self._segments.pop(ref.segment).close()


class ObjectTransport(_CopyingTransport):
    """Copies buckets into the object store of a Ray cluster, where every node can read them."""

    def _copy(self, data: memoryview) -> ObjectSlice:
        return put_object(data)
