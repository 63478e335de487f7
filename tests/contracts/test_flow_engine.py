"""The denoising engine and its receiver meet the contracts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

from headway.engines.base import Engine, Progress, Request
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from tests.denoising import factory

from ..engines import factory as engines
from .engine_contract import EngineContract
from .test_native_engine import Closing
from .weights_contract import WeightsContract

model = cache(factory.make_model)


class TestFlowEngine(Closing, EngineContract):
    def make(self, name: str = "engine/0") -> Engine:
        self.runners = getattr(self, "runners", {})

        def runner(*parts: Any, **options: Any) -> factory.SlowDenoising:
            made = self.runners[name] = factory.SlowDenoising(*parts, **options)
            return made

        engine = factory.make_engine(name, runner=runner, window="random", window_size=3)
        self.engines.append(engine)
        return engine

    async def serve(self, engine: Engine, version: int) -> None:
        await factory.serve(engine, model(), version)

    def request(self, name: str = "a") -> Request:
        return factory.request(name, steps=self.LENGTH)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        await asyncio.to_thread(self.runners[engine.name].midway.wait, 10.0)

    async def crash(self, engine: Engine) -> None:
        self.runners[engine.name].broken = True


class TestFlowReceiver(Closing, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        engine = factory.make_engine()
        self.engines.append(engine)
        source: Any = {1: model(), 2: model()}
        return engines.ModelSource(source), factory.HandOver(), engine.receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytes(len(bucket.payload)))
