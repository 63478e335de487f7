"""An engine over a real vLLM meets the same contracts as our own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headway.engines.base import Engine, Progress, Request
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from tests.contracts.engine_contract import EngineContract
from tests.contracts.weights_contract import WeightsContract
from tests.engines import factory
from tests.vllm.server_pool import DISTURBED_TOKENS, ServerPool, WatchedServerEngine, family, gone


class OverVllm:
    """Runs scenarios where the servers are."""

    @pytest.fixture(autouse=True)
    def at(self, place: ServerPool) -> None:
        self.place = place

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.place.run(scenario)


class TestVllmEngine(OverVllm, EngineContract):
    LENGTH = DISTURBED_TOKENS

    def make(self, name: str = "engine/0") -> Engine:
        return self.place.engine(name, end_tokens=[self.LENGTH + 3])

    async def serve(self, engine: Engine, version: int) -> None:
        await factory.serve(engine, self.place.counting, version, bucket_bytes=1 << 22)

    def request(self, name: str = "a") -> Request:
        return factory.request(name, [1, 2, 3], count=self.LENGTH + 20)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        assert isinstance(engine, WatchedServerEngine)
        await engine.made(5)

    async def crash(self, engine: Engine) -> None:
        """Its whole family is gone, and nobody has to ask for that."""
        everybody = family(self.place.kept[engine.name].owned.pid)
        self.place.kill(engine.name)
        assert len(everybody) >= 3 and await asyncio.to_thread(gone, everybody)


class TestVllmReceiver(OverVllm, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        model = self.place.counting
        return factory.ModelSource({1: model, 2: model}), factory.HandOver(), self.place.engine().receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytes(len(bucket.payload)))
