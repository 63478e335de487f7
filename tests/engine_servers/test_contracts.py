"""Engines over servers meet the same contracts as our own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")

from headway.engines.base import Engine, Progress, Request
from headway.engines.servers.server_engine import ServerEngine
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport

from ..contracts.engine_contract import EngineContract
from ..contracts.weights_contract import WeightsContract
from . import factory


class Sited:
    """Runs a scenario on a site of its own."""

    kind = ""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.site = factory.Site(self.kind)
        factory.run(self.whole_scenario(scenario))

    async def whole_scenario(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            await scenario
            for standin in self.site.servers.values():
                assert standin.decoder.loaded_while_running == 0, "weights were swapped under a running request"
                assert standin.decoder.stale == 0, "a prefix of other weights was used"
        finally:
            await self.site.close()


class OverServers(Sited, EngineContract):
    def make(self, name: str = "engine/0") -> Engine:
        return self.site.engine(name)

    async def serve(self, engine: Engine, version: int) -> None:
        await factory.serve(engine, version)

    def request(self, name: str = "a") -> Request:
        return factory.request(name)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        await self.site.servers[engine.name].decoder.midway.wait()
        for _ in range(10):  # and some of it has arrived
            if len(progress.actions):
                return
            await asyncio.sleep(0.001)

    async def crash(self, engine: Engine) -> None:
        await self.site.servers[engine.name].crash()


class TestVllmEngine(OverServers):
    kind = "vllm"


class TestSglangEngine(OverServers):
    kind = "sglang"


class OverReceivers(Sited, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        engine: ServerEngine = self.site.engine()
        return factory.TableSource(1, 2), factory.HandOver(), engine.receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=bytes(len(bucket.payload)))


class TestVllmReceiver(OverReceivers):
    kind = "vllm"


class TestSglangReceiver(OverReceivers):
    kind = "sglang"
