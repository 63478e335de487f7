"""Every token carries the version that made it, whatever is flipped, paused and aborted meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")

from headway.engines.base import Progress
from headway.engines.servers.server_engine import ServerEngine
from headway.types import FinishReason

from . import factory
from .factory import SIZE, Site

FLIPS, REQUESTS, LENGTH = 6, 6, 60


def always(token: int) -> list[list[float]]:
    """A version that says one thing: its own number."""
    return [[60.0 if column == token else 0.0 for column in range(SIZE)] for _ in range(SIZE)]


async def ask(engine: ServerEngine, name: str, progress: Progress) -> None:
    """To the end, also where somebody aborts it on the way."""
    while await engine.generate(factory.request(name, count=LENGTH), progress) is FinishReason.ABORTED:
        pass


async def disturb(engine: ServerEngine, chance: random.Random) -> None:
    for version in range(1, FLIPS + 1):
        await asyncio.sleep(chance.uniform(0.0, 0.04))
        paused = chance.random() < 0.5
        if paused:
            await engine.pause()
        if chance.random() < 0.7:
            await engine.abort(str(chance.randrange(REQUESTS)))
        await factory.serve(engine, version, always(version))
        if paused:
            await engine.resume()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("seed", range(2))
def test_every_token_carries_the_version_that_made_it(kind: str, seed: int) -> None:
    async def scenario() -> None:
        site = Site(kind)
        try:
            engine = site.engine(end_tokens=[])
            await factory.serve(engine, 0, always(0))
            parts = [Progress() for _ in range(REQUESTS)]
            async with asyncio.TaskGroup() as tasks:
                for number, progress in enumerate(parts):
                    tasks.create_task(ask(engine, str(number), progress))
                tasks.create_task(disturb(engine, random.Random(seed)))
            decoder = site.servers["engine/0"].decoder
            assert decoder.loaded_while_running == decoder.stale == 0
            assert len(decoder.loads) == FLIPS + 1
            for progress in parts:
                said = [run.version for run in progress.runs for _ in range(run.count)]
                assert list(progress.actions) == said and len(said) == LENGTH
        finally:
            await site.close()

    factory.run(scenario())
