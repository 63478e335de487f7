"""Weights through the object store of a Ray cluster: put once, read on every node without a copy of its own.

A trainer that publishes into an `ObjectArena` puts each bucket when its checksum is counted; `ObjectTransport` does the
same for buckets that lie on the heap. What travels in a bucket is a reference, which Ray counts: a node fetches the
bytes when they are first read there, engines on one node share them, and they are freed when the version is let go of
and nobody reads them any more. They are lost with the process that put them: whoever reads then gets a `TransferError`.

Must run in a process that is connected to Ray. Loads into engines are verified there, as on every other way.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from headway.errors import TransferError
from headway.weights.base import Bucket, ObjectSlice, WeightReceiver, compute_checksum

_VERSIONS = 2
_READ_S = 300.0
"""How long a bucket may take to come from another node."""


@dataclass(slots=True, kw_only=True, eq=False)
class StoredVersion:
    """One version: first on the heap, then bucket by bucket in the store."""

    size: int
    heap: memoryview | None
    """Given back when all of it is stored."""
    placed: dict[int, ObjectSlice] = field(default_factory=dict)
    """By the first byte."""


class ObjectArena:
    """An `Arena` whose versions end up in the object store. `compute_checksum` is asked on a thread, and puts the bytes."""

    def take(self, size: int) -> StoredVersion:
        return StoredVersion(size=size, heap=memoryview(bytearray(size)))

    def view(self, key: StoredVersion) -> memoryview:
        return _heap(key)

    def sealed(self, key: StoredVersion) -> None:
        """Nobody reads it before it is stored."""

    def checksum(self, key: StoredVersion, place: slice) -> str:
        found = compute_checksum(_heap(key)[place])
        self.payload(key, place)
        return found

    def payload(self, key: StoredVersion, place: slice) -> ObjectSlice:
        if place.start not in key.placed:
            key.placed[place.start] = _put(_heap(key)[place])
            if sum(one.size for one in key.placed.values()) == key.size:
                key.heap = None
        return key.placed[place.start]

    def close(self) -> None:
        """Versions go with whoever holds them."""


class ObjectTransport:
    """Puts buckets that are not stored yet where every node can read them. Two versions at a time, no older ones."""

    def __init__(self) -> None:
        self._versions: dict[int, dict[tuple[int, str], ObjectSlice]] = {}
        self._lock = asyncio.Lock()
        self._closed = False

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        if isinstance(bucket.payload, ObjectSlice):
            return bucket
        async with self._lock:
            placed = self._placed(bucket.version)
            which = (bucket.index, bucket.checksum)
            if which not in placed:
                placed[which] = await asyncio.to_thread(_put, memoryview(bucket.payload).cast("B"))
        return replace(bucket, payload=placed[which])

    def close(self) -> None:
        """Let every version go. Idempotent."""
        self._closed = True
        self._versions.clear()

    def _placed(self, version: int) -> dict[tuple[int, str], ObjectSlice]:
        if self._closed:
            raise TransferError("the transport was closed")
        if version not in self._versions:
            if len(self._versions) >= _VERSIONS and version < min(self._versions):
                raise TransferError(f"version {version} is older than {sorted(self._versions)}, which are on their way")
            while len(self._versions) >= _VERSIONS:
                del self._versions[min(self._versions)]
            self._versions[version] = {}
        return self._versions[version]


def read_object_slice(payload: ObjectSlice, timeout_s: float = _READ_S) -> memoryview:
    """The bytes of a bucket, where this node has them; read-only. Raises `TransferError` when they are gone."""
    from ray.exceptions import RayError

    try:
        found = memoryview(payload.ref.future().result(timeout_s)).cast("B")
    except (RayError, TimeoutError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise TransferError(f"a stored bucket cannot be read: {type(error).__name__}: {why}") from error
    if found.nbytes != payload.size:
        raise TransferError(f"a stored bucket has {found.nbytes} bytes instead of {payload.size}")
    return found


def _put(data: memoryview) -> ObjectSlice:
    import numpy as np
    import ray
    from ray.exceptions import RayError

    try:
        ref: Any = ray.put(np.frombuffer(data, dtype=np.uint8))
    except RayError as error:
        raise TransferError(f"{data.nbytes} bytes cannot be stored: {error}") from error
    return ObjectSlice(ref=ref, size=data.nbytes)


def _heap(key: StoredVersion) -> memoryview:
    if key.heap is None:
        raise TransferError("the version is stored, and can no longer be written")
    return key.heap
