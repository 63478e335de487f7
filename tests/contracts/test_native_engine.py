"""The native engine and its receiver meet the contracts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel

from headway.engines.base import Engine, Progress, Request
from headway.engines.native.native_core import make_slow_core
from headway.engines.native.native_engine import NativeEngine
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from headway.weights.device_memory import DeviceArena, DeviceSlice
from headway.weights.weight_store import WeightStore

from ..engines import factory
from .engine_contract import EngineContract
from .weights_contract import WeightsContract

counting_model = cache(factory.counting_model)


class Closing:
    """Runs a scenario and closes what it has made."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.engines: list[NativeEngine] = []
        factory.run(self.whole_scenario(scenario))

    async def whole_scenario(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
        finally:
            for engine in self.engines:
                await engine.close()


class TestNativeEngine(Closing, EngineContract):
    def make(self, name: str = "engine/0") -> Engine:
        self.runners = getattr(self, "runners", {})

        def runner(*parts: Any) -> factory.SlowRunner:
            self.runners[name] = factory.SlowRunner(*parts)
            return self.runners[name]

        engine = factory.make_engine(counting_model(), name=name, eos=[self.LENGTH + 3], make_runner=runner)
        self.engines.append(engine)
        return engine

    async def serve(self, engine: Engine, version: int) -> None:
        await factory.serve(engine, counting_model(), version)

    def request(self, name: str = "a") -> Request:
        return factory.request(name, [1, 2, 3], count=100)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        await asyncio.to_thread(self.runners[engine.name].midway.wait, 10.0)

    async def crash(self, engine: Engine) -> None:
        self.runners[engine.name].broken = True


class TestEngineOfModelCaches(TestNativeEngine):
    """One sequence after the other, through the model's own cache."""

    def make(self, name: str = "engine/0") -> Engine:
        self.runners = getattr(self, "runners", {})

        def runner(*parts: Any) -> factory.SlowCacheRunner:
            self.runners[name] = factory.SlowCacheRunner(*parts)
            return self.runners[name]

        core = partial(make_slow_core, reason="a test asks for it", make_runner=runner)
        engine = factory.make_engine(counting_model(), name=name, eos=[self.LENGTH + 3], make_core=core)
        self.engines.append(engine)
        return engine


class TestNativeReceiver(Closing, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        model: PreTrainedModel = counting_model()
        engine = factory.make_engine(model)
        self.engines.append(engine)
        return factory.ModelSource({1: model, 2: model}), factory.HandOver(), engine.receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytes(len(bucket.payload)))


class TestWeightsOnADevice(Closing, WeightsContract):
    """Buckets that are tensors where they lie; here the device is the CPU."""

    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        model: PreTrainedModel = counting_model()
        engine = factory.make_engine(model)
        self.engines.append(engine)
        store = WeightStore(bucket_mb=0.01, arena=DeviceArena("cpu"))
        for version in (1, 2):
            store.publish(version, dict(model.named_parameters()))
        return store, factory.HandOver(), engine.receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=DeviceSlice(bucket.payload.data ^ 1))
