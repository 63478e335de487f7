"""Only what changed: every way passes the contract with it, sends less, and never serves anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Bucket, UnchangedBucket, WeightReceiver, WeightSource, WeightTransport
from headway.weights.delta_transport import DeltaTransport, RetainingReceiver
from headway.weights.disk_transport import DiskStore, DiskTransport
from headway.weights.host_transports import InProcessTransport, SharedMemoryTransport
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

from ..contracts.weights_contract import WeightsContract
from .test_disk import directory_in, equal
from .test_local_weights import BUCKET_MB, Real, Serving, published, updated, weights

WAYS = ("heap", "shared", "published", "disk")
BUCKET = 1024
"""Bytes of a bucket: `BUCKET_MB`, aligned."""


def adapted(version: int, frozen: int = 0) -> dict[str, Tensor]:
    """Weights of which one small tensor changes from version to version."""
    return {**weights(frozen), "norm.weight": weights(version)["norm.weight"]}


def served(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As an engine that computes in fp32 has them."""
    return {name: one.float() if one.is_floating_point() else one for name, one in tensors.items()}


def keeping(serving: Serving) -> RetainingReceiver:
    return RetainingReceiver(DoubleBufferedReceiver(serving.switch, dtype=torch.float32))


def spare(serving: Serving) -> DoubleBufferedReceiver:
    return DoubleBufferedReceiver(serving.switch, dtype=torch.float32)


class Way:
    """A source, and a delta transport around one of the ways."""

    def __init__(self, kind: str, path: Path) -> None:
        arena = SharedArena() if kind == "published" else None
        self.store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=arena)
        on_disk = DiskStore(self.store, directory_in(path))
        self.source: WeightSource = on_disk if kind == "disk" else self.store
        ways = {"heap": InProcessTransport(), "disk": DiskTransport()}
        self.transport = DeltaTransport(ways.get(kind) or SharedMemoryTransport())

    async def update(self, version: int, tensors: Mapping[str, Tensor], receiver: WeightReceiver) -> tuple[int, int]:
        """Publish and serve; bytes that were sent and that were not."""
        self.store.publish(version, tensors)
        before = self.transport.sent_bytes, self.transport.unchanged_bytes
        await updated(self.source, receiver, version, self.transport)
        return self.transport.sent_bytes - before[0], self.transport.unchanged_bytes - before[1]

    def close(self) -> None:
        self.transport.close()
        self.store.close()


@pytest.fixture
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    made = Way(request.param, tmp_path)
    yield made
    made.close()


class TestDelta(Real, WeightsContract):
    """An engine without weights gets all of a version."""

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return published(), DeltaTransport(InProcessTransport()), DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytearray(b"\x01" + bytes(bucket.payload)[1:]))


class TestKeeping(TestDelta):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        source, transport, receiver = super().make()
        return source, transport, RetainingReceiver(receiver)


@pytest.mark.parametrize("make", [spare, keeping])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_only_changed_buckets_are_sent_and_what_is_served_is_the_whole(way: Way, make: object) -> None:
    async def scenario() -> None:
        assert callable(make)
        serving = Serving()
        receiver = make(serving)
        sent, kept = await way.update(0, adapted(0), receiver)
        total = sent
        assert kept == 0 and total > 6 * BUCKET
        for version in (1, 2, 3, 4):
            sent, kept = await way.update(version, adapted(version), receiver)
            assert 0 < sent <= BUCKET and sent + kept == total, "the one bucket that norm.weight lies in"
            assert equal(serving.tensors, served(adapted(version)))
        assert (await way.update(5, weights(5), receiver))[0] >= total - BUCKET, "everything changed"
        late = make(Serving())
        assert await way.update(6, adapted(6, frozen=5), late) == (total, 0), "a late joiner gets all of it"
        assert late.version == 6

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_changes_is_served_byte_for_byte(seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        generator = torch.Generator().manual_seed(seed)
        way, serving, live = Way("heap", tmp_path), Serving(), weights(0)
        receiver = DoubleBufferedReceiver(serving.switch)
        for version in range(12):
            for name in live:
                if live[name].numel() and torch.rand(1, generator=generator) < 0.3:
                    place = int(torch.randint(live[name].numel(), (1,), generator=generator))
                    live[name].view(-1)[place] += 1
            if torch.rand(1, generator=generator) < 0.15:
                receiver.reset(gone=False)
            if torch.rand(1, generator=generator) < 0.3:  # one that is never finished
                way.store.publish(100 + version, weights(version))
                manifest, buckets = await way.store.gather(100 + version)
                await receiver.begin(manifest)
                await receiver.load(await way.transport.send(await anext(buckets), receiver))
            await way.update(version, live, receiver)
            assert equal(serving.tensors, live)
        assert way.transport.unchanged_bytes > 0
        way.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("make", [spare, keeping])
def test_the_same_number_on_another_branch_is_not_mistaken_for_what_is_served(make: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        assert callable(make)
        way, serving = Way("heap", tmp_path), Serving()
        receiver = make(serving)
        await way.update(6, adapted(6), receiver)
        await way.update(7, adapted(7), receiver)
        await way.update(7, adapted(70), receiver)
        assert equal(serving.tensors, served(adapted(70)))
        await way.update(8, adapted(8), receiver)
        assert equal(serving.tensors, served(adapted(8)))

    asyncio.run(scenario())


@pytest.mark.parametrize("make", [spare, keeping])
def test_a_receiver_refuses_to_keep_what_it_does_not_have_and_is_sent_it_when_it_asks_again(make: object) -> None:
    async def scenario() -> None:
        assert callable(make)
        store, transport, serving = published(wire_dtype=None), DeltaTransport(InProcessTransport()), Serving()
        receiver = make(serving)
        await updated(store, receiver, 1, transport)
        other = make(Serving())
        await updated(store, other, 2, transport)
        manifest, buckets = await store.gather(2)
        await receiver.begin(manifest)
        async for bucket in buckets:
            with pytest.raises(TransferError, match="not what is served"):
                await receiver.load(replace(bucket, payload=UnchangedBucket(size=memoryview(bucket.payload).nbytes)))
            with pytest.raises(TransferError):
                await receiver.flip()
        store.publish(3, weights(2))
        _, buckets = await store.gather(3)
        bucket = await anext(buckets)
        first, second = [await transport.send(bucket, other) for _ in range(2)]
        assert isinstance(first.payload, UnchangedBucket) and second is bucket

    asyncio.run(scenario())
