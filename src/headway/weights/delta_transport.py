"""Only what changed: buckets whose bytes the receiver already serves are not sent again.

    transport = DeltaTransport(SharedMemoryTransport())        around any other way
    receiver = KeepingReceiver(engine.receiver)                around an engine's; `SpareReceiver` needs none

Where parts of a model are frozen, or only adapters are trained, most buckets of a version are those of the version
before. Such a bucket travels as one word (`UnchangedBucket`), and its receiver takes the bytes from what it serves. So buckets
should be small here (16 MB rather than 512): one changed number sends its whole bucket.

Guarantees: a receiver that serves nothing, or something that this transport did not send, gets the full version. It
takes a kept bucket only if the checksum of what it has is the one in the manifest; otherwise that is a `TransferError`,
and whoever asks a second time for a bucket gets all of it. A version is flipped to when every checksum of its manifest
is accounted for, as without delta.

Does not know more than checksums: a bucket that changed and has the old CRC-32 all the same, one in four thousand
million, is taken for unchanged until it changes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    Manifest,
    UnchangedBucket,
    WeightReceiver,
    WeightTransport,
    payload_size,
)
from headway.weights.shared_memory import PayloadReader


@dataclass(slots=True, eq=False)
class _Sent:
    """What one receiver was sent of one version."""

    version: int
    sums: dict[int, str] = field(default_factory=dict)
    """Checksum by bucket."""
    kept: set[int] = field(default_factory=set)
    """Those that were left out."""


class DeltaTransport:
    """A `WeightTransport` around another one. Remembers by checksum what each receiver has."""

    def __init__(self, inner: WeightTransport) -> None:
        self._inner = inner
        self._sent: WeakKeyDictionary[WeightReceiver, _Sent] = WeakKeyDictionary()
        self._serves: WeakKeyDictionary[WeightReceiver, _Sent] = WeakKeyDictionary()
        self.sent_bytes = 0
        self.kept_bytes = 0

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        sent, size = self._begun(bucket, receiver), payload_size(bucket.payload)
        base, again = self._base(receiver), bucket.index in sent.kept
        sent.sums[bucket.index] = bucket.checksum
        if base.get(bucket.index) == bucket.checksum and not again:
            sent.kept.add(bucket.index)
            self.kept_bytes += size
            return replace(bucket, payload=UnchangedBucket(size=size))
        moved = await self._inner.send(bucket, receiver)
        self.sent_bytes += size
        return moved

    def close(self) -> None:
        """Close the transport inside."""
        self._inner.close()

    def _begun(self, bucket: Bucket, receiver: WeightReceiver) -> _Sent:
        """The version on its way to `receiver`; another number, or other bytes under the same one, begin a new one."""
        sent, known = self._sent.get(receiver), bucket.checksum
        if sent is None or sent.version != bucket.version or sent.sums.get(bucket.index, known) != known:
            if sent is not None and receiver.version == sent.version:
                self._serves[receiver] = sent
            sent = self._sent[receiver] = _Sent(bucket.version)
        return sent

    def _base(self, receiver: WeightReceiver) -> Mapping[int, str]:
        """What it serves, as far as it came through here; nothing after a restart."""
        serves = self._serves.get(receiver)
        return serves.sums if serves is not None and serves.version == receiver.version else {}


class RetainingReceiver:
    """A `WeightReceiver` around another one, which it gives kept buckets from a copy of the version it serves.

    For engines that lay weights out in their own way. The copy is in the memory of the host, one version in size; where
    buckets cross a network or a disk, that is what it costs to leave most of them out. `read` opens payloads.
    """

    def __init__(self, inner: WeightReceiver, *, read: Callable[[Any], Any] | None = None) -> None:
        self._inner = inner
        self._read = read or PayloadReader().buffer
        self._manifest: Manifest | None = None
        self._next: dict[int, memoryview] = {}
        self._served: tuple[Manifest, dict[int, memoryview]] | None = None

    @property
    def version(self) -> int:
        return self._inner.version

    async def begin(self, manifest: Manifest) -> None:
        self._manifest, self._next = None, {}
        if self._served is not None and self._served[0].version != self._inner.version:
            self._served = None  # it has been restarted
        await self._inner.begin(manifest)
        self._manifest = manifest

    async def load(self, bucket: Bucket) -> None:
        if isinstance(bucket.payload, UnchangedBucket):
            data = self._kept(bucket)
        elif isinstance(bucket.payload, DevicePayload):
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} lies on a device")
        else:
            data = await asyncio.to_thread(self._copy, bucket.payload)
        await self._inner.load(replace(bucket, payload=data))
        self._next[bucket.index] = data

    async def flip(self) -> None:
        await self._inner.flip()
        assert self._manifest is not None
        self._served, self._manifest, self._next = (self._manifest, self._next), None, {}

    def _copy(self, payload: Any) -> memoryview:
        return memoryview(bytearray(self._read(payload)))

    def _kept(self, bucket: Bucket) -> memoryview:
        """Verified again by whoever it is given to."""
        place = slice(bucket.index, bucket.index + 1)
        wanted = () if self._manifest is None else self._manifest.checksums[place]
        if self._served is None or not wanted or self._served[0].checksums[place] != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} is not what is served here")
        return self._served[1][bucket.index]
