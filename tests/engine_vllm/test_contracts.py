"""An engine over a core in its own process meets the contracts; a real vLLM is held to the same in tests/vllm."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import torch

from headway.engines.base import Engine, Progress, Request
from headway.engines.remote_engine import RemoteEngine
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from headway.weights.host_transports import SharedMemoryTransport
from headway.weights.weight_store import SharedArena, WeightStore
from tests.contracts.engine_contract import EngineContract
from tests.contracts.weights_contract import WeightsContract
from tests.engine_vllm.fake_core import FakeCore, make_engine
from tests.engines import factory


def store_of(*versions: int, says: int = -1, name: str = "said") -> WeightStore:
    """Weights that say one number, or count."""
    store = WeightStore(bucket_mb=1.0, wire_dtype=None, arena=SharedArena())
    for version in versions:
        store.publish(version, {name: torch.tensor([says], dtype=torch.int64)})
    return store


async def serve(receiver: WeightReceiver, version: int, **options: Any) -> None:
    """Load and flip."""
    store = store_of(version, **options)
    try:
        manifest, buckets = await store.gather(version)
        await receiver.begin(manifest)
        async for bucket in buckets:
            await receiver.load(bucket)
        await receiver.flip()
    finally:
        store.close()


class Children:
    """Runs scenarios with engines in children, and closes what they have made."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.made: list[RemoteEngine] = []

        async def closed() -> None:
            try:
                await scenario
            finally:
                for engine in self.made:
                    await engine.close()

        factory.run(closed())

    def make(self, name: str = "engine/0") -> Engine:
        target = "tests.engine_vllm.fake_core:engine"
        spec = ChildSpec(name=name, target=target, args={"step_s": 0.005, "ends": [EngineContract.LENGTH + 3]})
        engine = RemoteEngine(spec, 4, ChildProcess.start)
        self.made.append(engine)
        return engine


class TestInProcessEngine(Children, EngineContract):
    async def serve(self, engine: Engine, version: int) -> None:
        await serve(engine.receiver, version)

    def request(self, name: str = "a") -> Request:
        return factory.request(name, [1, 2, 3], count=100)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        assert isinstance(engine, RemoteEngine)
        while not any(len(progress.actions) >= 4 for progress in engine._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def crash(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        peer: Any = engine._child._peers[0]
        os.kill(peer.pid, signal.SIGKILL)


class TestInsideReceiver(WeightsContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        factory.run(scenario)

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        return store_of(1, 2, says=77), SharedMemoryTransport(), make_engine(FakeCore(0.001)).receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytes(8))
