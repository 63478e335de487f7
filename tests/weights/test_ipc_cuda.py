"""Weights from one process into another on one GPU: `pytest -m gpu tests/weights/test_ipc_cuda.py`."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import pytest
import torch

from headway.errors import TransferError
from headway.weights.base import Bucket
from headway.weights.device_memory import CudaMemory, IpcArena, IpcPayloadReader
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import WeightStore

from .test_local_weights import Serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
VERSIONS, NUMBERS = 8, 1_000_003


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(NUMBERS, generator=generator),
        "b": torch.randn(257, 33, generator=generator).bfloat16(),
        "steps": torch.tensor([version]),
    }


def engine(pipe: Any) -> None:
    """A receiver on the same card; told what to do over a pipe."""
    serving, reader = Serving(), IpcPayloadReader(CudaMemory("cuda"))
    receiver = DoubleBufferedReceiver(serving.switch, device="cuda", open_payload=reader.open)

    async def obey(call: str, *arguments: Any) -> Any:
        try:
            await getattr(receiver, call)(*arguments)
        except TransferError as error:
            return error
        return {name: one.double().sum().item() for name, one in serving.tensors.items()} if call == "flip" else None

    with asyncio.Runner() as runner:
        while (order := pipe.recv()) is not None:
            pipe.send(runner.run(obey(*order)))
    reader.close()


class Remote:
    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        assert self.pipe.poll(50), "no answer"
        answer = self.pipe.recv()
        if isinstance(answer, TransferError):
            raise answer
        return answer

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10)


def gathered(store: WeightStore, version: int) -> tuple[Any, list[Bucket]]:
    async def gather() -> tuple[Any, list[Bucket]]:
        manifest, buckets = await store.gather(version)
        return manifest, [bucket async for bucket in buckets]

    return asyncio.run(gather())


def updated(store: WeightStore, remote: Remote, version: int) -> dict[str, float]:
    manifest, buckets = gathered(store, version)
    remote.ask("begin", manifest)
    for bucket in buckets:
        remote.ask("load", bucket)
    sums: dict[str, float] = remote.ask("flip")
    return sums


def test_another_process_reads_versions_where_they_lie_and_one_that_is_killed_holds_none() -> None:
    arena = IpcArena(CudaMemory("cuda"))
    store = WeightStore(bucket_mb=1, wire_dtype=None, arena=arena)
    first, second = Remote(), Remote()
    for version in range(VERSIONS):
        published = {name: one.cuda() for name, one in tensors(version).items()}
        store.publish(version, published)
        wanted = {name: one.double().sum().item() for name, one in published.items()}
        for remote in (first, second):
            assert updated(store, remote, version) == pytest.approx(wanted, rel=1e-12)
        if version == 2:
            assert arena.buffers == 3
    manifest, buckets = gathered(store, VERSIONS - 1)
    first.ask("begin", manifest)
    with pytest.raises(TransferError, match="instead of"):
        first.ask("load", Bucket(version=manifest.version, index=0, checksum="", payload=buckets[1].payload))
    second.process.kill()
    second.process.join()
    for version in range(VERSIONS, VERSIONS + 4):
        store.publish(version, {name: one.cuda() for name, one in tensors(version).items()})
        updated(store, first, version)
    assert arena.buffers == 3, "what the dead one read is written again"
    first.close()
    store.close()
