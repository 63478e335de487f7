"""Ways between a trainer and an engine on one machine, and how a version is written down for another process.

In one process a bucket is handed over as it is: the receiver copies out of it. Between processes the bytes lie in
shared memory and three words travel. A source that publishes into shared memory (`SharedArena`) costs no further copy;
buckets from the heap are copied once, whatever the number of engines.

Whoever runs an engine in another process opens payloads there (`SharedReader`); the engine sees plain buffers.
The JSON forms hold no bytes: only buckets whose payload is in shared memory have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, SharedSlice, TensorEntry, WeightReceiver
from headway.weights.segment import Segment

_VERSIONS = 2


class InProcessTransport:
    """Hands buckets over."""

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        return bucket


class SharedMemoryTransport:
    """Puts buckets where another process can read them. Two versions at a time: older ones are refused.

    A version has one segment per bucket, taken over by the version after the next.
    """

    def __init__(self) -> None:
        self._versions: dict[int, dict[int, Segment]] = {}
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

    def _placed(self, version: int) -> dict[int, Segment]:
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

    def _copy(self, bucket: Bucket, data: memoryview) -> Segment:
        segment = Segment.create(data.nbytes)
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
