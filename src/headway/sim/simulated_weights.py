"""Simulated weights: versions consist of checksums only, but are gathered, sent, verified and flipped for real.

The payload of a bucket is the checksum of what arrived, so a corrupted bucket is found as a real one is: by the
receiver, against the manifest. Costs are those of a whole version, spread evenly over its buckets.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from hashlib import blake2b

from headway.config import simulation_config as costs
from headway.errors import EngineCrashed, TransferError
from headway.sim.fault_injection import BackendHealth
from headway.weights.base import Bucket, Manifest, TensorEntry, WeightReceiver

_VERSIONS_HELD = 2
"""Versions that a source holds: the newest, and the one that may still be on its way."""
_BYTES_PER_BUCKET = 1 << 20


def make_simulated_manifest(version: int, lineage: str, buckets: int) -> Manifest:
    """Return the manifest of `version`; another `lineage` (what it was trained on) gives other checksums."""
    sums = tuple(_hash(f"{lineage}/{version}/{index}") for index in range(buckets))
    names = (f"bucket.{index}" for index in range(buckets))
    tensors = tuple(TensorEntry(name=name, shape=(_BYTES_PER_BUCKET,), dtype="uint8") for name in names)
    return Manifest(version=version, tensors=tensors, checksums=sums, total_bytes=buckets * _BYTES_PER_BUCKET)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


class SimulatedSource:
    """The trainer's side: holds the newest two versions, and none while the trainer is down."""

    def __init__(
        self, cost: costs.SimulatedWeightsConfig | None = None, *, health: BackendHealth | None = None
    ) -> None:
        self._cost = cost or costs.SimulatedWeightsConfig()
        self._health = health or BackendHealth("trainer")
        self._held: dict[int, Manifest] = {}

    def publish(self, version: int, lineage: str = "") -> None:
        """Hold `version`, and forget versions older than the one before it."""
        self._held.pop(version, None)
        self._held[version] = make_simulated_manifest(version, lineage, self._cost.buckets)
        while len(self._held) > _VERSIONS_HELD:
            del self._held[next(iter(self._held))]

    def clear(self) -> None:
        """Forget all versions: the trainer is down, or about to load a checkpoint."""
        self._held.clear()

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        manifest = self._held.get(version)
        if manifest is None:
            raise TransferError(f"version {version} is not held; there are {sorted(self._held)}")
        return manifest, self._buckets(manifest)

    async def _buckets(self, manifest: Manifest) -> AsyncIterator[Bucket]:
        each_s = self._cost.gather_s / len(manifest.checksums)
        for index, checksum in enumerate(manifest.checksums):
            await self._health.spend(each_s, TransferError)
            if not self._held:
                raise TransferError(f"the trainer went down while version {manifest.version} was gathered")
            yield Bucket(version=manifest.version, index=index, checksum=checksum, payload=checksum)


class SimulatedTransport:
    """The way between: sends to any number of receivers at once. Faults call it `weights`."""

    def __init__(
        self, cost: costs.SimulatedWeightsConfig | None = None, *, health: BackendHealth | None = None
    ) -> None:
        self._cost = cost or costs.SimulatedWeightsConfig()
        self._health = health or BackendHealth("weights")

    async def send(self, bucket: Bucket, receiver: WeightReceiver) -> Bucket:
        await self._health.deliver(TransferError)
        await self._health.spend(self._cost.send_s / self._cost.buckets, TransferError)
        if self._health.take("corrupted_bucket"):
            return replace(bucket, payload=f"not {bucket.payload}")
        return bucket

    def close(self) -> None:
        """Do nothing: it holds nothing."""


class SimulatedReceiver:
    """The engine's side. `switch` stops the engine between two actions, sets `version` and lets it continue."""

    def __init__(
        self,
        switch: Callable[[int], Awaitable[None]],
        cost: costs.SimulatedWeightsConfig | None = None,
        *,
        health: BackendHealth | None = None,
    ) -> None:
        self.version = -1
        self.gone = False
        """Whether the engine is down, so that loading fails."""
        self._switch = switch
        self._cost = cost or costs.SimulatedWeightsConfig()
        self._health = health or BackendHealth()
        self._manifest: Manifest | None = None
        self._loaded: set[int] = set()

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._manifest = manifest
        self._loaded = set()

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        manifest = self._manifest
        where = f"bucket {bucket.index} of version {bucket.version}"
        if manifest is None or manifest.version != bucket.version:
            begun = "nothing" if manifest is None else f"version {manifest.version}"
            raise TransferError(f"{where}: {begun} was begun")
        if not 0 <= bucket.index < len(manifest.checksums):
            raise TransferError(f"{where}: there are {len(manifest.checksums)}")
        await self._health.spend(self._cost.load_s / len(manifest.checksums), EngineCrashed)
        if self._manifest is not manifest:
            raise TransferError(f"{where}: thrown away, another version was begun meanwhile")
        if bucket.payload != manifest.checksums[bucket.index]:
            raise TransferError(f"{where}: checksum {bucket.payload} instead of {manifest.checksums[bucket.index]}")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        manifest = self._manifest
        if manifest is None:
            raise TransferError("no version was begun")
        missing = len(manifest.checksums) - len(self._loaded)
        if missing:
            raise TransferError(f"version {manifest.version} lacks {missing} of {len(manifest.checksums)} buckets")
        await self._switch(manifest.version)
        self._manifest = None

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version = -1
        self.gone = gone
        self._manifest = None
        self._loaded = set()

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
