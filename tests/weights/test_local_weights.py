"""Weights on one machine: both transports meet the contract, and shared memory leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.codec import decode, encode
from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, WeightReceiver, WeightSource, WeightTransport
from headway.weights.device_memory import compute_tensor_checksum
from headway.weights.host_transports import InProcessTransport, SharedMemoryTransport
from headway.weights.shared_memory import SharedSegment, remove_stale_segments
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

from ..contracts.weights_contract import WeightsContract

BUCKET_MB = 1000 / 2**20


def weights(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "embed.weight": torch.randn(33, 7, generator=generator),
        "norm.weight": torch.randn(7, generator=generator),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor([version]),
        "head.weight": torch.randn(129, 7, generator=generator, dtype=torch.float64),
    }


class Serving:
    """Stands where an engine would: remembers what it was switched to."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)


class Real:
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(scenario)


def published(**options: Any) -> WeightStore:
    store = WeightStore(bucket_mb=BUCKET_MB, **options)
    store.publish(1, weights(1))
    store.publish(2, weights(2))
    return store


class TestInProcess(Real, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return published(), InProcessTransport(), DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytearray(b"\x01" + bytes(bucket.payload)[1:]))


def test_a_checksum_on_a_device_finds_what_was_changed_torn_or_moved() -> None:
    data = torch.randint(0, 256, (10_007,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    right = compute_tensor_checksum(data)
    assert (
        compute_tensor_checksum(data.clone()) == right
        and compute_tensor_checksum(torch.cat((data[:1], data))[1:]) == right
    )
    changed, moved, columns = data.clone(), data.clone(), data.clone()
    changed[10_006] ^= 1
    moved[:4096], moved[4096:8192] = data[4096:8192], data[:4096]
    columns[:4], columns[4:8] = data[4:8], data[:4]
    wrong = [changed, moved, columns, data[:-1], torch.cat((data[:5000], torch.zeros(5007, dtype=torch.uint8)))]
    assert right not in [compute_tensor_checksum(one) for one in wrong]
    assert compute_tensor_checksum(data[:0]) != right


class TestSharedMemory(Real, WeightsContract):
    @pytest.fixture(autouse=True)
    def closing(self) -> Iterator[None]:
        yield
        self.transport.close()
        assert not mine()

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        self.transport = SharedMemoryTransport()
        return published(), self.transport, DoubleBufferedReceiver(Serving().switch)

    def another(self) -> WeightReceiver:
        return DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        segment = SharedSegment.attach(bucket.payload.segment)
        segment.buffer[0] ^= 1
        segment.close()
        return bucket


class TestPublishedInSharedMemory(Real, WeightsContract):
    @pytest.fixture(autouse=True)
    def closing(self) -> Iterator[None]:
        yield
        self.store.close()
        assert not mine()

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        self.store = published(arena=SharedArena())
        return self.store, SharedMemoryTransport(), DoubleBufferedReceiver(Serving().switch)

    def another(self) -> WeightReceiver:
        return DoubleBufferedReceiver(Serving().switch)

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=replace(bucket.payload, start=0, size=bucket.payload.size - 64))


def mine(process: int | None = None) -> list[Path]:
    """What a process left behind where names can be seen."""
    places = ("/dev/shm", tempfile.gettempdir())
    return [path for place in places for path in Path(place).glob(f"headway-{process or os.getpid()}-*")]


async def updated(store: WeightSource, receiver: WeightReceiver, version: int, transport: WeightTransport) -> None:
    manifest, buckets = await store.gather(version)
    await receiver.begin(Manifest.from_json(manifest.to_json()))
    async for bucket in buckets:
        await receiver.load(await transport.send(bucket, receiver))
    await receiver.flip()


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32, None])
def test_what_arrives_is_what_was_published_in_the_precision_asked_for(wire: torch.dtype | None) -> None:
    async def scenario() -> None:
        serving, store = Serving(), WeightStore(bucket_mb=BUCKET_MB, wire_dtype=wire)
        receiver = DoubleBufferedReceiver(serving.switch, dtype=torch.float32)
        for version in range(4):
            live = weights(version)
            store.publish(version, live)
            for tensor in live.values():
                tensor.zero_()  # the trainer goes on at once
            await updated(store, receiver, version, InProcessTransport())
            for name, wanted in weights(version).items():
                got = serving.tensors[name]
                floating = wanted.is_floating_point()
                assert got.dtype == (torch.float32 if floating else wanted.dtype)
                assert torch.equal(got, (wanted.to(wire or wanted.dtype) if floating else wanted).to(got.dtype))

    asyncio.run(scenario())


def test_a_flip_leaves_the_tensors_in_use_alone_until_the_next_one() -> None:
    async def scenario() -> None:
        serving, store = Serving(), published(wire_dtype=None)
        receiver = DoubleBufferedReceiver(serving.switch)
        await updated(store, receiver, 1, InProcessTransport())
        live = serving.tensors
        manifest, buckets = await store.gather(2)
        await receiver.begin(manifest)
        async for bucket in buckets:
            await receiver.load(bucket)
        assert all(torch.equal(live[name], wanted) for name, wanted in weights(1).items())

    asyncio.run(scenario())


def test_a_version_dropped_while_it_is_gathered_says_so_and_its_buckets_stay_whole() -> None:
    async def scenario() -> None:
        store = published()
        _, buckets = await store.gather(1)
        first = await anext(buckets)
        before = bytes(first.payload)
        store.publish(3, weights(3))
        assert bytes(first.payload) == before
        with pytest.raises(TransferError, match="given up"):
            await anext(buckets)
        store.clear()
        with pytest.raises(TransferError, match="not held"):
            await store.gather(3)

    asyncio.run(scenario())


def test_a_version_on_its_way_survives_the_next_two_and_is_found_out_when_it_is_overwritten() -> None:
    async def scenario() -> None:
        store = published(arena=SharedArena())
        receiver = DoubleBufferedReceiver(Serving().switch)
        manifest, buckets = await store.gather(1)
        await receiver.begin(manifest)
        first = await anext(buckets)
        store.publish(3, weights(3))
        await receiver.load(first)
        store.publish(4, weights(4))
        with pytest.raises(TransferError, match="instead of"):
            await receiver.load(first)
        receiver.reset(gone=False)
        store.close()
        assert not mine()

    asyncio.run(scenario())


def test_what_travels_between_processes_is_plain_json() -> None:
    async def scenario() -> None:
        store, transport = published(), SharedMemoryTransport()
        manifest, buckets = await store.gather(2)
        assert Manifest.from_json(manifest.to_json()) == manifest
        bucket = await anext(buckets)
        sent = await transport.send(bucket, DoubleBufferedReceiver(Serving().switch))
        assert decode(encode(sent)) == sent
        again = await transport.send(bucket, DoubleBufferedReceiver(Serving().switch))
        assert again.payload == sent.payload, "a second engine reads the same bytes"
        with pytest.raises(TransferError):
            Manifest.from_json({"version": "x"})
        transport.close()

    asyncio.run(scenario())


ENGINE = """
import asyncio, json, sys
from headway.codec import decode
from headway.weights.weight_receiver import DoubleBufferedReceiver

async def switch(version, tensors):
    print(json.dumps({name: float(one.double().sum()) for name, one in tensors.items()}), flush=True)

async def main():
    receiver = DoubleBufferedReceiver(switch)
    for line in sys.stdin:
        kind, data = json.loads(line)
        if kind == "manifest":
            await receiver.begin(decode(bytes.fromhex(data)))
        elif kind == "bucket":
            await receiver.load(decode(bytes.fromhex(data)))
        else:
            await receiver.flip()

asyncio.run(main())
"""


@pytest.mark.parametrize("arena", [None, SharedArena()], ids=["copied", "published"])
def test_versions_reach_another_process(arena: SharedArena | None) -> None:
    async def lines(store: WeightStore, transport: SharedMemoryTransport, version: int) -> list[str]:
        manifest, buckets = await store.gather(version)
        sent = [["manifest", encode(manifest).hex()]]
        async for bucket in buckets:
            moved = await transport.send(bucket, DoubleBufferedReceiver(Serving().switch))
            sent.append(["bucket", encode(moved).hex()])
        return [json.dumps(one) for one in [*sent, ["flip", {}]]]

    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    store, transport = WeightStore(bucket_mb=BUCKET_MB, wire_dtype=None, arena=arena), SharedMemoryTransport()
    for version in range(4):
        store.publish(version, weights(version))
        engine.stdin.write("\n".join(asyncio.run(lines(store, transport, version))) + "\n")
        engine.stdin.flush()
        got = json.loads(engine.stdout.readline())
        assert got == {name: float(one.double().sum()) for name, one in weights(version).items()}
    engine.stdin.close()
    assert engine.wait() == 0
    engine.stdout.close()
    transport.close()
    store.close()
    assert not mine()


READER = """
import sys
from headway.weights.shared_memory import SharedSegment
segment = SharedSegment.attach(sys.argv[1])
print(bytes(segment.buffer[:5]).decode())
"""


def test_a_process_that_attached_and_ended_takes_no_name_with_it() -> None:
    segment = SharedSegment.create(100)
    segment.buffer[:5] = b"hello"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", READER, segment.name], capture_output=True, text=True, check=True)
        assert done.stdout == "hello\n" and not done.stderr
    assert SharedSegment.attach(segment.name).size >= 100
    segment.close()
    segment.close()
    with pytest.raises(TransferError):
        SharedSegment.attach(segment.name)


OWNER = """
import os, sys
from headway.weights.shared_memory import SharedSegment
if sys.argv[1] == "named":
    del os.memfd_create
kept = SharedSegment.create(4096)
print(kept.name, flush=True)
sys.stdin.readline()
"""


def owner_of(kind: str) -> tuple[subprocess.Popen[str], str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_a_killed_owner_leaves_nothing_and_says_nothing(kind: str) -> None:
    if kind == "anonymous" and not hasattr(os, "memfd_create"):
        pytest.skip("no anonymous memory here")
    owner, name = owner_of(kind)
    attached = SharedSegment.attach(name)
    attached.buffer[:3] = b"abc"
    assert name not in remove_stale_segments(), "its owner lives"
    owner.kill()
    _, noise = owner.communicate()
    assert not noise
    assert bytes(attached.buffer[:3]) == b"abc", "who has it open keeps it"
    attached.close()
    if kind == "named":
        assert name in remove_stale_segments()
    with pytest.raises(TransferError):
        SharedSegment.attach(name)
    assert not mine(owner.pid)


def test_a_descriptor_that_means_something_else_by_now_is_refused() -> None:
    segment = SharedSegment.create(10)
    name = segment.name
    segment.close()
    others = [SharedSegment.create(20) for _ in range(3)]  # one of them has its number now
    with pytest.raises(TransferError):
        SharedSegment.attach(name)
    for other in others:
        other.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "headway-1-../../x", "memfd-1", ""])
def test_what_is_no_segment_cannot_be_opened(name: str) -> None:
    with pytest.raises(TransferError, match="cannot be opened"):
        SharedSegment.attach(name)
