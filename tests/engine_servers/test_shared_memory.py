"""Weights that reach a server in memory which it opens by a handle: every phase has an end, and a name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from headway.engines.base import Progress
from headway.engines.servers.server_process import LaunchedServer
from headway.engines.servers.vllm_dialect import VllmDialect
from headway.errors import ConfigError, EngineCrashed, TransferError
from headway.types import FinishReason
from headway.weights.device_memory import HostMemory
from tests.engine_servers.fake_decoding import counting_rows
from tests.engine_servers.fake_servers import FakeSglangServer, FakeVllmServer

from . import factory
from .factory import FAST, Site

ROOT = Path(__file__).parents[2]
QUICK = replace(FAST, call_s=1.0, load_s=1.0, drain_s=0.2)
PHASES = {
    "vllm": {
        "pause": "/pause",
        "init": "/init_weight_transfer_engine",
        "start": "/start_weight_update",
        "update": "/update_weights",
        "finish": "/finish_weight_update",
        "cache": "/reset_prefix_cache",
        "label": "/update_weight_version",
        "resume": "/resume",
    },
    "sglang": {
        "pause": "/abort_request",
        "update": "/update_weights_from_tensor",
        "cache": "/flush_cache",
        "label": "/model_info",
        "resume": "/continue_generation",
    },
}


class NamedLikeAGpu(HostMemory):
    """Shared memory of the host whose handles look like those of a GPU."""

    def export(self, data: Any) -> tuple[Any, ...]:
        (name,) = super().export(data)
        return ("GPU-0", name, data.numel(), 0, b"", 0, b"", False)


def on_a_site(kind: str, scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        site = Site(kind)
        try:
            await scenario(site)
        finally:
            await site.close()

    factory.run(whole(), 60.0)


async def check_answer(engine: Any, version: int) -> None:
    """It counts, by this version."""
    progress = Progress()
    assert await engine.generate(factory.request(), progress) is FinishReason.STOP
    assert list(progress.actions) == list(range(4, 44)) and progress.runs[0].version == version


@pytest.mark.parametrize(("kind", "version"), [("vllm", "0.32.0"), ("vllm", "0.26.0"), ("sglang", "")])
def test_weights_come_from_memory_that_the_server_opens(kind: str, version: str) -> None:
    async def scenario(site: Site) -> None:
        dialect = VllmDialect(launched=True) if kind == "vllm" else None
        engine = site.engine(memory=NamedLikeAGpu(), dialect=dialect)
        server = site.servers["engine/0"]
        if isinstance(server, FakeVllmServer):
            server.version = version
        for number in range(3):
            await factory.serve(engine, number)
            await check_answer(engine, number)
        assert server.decoder.loads == ["by memfd"] * 3 and server.decoder.stale == 0
        manifest, buckets = factory.version_of(counting_rows(factory.SIZE), 3)
        await engine.receiver.begin(manifest)
        with pytest.raises(TransferError, match="checksum"):
            await engine.receiver.load(replace(buckets[0], payload=bytes(len(buckets[0].payload))))

    on_a_site(kind, scenario)


@pytest.mark.parametrize(("kind", "phase"), [(kind, phase) for kind in PHASES for phase in PHASES[kind]])
def test_a_phase_that_does_not_end_is_named_and_the_replica_comes_back(kind: str, phase: str) -> None:
    async def scenario(site: Site) -> None:
        engine = site.engine(memory=NamedLikeAGpu(), settings=QUICK)
        await factory.serve(engine, 0)
        server = site.servers["engine/0"]
        server.hangs_at = PHASES[kind][phase]
        begin = time.monotonic()
        with pytest.raises(EngineCrashed, match=rf"engine/0: version 1: {phase}: .*no answer in 1 s"):
            await factory.serve(engine, 1)
        assert time.monotonic() - begin < 10.0 and engine.receiver.version == -1
        await server.crash()
        await engine.restart()
        await factory.serve(engine, 1)
        await check_answer(engine, 1)

    on_a_site(kind, scenario)


def test_an_update_waits_until_sglang_has_ended_requests_that_nobody_reads() -> None:
    async def scenario(site: Site) -> None:
        engine = site.engine(memory=NamedLikeAGpu())
        await factory.serve(engine, 0)
        server = site.servers["engine/0"]
        assert isinstance(server, FakeSglangServer)
        server.lingering = 3
        await factory.serve(engine, 1)
        await check_answer(engine, 1)
        assert server.lingering == 0

    on_a_site("sglang", scenario)


def test_a_server_that_is_stopped_in_the_middle_of_an_update_is_replaced(tmp_path: Path) -> None:
    """A real process gets a real SIGSTOP; what is killed and started again is seeded again."""

    def command(port: int) -> tuple[list[str], dict[str, str]]:
        line = [sys.executable, "-m", "tests.engine_servers.fake_servers", "vllm", "--port", str(port)]
        path = os.pathsep.join([str(ROOT), *sys.path])
        return line, {"PYTHONPATH": path, "STANDIN_STOPS": f"/update_weights {tmp_path / 'once'}"}

    async def scenario(site: Site) -> None:
        server = LaunchedServer("engine/0", command, grace_s=1.0)
        settings = replace(QUICK, call_s=5.0, start_s=30.0, first_s=30.0)
        engine = site.over(server, "engine/0", settings, VllmDialect(launched=True), memory=NamedLikeAGpu())
        await engine.start()
        with pytest.raises(EngineCrashed, match=r"engine/0: version 0: update: .*no answer in 1 s"):
            await factory.serve(engine, 0)
        stopped = server.pid
        await engine.restart()
        assert server.pid != stopped
        await factory.serve(engine, 0)
        await check_answer(engine, 0)

    on_a_site("vllm", scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_sleeps_and_the_next_version_wakes_it(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine = site.engine(memory=NamedLikeAGpu(), settings=replace(FAST, sleeps=True))
        await factory.serve(engine, 0)
        await engine.pause()
        await engine.sleep()
        server = site.servers["engine/0"]
        assert server.asleep and engine.receiver.version == -1
        await factory.serve(engine, 1)
        assert not server.asleep
        await engine.resume()
        await check_answer(engine, 1)

    on_a_site(kind, scenario)


def test_a_server_that_is_too_old_is_refused() -> None:
    async def scenario(site: Site) -> None:
        for version, launched in (("0.25.1", True), ("0.26.0", False)):
            engine = site.engine(dialect=VllmDialect(launched=launched))
            standin = site.servers["engine/0"]
            assert isinstance(standin, FakeVllmServer)
            standin.version = version
            with pytest.raises(ConfigError, match=rf"vllm {version} is too old: 0.2[68] is needed"):
                await engine.start()

    on_a_site("vllm", scenario)
