"""Versions read where they lie, by leases: the contract, and what is kept for whom. Memory is the host's here."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.codec import decode, encode
from headway.errors import TransferError
from headway.trainers.sharded.ranked_trainer import merge_copies
from headway.weights.base import Bucket, IpcSlice, WeightReceiver, WeightSource, WeightTransport
from headway.weights.device_memory import HostMemory, IpcArena, IpcPayloadReader
from headway.weights.host_transports import InProcessTransport
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import WeightStore

from ..contracts.weights_contract import WeightsContract
from .test_local_weights import BUCKET_MB, Real, Serving, updated, weights


class CountingMemory(HostMemory):
    """Counts how often buffers are exported and opened."""

    def __init__(self) -> None:
        super().__init__()
        self.exports = self.opens = 0

    def export(self, data: Tensor) -> tuple[Any, ...]:
        self.exports += 1
        return super().export(data)

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        self.opens += 1
        return super().open(handle)


def store_in(memory: HostMemory) -> tuple[WeightStore, IpcArena]:
    arena = IpcArena(memory)
    return WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=arena), arena


class TestIpc(Real, WeightsContract):
    @pytest.fixture(autouse=True)
    def closing(self) -> Iterator[None]:
        yield
        self.store.close()
        for reader in self.readers:
            reader.close()

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        self.memory, self.readers = HostMemory(), list[IpcPayloadReader]()
        self.store, _ = store_in(self.memory)
        for version in (1, 2):
            self.store.publish(version, weights(version))
        return self.store, InProcessTransport(), self.another()

    def another(self) -> WeightReceiver:
        self.readers.append(IpcPayloadReader(self.memory))
        return DoubleBufferedReceiver(Serving().switch, open_payload=self.readers[-1].open)

    def corrupted(self, bucket: Bucket) -> Bucket:
        self.readers[0].open(bucket.payload).data[0] ^= 1
        return bucket


def test_buffers_are_exported_and_opened_once_and_written_again() -> None:
    async def scenario() -> None:
        memory = CountingMemory()
        store, arena = store_in(memory)
        readers = [IpcPayloadReader(memory) for _ in range(2)]
        serving = [Serving() for _ in readers]
        receivers = [
            DoubleBufferedReceiver(one.switch, open_payload=two.open) for one, two in zip(serving, readers, strict=True)
        ]
        for version in range(9):
            store.publish(version, weights(version))
            for receiver in receivers:
                await updated(store, receiver, version, InProcessTransport())
            for one in serving:
                assert all(torch.equal(one.tensors[name], value) for name, value in weights(version).items())
        assert (arena.buffers, memory.exports, memory.opens) == (3, 3, 6)
        store.close()

    asyncio.run(scenario())


def test_a_version_that_somebody_reads_is_not_written_over() -> None:
    async def scenario() -> None:
        memory = HostMemory()
        (store, arena), numbers = store_in(memory), count()

        def publish() -> int:
            store.publish(version := next(numbers), weights(version))
            return version

        slow = IpcPayloadReader(memory)
        _, buckets = await store_bucket(store, publish())
        payload = buckets[0].payload
        before = slow.open(payload).data.clone()
        for _ in range(6):
            publish()
        assert torch.equal(slow.open(payload).data, before) and arena.buffers == 4, "one more for the slow one"
        late = IpcPayloadReader(memory)
        late.open(payload)
        late.close()
        _, newest = await store_bucket(store, publish())
        slow.open(newest[0].payload)  # it has flipped: the lease of the old one is given back
        publish(), publish()
        assert arena.buffers == 3
        with pytest.raises(TransferError):
            late.open(payload)
        store.close()

    asyncio.run(scenario())


async def store_bucket(store: WeightStore, version: int) -> tuple[Any, list[Bucket]]:
    manifest, buckets = await store.gather(version)
    return manifest, [bucket async for bucket in buckets]


def hold(payload: IpcSlice, pipe: Any) -> None:
    """A process that reads a bucket, and never lets go."""
    found = IpcPayloadReader(HostMemory()).open(payload)
    pipe.send(found.checksum())
    pipe.recv()


def test_the_lease_of_who_is_killed_is_given_back() -> None:
    async def scenario() -> None:
        memory = HostMemory()
        store, arena = store_in(memory)
        store.publish(0, weights(0))
        _, buckets = await store_bucket(store, 0)
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        process = context.Process(target=hold, args=(buckets[0].payload, theirs), daemon=True)
        process.start()
        assert await asyncio.to_thread(ours.recv) == buckets[0].checksum
        for version in range(1, 5):
            store.publish(version, weights(version))
        assert arena.buffers == 4
        process.kill()
        process.join()
        for version in range(5, 8):
            store.publish(version, weights(version))
        assert arena.buffers == 3
        store.close()

    asyncio.run(scenario())


def test_what_cannot_be_read_is_said() -> None:
    async def scenario() -> None:
        memory = HostMemory()
        store, _ = store_in(memory)
        store.publish(0, weights(0))
        _, buckets = await store_bucket(store, 0)
        payload, reader = buckets[0].payload, IpcPayloadReader(memory)
        with pytest.raises(TransferError, match="of a buffer of"):
            reader.open(replace(payload, start=10**6))
        assert bytes(reader.open(memoryview(b"other kinds"))) == b"other kinds"
        store.close()
        with pytest.raises(TransferError, match="cannot be opened"):
            IpcPayloadReader(memory).open(payload)

    asyncio.run(scenario())


def test_every_reader_opens_the_copy_of_its_own_rank() -> None:
    async def scenario() -> None:
        memories = [CountingMemory() for _ in range(2)]
        stores = [
            WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=IpcArena(memory, rank))
            for rank, memory in enumerate(memories)
        ]
        for store in stores:
            store.publish(3, weights(3))
        manifest, buckets = merge_copies([await store_bucket(store, 3) for store in stores])
        for rank, memory in enumerate(memories):
            reader = IpcPayloadReader(memory, rank)
            for bucket in buckets:
                opened = reader.open(decode(encode(bucket.payload)))
                assert opened.checksum() == manifest.checksums[bucket.index]
            assert [one.opens for one in memories] == [1, rank]
            reader.close()
        stores[1].publish(4, weights(5))
        stores[0].publish(4, weights(4))
        with pytest.raises(TransferError, match="copy 1 of the ranks differs"):
            merge_copies([await store_bucket(store, 4) for store in stores])
        for store in stores:
            store.close()

    asyncio.run(scenario())
