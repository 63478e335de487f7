"""Broadcasts over gloo: the contract, real processes, late joiners, and ranks that are killed or never come."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    Manifest,
    ReceivedBuffer,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from headway.weights.broadcast_transport import BroadcastInbox, BroadcastTransport
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

from ..contracts.weights_contract import WeightsContract
from .test_local_weights import BUCKET_MB, Real, Serving, published, updated, weights

HERE = "127.0.0.1"
Sums = dict[str, float]


class TestBroadcast(Real, WeightsContract):
    @pytest.fixture(autouse=True)
    def closing(self) -> Iterator[None]:
        yield
        for inbox in self.inboxes:
            inbox.close()
        self.transport.close()

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        self.transport = BroadcastTransport(timeout_s=30)
        self.inboxes = [BroadcastInbox("engine/0", HERE, self.transport.port)]
        receiver = DoubleBufferedReceiver(Serving().switch, open_payload=self.inboxes[0].open)
        self.transport.admit(receiver, "engine/0")
        return published(), self.transport, receiver

    def another(self) -> WeightReceiver:
        self.inboxes.append(BroadcastInbox("engine/1", HERE, self.transport.port))
        receiver = DoubleBufferedReceiver(Serving().switch, open_payload=self.inboxes[-1].open)
        self.transport.admit(receiver, "engine/1")
        return receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        self.inboxes[0].open(bucket.payload)[0] ^= 1
        return bucket


def sums(version: int) -> Sums:
    return {name: float(one.double().sum()) for name, one in weights(version).items()}


def engine(name: str, port: int, pipe: Any) -> None:
    """A process with a receiver, told what to do over a pipe. It dies in the middle of a version if told so."""
    torch.set_num_threads(1)
    serving = Serving()
    inbox = BroadcastInbox(name, HERE, port)
    receiver = DoubleBufferedReceiver(serving.switch, open_payload=inbox.open)
    pipe.send("ready")

    async def obey(call: str, argument: Any) -> Any:
        if call == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if call == "flip":
                await receiver.flip()
                return receiver.version, {key: float(one.double().sum()) for key, one in serving.tensors.items()}
            await getattr(receiver, call)(argument)
        except TransferError as error:
            return error
        return None

    while (order := pipe.recv()) is not None:
        pipe.send(asyncio.run(obey(*order)))
    inbox.close()


class Remote:
    """The receiver of an engine in another process."""

    def __init__(self, name: str, transport: BroadcastTransport) -> None:
        self.version, self.sums = -1, {}
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.process = context.Process(target=engine, args=(name, transport.port, theirs), daemon=True)
        self.process.start()
        assert self.pipe.recv() == "ready"
        transport.admit(self, name)

    async def ask(self, call: str, argument: Any = None) -> Any:
        self.pipe.send((call, argument))
        answer = await asyncio.to_thread(self.pipe.recv)
        if isinstance(answer, TransferError):
            raise answer
        return answer

    async def begin(self, manifest: Manifest) -> None:
        await self.ask("begin", manifest)

    async def load(self, bucket: Bucket) -> None:
        assert isinstance(bucket.payload, ReceivedBuffer)
        await self.ask("load", bucket)

    async def flip(self) -> None:
        self.version, self.sums = await self.ask("flip")

    def kill(self) -> None:
        self.pipe.send(("die", None))
        self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join()


def test_engines_in_other_processes_come_go_and_are_lost() -> None:
    async def scenario() -> None:
        store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=SharedArena())
        transport = BroadcastTransport(timeout_s=9)
        first, second = Remote("engine/0", transport), Remote("engine/1", transport)
        engines = [first, second]
        for version in (0, 1):
            store.publish(version, weights(version))
            await asyncio.gather(*(updated(store, one, version, transport) for one in engines))
            assert [one.version for one in engines] == [version] * 2 and first.sums == second.sums == sums(version)
        late = Remote("engine/2", transport)
        await updated(store, late, 1, transport)
        assert (late.version, late.sums) == (1, sums(1)), "point to point: the others were not asked"
        store.publish(2, weights(2))
        second.kill()
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(updated(store, one, 2, transport) for one in (first, late)), lost(store, second, transport)
            )
        assert first.sums == late.sums == sums(2), "the others are not held up"
        back = Remote("engine/1", transport)
        await updated(store, back, 2, transport)
        assert back.sums == sums(2), "a new life of the same name"
        for one in (first, late, back):
            one.close()
        transport.close()
        store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", ["the group is formed", "the bucket is broadcast"])
def test_an_engine_that_is_stopped_is_named_with_the_phase_and_the_others_go_on(phase: str) -> None:
    async def scenario() -> None:
        store = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=SharedArena())
        transport = BroadcastTransport(timeout_s=3)
        first, second = Remote("engine/0", transport), Remote("engine/1", transport)
        store.publish(0, weights(0))
        if phase == "the bucket is broadcast":
            await asyncio.gather(*(updated(store, one, 0, transport) for one in (first, second)))
        os.kill(second.process.pid or 0, signal.SIGSTOP)
        store.publish(1, weights(1))
        _, buckets = await store.gather(1)
        bucket = await anext(buckets)
        async with asyncio.timeout(60):
            with pytest.raises(TransferError, match=rf"engine/1: rank 2 of 3 did not answer within 1 s while {phase}"):
                await transport.send(bucket, second)
            await updated(store, first, 1, transport)
            with pytest.raises(TransferError, match="engine/1: rank 2 of 3"):
                await transport.send(bucket, second)
        assert first.sums == sums(1)
        second.process.kill()
        back = Remote("engine/1", transport)
        await updated(store, back, 1, transport)
        assert back.sums == sums(1)
        for one in (first, back):
            one.close()
        transport.close()
        store.close()

    asyncio.run(scenario())


async def lost(store: WeightStore, receiver: Remote, transport: BroadcastTransport) -> None:
    """It is told that an engine is gone, instead of waiting for it."""
    _, buckets = await store.gather(2)
    with pytest.raises(TransferError, match="engine/1"):
        await transport.send(await anext(buckets), receiver)


def test_a_receiver_without_an_inbox_and_an_inbox_without_anybody_are_said() -> None:
    async def scenario() -> None:
        store, transport = published(), BroadcastTransport(timeout_s=3)
        receiver = DoubleBufferedReceiver(Serving().switch)
        _, buckets = await store.gather(2)
        bucket = await anext(buckets)
        with pytest.raises(TransferError, match="not admitted"):
            await transport.send(bucket, receiver)
        transport.admit(receiver, "engine/7")
        with pytest.raises(TransferError, match="engine/7 has no inbox"):
            await transport.send(bucket, receiver)
        inbox = BroadcastInbox("engine/7", HERE, transport.port)
        sent = await transport.send(bucket, receiver)
        assert bytes(inbox.open(sent.payload)) == bytes(bucket.payload)
        with pytest.raises(TransferError, match="is not here"):
            inbox.open(replace(sent.payload, index=3))
        inbox.close()
        transport.close()

    asyncio.run(scenario())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_arrived_damaged_is_sent_again_to_whoever_asks() -> None:
    async def scenario() -> None:
        store, transport = published(wire_dtype=None, arena=SharedArena()), BroadcastTransport(timeout_s=30)
        inboxes = [BroadcastInbox(f"engine/{n}", HERE, transport.port) for n in range(2)]
        receivers = [DoubleBufferedReceiver(Serving().switch, open_payload=inbox.open) for inbox in inboxes]
        for number, receiver in enumerate(receivers):
            transport.admit(receiver, f"engine/{number}")
        _, buckets = await store.gather(2)
        reader, open_files = PayloadReader(), set()
        async for bucket in buckets:
            wanted = bytes(reader.open(bucket.payload))
            sent = [await transport.send(bucket, receivers[0])]
            assert bytes(inboxes[1].open(sent[0].payload)) == wanted, "everybody has it at once"
            sent.append(await transport.send(bucket, receivers[1]))
            inboxes[1].open(sent[1].payload)[0] ^= 1
            again = await transport.send(bucket, receivers[1])
            assert bytes(inboxes[1].open(again.payload)) == wanted
            open_files.add(descriptors() if bucket.index > 1 else 0)
        assert len(open_files) == 2, "a bucket costs no descriptor"
        for inbox in inboxes:
            inbox.close()
        for one in (transport, store, reader):
            one.close()
        with pytest.raises(TransferError, match="closed"):
            await transport.send(bucket, receivers[0])

    asyncio.run(scenario())
