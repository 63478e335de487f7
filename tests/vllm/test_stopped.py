"""A real vLLM that is stopped: the update ends in time, says in which phase, and the replica comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.engines.base import Progress
from headway.engines.servers.server_engine import ServerEngine
from headway.engines.servers.vllm_dialect import VllmDialect
from headway.errors import EngineCrashed
from headway.types import FinishReason
from headway.weights.device_memory import make_shareable_memory
from tests.engines import factory
from tests.vllm.in_process import InProcessPool, serve, title
from tests.vllm.server_pool import DEVICE, SETTINGS, ServerPool, children, family, owned
from tests.vllm.test_tokens import make_request


@pytest.fixture
def inside(place: ServerPool) -> Iterator[InProcessPool]:
    pool = InProcessPool(place)
    yield pool
    pool.close()


def test_a_server_whose_core_is_stopped_is_replaced_and_seeded(place: ServerPool, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = owned("engine/7", place.model, tmp_path / "server.log")
        engine = ServerEngine(
            "engine/7",
            server,
            VllmDialect(launched=True),
            replace(SETTINGS, call_s=5.0, load_s=5.0),
            root=tmp_path / "served",
            memory=None if DEVICE == "cpu" else make_shareable_memory(DEVICE),
        )
        try:
            await factory.serve(engine, place.counting, 0)
            (core,) = (pid for pid in family(server.pid) if "EngineCore" in title(pid))
            os.kill(core, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(EngineCrashed, match=r"version 1: pause: .*no answer in 5 s"):
                await factory.serve(engine, place.counting, 1)
            assert time.monotonic() - begin < 20.0
            await engine.restart()
            await factory.serve(engine, place.counting, 1)
            progress = Progress()
            assert await engine.generate(make_request(5), progress) is FinishReason.LENGTH
            assert list(progress.actions) == [4, 5, 6, 7, 8] and progress.runs[0].version == 1
        finally:
            await engine.close()

    place.run(scenario())


def test_an_engine_whose_vllm_is_stopped_is_replaced_and_seeded(inside: InProcessPool) -> None:
    async def scenario() -> None:
        engine = inside.engine("engine/8")
        await serve(engine, inside.place.counting, 0)
        (core,) = (pid for pid in children(inside.kept["engine/8"].pid) if "EngineCore" in title(pid))
        os.kill(core, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineCrashed, match=r"version 1: pause: vLLM has not answered in 10 s"):
            await serve(engine, inside.place.counting, 1)
        assert time.monotonic() - begin < 30.0
        await engine.restart()
        await serve(engine, inside.place.counting, 1)
        progress = Progress()
        assert await engine.generate(make_request(5), progress) is FinishReason.LENGTH
        assert list(progress.actions) == [4, 5, 6, 7, 8]

    inside.place.run(scenario())
