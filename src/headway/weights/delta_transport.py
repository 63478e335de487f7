"""Sends only what changed: buckets whose bytes the receiver already serves are not sent again.

    transport = DeltaTransport(SharedMemoryTransport())        around any other transport
    receiver = RetainingReceiver(engine.receiver)              around an engine's; `DoubleBufferedReceiver` needs none

docs/architecture.md says where that pays. Buckets should be small here (16 MB rather than 512), because one changed
number sends its whole bucket.

Guarantees: a receiver that serves nothing, or something that this transport did not send, gets the full version. It
accepts an `UnchangedBucket` only if the checksum of what it has is the one in the manifest; otherwise it raises
`TransferError`, and a bucket that is sent a second time is sent in full. A bucket that changed and has the old CRC-32
all the same (one in four thousand million) is taken for unchanged until it changes again.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    Manifest,
    OpenPayload,
    UnchangedBucket,
    WeightReceiver,
    WeightTransport,
    payload_size,
)
from headway.weights.shared_memory import PayloadReader


@dataclass(slots=True, eq=False)
class _SentVersion:
    """Buckets of one version that one receiver was sent."""

    version: int
    sums: dict[int, str] = field(default_factory=dict)
    """Checksum by bucket."""
    unchanged: set[int] = field(default_factory=set)
    """Buckets that were not sent in full."""


class DeltaTransport:
    """A `WeightTransport` around another one, which remembers by checksum what each receiver has."""

    def __init__(self, inner: WeightTransport) -> None:
        self._inner = inner
        self._sent: WeakKeyDictionary[WeightReceiver, _SentVersion] = WeakKeyDictionary()
        self._serves: WeakKeyDictionary[WeightReceiver, _SentVersion] = WeakKeyDictionary()
        self.sent_bytes = 0
        self.unchanged_bytes = 0

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        sent, size = self._track(bucket, receiver), payload_size(bucket.payload)
        served, is_repeated = self._find_served(receiver), bucket.index in sent.unchanged
        sent.sums[bucket.index] = bucket.checksum
        if served.get(bucket.index) == bucket.checksum and not is_repeated:
            sent.unchanged.add(bucket.index)
            self.unchanged_bytes += size
            return replace(bucket, payload=UnchangedBucket(size=size))
        result = await self._inner.send(bucket, receiver)
        self.sent_bytes += size
        return result

    def close(self) -> None:
        """Close the transport inside."""
        self._inner.close()

    def _track(self, bucket: Bucket, receiver: WeightReceiver) -> _SentVersion:
        """Return the version on its way to `receiver`, a new one for another number or other bytes."""
        sent, checksum = self._sent.get(receiver), bucket.checksum
        if sent is None or sent.version != bucket.version or sent.sums.get(bucket.index, checksum) != checksum:
            if sent is not None and receiver.version == sent.version:
                self._serves[receiver] = sent
            sent = self._sent[receiver] = _SentVersion(bucket.version)
        return sent

    def _find_served(self, receiver: WeightReceiver) -> Mapping[int, str]:
        """Return the checksums of what the receiver serves, if it came through here; nothing after a restart."""
        serves = self._serves.get(receiver)
        return serves.sums if serves is not None and serves.version == receiver.version else {}


class RetainingReceiver:
    """A `WeightReceiver` around another one, to which it passes unchanged buckets from a copy of the served version.

    It is for engines that lay weights out in their own way. The copy is in the memory of the host, one version in size:
    that is the price of leaving most buckets out where they cross a network or a disk.
    """

    def __init__(self, inner: WeightReceiver, *, open_payload: OpenPayload | None = None) -> None:
        self._inner = inner
        self._open_payload = open_payload or PayloadReader().open
        self._manifest: Manifest | None = None
        self._next: dict[int, memoryview] = {}
        self._served: tuple[Manifest, dict[int, memoryview]] | None = None

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def checksum(self) -> str:
        return str(getattr(self._inner, "checksum", ""))

    async def begin(self, manifest: Manifest) -> None:
        self._manifest, self._next = None, {}
        if self._served is not None and self._served[0].version != self._inner.version:
            self._served = None  # the engine has been restarted
        await self._inner.begin(manifest)
        self._manifest = manifest

    async def load(self, bucket: Bucket) -> None:
        if isinstance(bucket.payload, UnchangedBucket):
            data = self._find_unchanged(bucket)
        elif isinstance(bucket.payload, DevicePayload):
            raise TransferError(f"{bucket.describe()} lies on a device")
        else:
            data = await asyncio.to_thread(self._copy, bucket.payload)
        await self._inner.load(replace(bucket, payload=data))
        self._next[bucket.index] = data

    async def flip(self) -> None:
        await self._inner.flip()
        assert self._manifest is not None
        self._served, self._manifest, self._next = (self._manifest, self._next), None, {}

    def _copy(self, payload: Any) -> memoryview:
        return memoryview(bytearray(self._open_payload(payload)))

    def _find_unchanged(self, bucket: Bucket) -> memoryview:
        """Return the served bytes of a bucket, which the inner receiver verifies again."""
        place = slice(bucket.index, bucket.index + 1)
        wanted = () if self._manifest is None else self._manifest.checksums[place]
        if self._served is None or not wanted or self._served[0].checksums[place] != wanted:
            raise TransferError(f"{bucket.describe()} is not what is served here")
        return self._served[1][bucket.index]
