"""Servers that fail: what was made is kept, what is served is known, and who is told what."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")

from aiohttp import web

from headway.config import ReliabilityConfig
from headway.engines.base import Progress
from headway.engines.servers.directory_receiver import VersionDirectoryWriter
from headway.engines.servers.server_dialect import is_tie
from headway.engines.servers.server_engine import ServerEngine
from headway.engines.servers.server_process import ReportEnd, ServerHandle
from headway.errors import ConfigError, EngineCrashed, EngineError, TransferError
from headway.monitor.event_log import EventLog
from headway.rollout.inference_hub import InferenceHub
from headway.types import FinishReason, VersionRun
from tests.engine_servers.fake_decoding import random_rows
from tests.engine_servers.fake_servers import FakeSglangServer

from . import factory
from .factory import FAST, Site

Scenario = Callable[[Site], Coroutine[Any, Any, None]]
both = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def on_a_site(kind: str, scenario: Scenario, **options: Any) -> None:
    async def whole() -> None:
        site = Site(kind, **options)
        try:
            await scenario(site)
        finally:
            await site.close()

    factory.run(whole())


async def begun(site: Site, **options: Any) -> tuple[ServerEngine, Any]:
    engine = site.engine(**options)
    await factory.serve(engine, 0)
    return engine, site.servers["engine/0"]


@both
@pytest.mark.parametrize("fault", ["500", "drop", "cut"])
def test_a_request_that_fails_alone_fails_alone_and_keeps_its_tokens(kind: str, fault: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        standin.faults = [fault]
        progress = Progress()
        with pytest.raises(EngineError):
            await engine.generate(factory.request(), progress)
        assert (len(progress.actions) > 0) == (fault == "cut")
        assert await engine.generate(factory.request(), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(4, 44))
        assert progress.runs == (VersionRun(version=0, count=40),)

    on_a_site(kind, scenario)


@both
def test_a_request_that_the_server_does_not_want_is_its_own_fault(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        standin.faults, standin.sick = ["400"], "yes"  # nobody asks whether the server is well
        with pytest.raises(EngineError, match="injected"):
            await engine.generate(factory.request(), Progress())
        assert engine.receiver.version == 0

    on_a_site(kind, scenario)


@both
@pytest.mark.parametrize("sick", ["yes", "hang"])
def test_a_failure_on_a_server_that_is_not_well_takes_the_replica_down(kind: str, sick: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site, settings=replace(FAST, call_s=0.1))
        standin.faults, standin.sick = ["500"], sick
        with pytest.raises(EngineCrashed):
            await engine.generate(factory.request(), Progress())
        assert engine.receiver.version == -1
        with pytest.raises(EngineCrashed):
            await engine.receiver.begin(factory.version_of([[0.0]], 1)[0])

    on_a_site(kind, scenario)


@both
def test_a_server_that_goes_silent_is_down_for_everybody_even_if_it_says_that_it_is_well(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site, settings=replace(FAST, silence_s=0.2))
        standin.faults = ["", "hang"]
        parts = [Progress(), Progress()]
        calls = [engine.generate(factory.request(str(n)), part) for n, part in enumerate(parts)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineCrashed, EngineCrashed]

    on_a_site(kind, scenario)


@both
def test_a_server_that_does_not_answer_is_named_in_the_wait_for_graph_with_its_request(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        clock = asyncio.get_running_loop().time
        hub = InferenceHub([engine], events=EventLog(clock), reliability=ReliabilityConfig(), clock=clock)
        hub.version_changed(hub.replicas[0])
        standin.faults = ["hang"]
        asking = asyncio.ensure_future(hub.generate(factory.request("7.1/0"), Progress()))
        await asyncio.sleep(0.2)
        (edge,) = hub.waits()
        assert (edge.owner, edge.on) == ("generate", "engine/0") and edge.what.startswith("request 7.1/0, 0 tokens")
        assert clock() - edge.since_s >= 0.2
        asking.cancel()
        await asyncio.wait([asking])
        assert hub.waits() == []

    on_a_site(kind, scenario)


@both
def test_a_server_restarted_behind_our_back_makes_no_token_for_us(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        await standin.crash()
        await standin.start()
        progress = Progress()
        with pytest.raises(EngineCrashed, match="weights 'default'"):
            await engine.generate(factory.request(), progress)
        assert not len(progress.actions)

    on_a_site(kind, scenario)


@both
def test_a_version_that_is_not_loaded_whole_is_served_to_nobody(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        progress = Progress()
        running = asyncio.create_task(engine.generate(factory.request(), progress))
        await standin.decoder.midway.wait()
        standin.broken_load = True
        with pytest.raises(EngineCrashed, match="CUDA error"):
            await factory.serve(engine, 1)
        with pytest.raises(EngineCrashed):
            await running
        assert {run.version for run in progress.runs} == {0}
        assert engine.receiver.version == -1
        standin.broken_load = False
        if kind == "vllm":  # it has no model any more
            with pytest.raises(EngineCrashed, match="EngineCore encountered an issue"):
                await engine.restart()
            await standin.crash()  # and its owner starts it again
        await engine.restart()
        await factory.serve(engine, 1)
        assert await engine.generate(factory.request(), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(4, 44))

    on_a_site(kind, scenario)


@both
def test_weights_of_another_model_are_refused_with_what_the_server_says(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, _ = await begun(site)
        with pytest.raises(EngineCrashed, match="no module or parameter named 'other'"):
            await factory.serve(engine, 1, name="other")

    on_a_site(kind, scenario)


@both
def test_an_update_that_is_cancelled_half_way_leaves_nothing_that_is_served(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        reached, usual = asyncio.Event(), standin.routes()

        async def slow(request: Any) -> Any:
            reached.set()
            await asyncio.sleep(3600)

        standin.more = {path: slow for path in usual if path.endswith(("collective_rpc", "update_weights_from_disk"))}
        update = asyncio.create_task(factory.serve(engine, 1))
        await reached.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        with pytest.raises(EngineCrashed):
            await engine.generate(factory.request(), Progress())

    on_a_site(kind, scenario)


@both
@pytest.mark.parametrize("state", ["starts", "streams nothing"])
def test_an_engine_that_is_closed_while_its_server_comes_up_waits_no_longer(kind: str, state: str) -> None:
    async def scenario(site: Site) -> None:
        engine = site.engine(settings=replace(FAST, silence_s=3600.0, start_s=3600.0, first_s=3600.0))
        asked = asyncio.Event()

        async def refuse(request: web.Request) -> web.Response:
            asked.set()
            return web.Response(status=503)

        async def stream_nothing(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            asked.set()
            await asyncio.sleep(3600)
            return response

        streaming = f"POST {engine._dialect.path}"
        site.servers["engine/0"].more = {"GET /health": refuse} if state == "starts" else {streaming: stream_nothing}
        starting = asyncio.create_task(engine.start())
        await asked.wait()
        await engine.close()
        with pytest.raises(EngineCrashed, match=r"[Cc]losed|disconnected"):
            await starting

    on_a_site(kind, scenario)


def test_a_server_that_is_launched_while_its_engine_is_closed_is_ended() -> None:
    class Launching(ServerHandle):
        def __init__(self) -> None:
            super().__init__("http://127.0.0.1:9")
            self.asked, self.launch, self.runs = asyncio.Event(), asyncio.Event(), False

        async def start(self, on_end: ReportEnd) -> None:
            self.asked.set()
            await self.launch.wait()
            self.runs = True

        async def close(self) -> None:
            self.runs = False

    async def scenario(site: Site) -> None:
        server = Launching()
        engine = site.over(server, "engine/0", FAST)
        starting = asyncio.create_task(engine.start())
        await server.asked.wait()
        await engine.close()
        server.launch.set()
        with pytest.raises(EngineCrashed, match="engine/0 is closed"):
            await starting
        assert not server.runs

    on_a_site("vllm", scenario)


@both
def test_log_probabilities_are_those_after_the_temperature(kind: str) -> None:
    async def scenario(site: Site) -> None:
        rows = random_rows(factory.SIZE, seed=1)
        engine = site.engine(end_tokens=[])
        await factory.serve(engine, 0, rows)
        progress = Progress()
        assert await engine.generate(factory.request(count=20, temperature=0.5), progress) is FinishReason.LENGTH
        before = [3, *progress.actions]
        for last, action, logp in zip(before, progress.actions, progress.logps, strict=False):
            weights = [pow(2.718281828459045, value / 0.5) for value in rows[last]]
            assert pow(2.718281828459045, logp) == pytest.approx(weights[action] / sum(weights), rel=1e-4)

    on_a_site(kind, scenario)


@both
def test_a_server_whose_log_probabilities_are_before_the_temperature_is_refused(kind: str) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(ConfigError, match="before the temperature"):
            await site.engine().start()

    on_a_site(kind, scenario, raw=True)


def test_a_vllm_without_development_endpoints_is_refused_with_what_it_needs() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(EngineCrashed, match="VLLM_SERVER_DEV_MODE=1"):
            await site.engine().start()

    on_a_site("vllm", scenario, dev_mode=False)


def test_sglang_may_repeat_what_it_has_told_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSglangServer, "incremental", True)

    async def scenario(site: Site) -> None:
        engine, _ = await begun(site)
        progress = Progress()
        assert await engine.generate(factory.request(), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(4, 44))

    on_a_site("sglang", scenario)


@both
def test_what_a_checkpoint_could_change_about_sampling_is_said_in_every_request(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, standin = await begun(site)
        await engine.generate(factory.request(count=3, top_k=5, top_p=0.9, min_p=0.1), Progress())
        body = standin.asked[-1]
        said = body if kind == "vllm" else body["sampling_params"]
        assert (said["top_k"], said["top_p"], said["min_p"], said["temperature"]) == (5, 0.9, 0.1, 1.0)
        assert said["repetition_penalty"] == 1.0 and said["stop_token_ids"] == [43] and "seed" not in json.dumps(body)

    on_a_site(kind, scenario)


@both
def test_a_stop_string_over_the_seam_of_two_streams_is_found(kind: str) -> None:
    async def scenario(site: Site) -> None:
        engine, _ = await begun(site, decode=lambda tokens: "".join(chr(token + 60) for token in tokens))
        progress = Progress()
        progress.extend([4, 5], [0.0, 0.0], 0)  # "@A", made elsewhere
        stop = "".join(chr(token + 60) for token in (5, 6))
        assert await engine.generate(factory.request(stop=(stop,)), progress) is FinishReason.STOP
        assert list(progress.actions) == [4, 5, 6]
        assert await engine.generate(factory.request(stop=(stop,)), progress) is FinishReason.STOP
        assert list(progress.actions) == [4, 5, 6]

    on_a_site(kind, scenario)


def test_a_version_on_the_disk_is_a_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "old.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    rows = random_rows(40)
    manifest, buckets = factory.version_of(rows, 7)
    draft = VersionDirectoryWriter(tmp_path / "served", manifest, model_directory=model)
    draft.create()
    for bucket in reversed(buckets):
        draft.load(bucket)
    assert not (tmp_path / "served" / "v7").exists()
    draft.publish()
    directory = draft.path
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    from safetensors.numpy import load_file

    tensors = load_file(directory / "model.safetensors")
    for wanted, found in zip(rows, tensors["table"].tolist(), strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert tensors["version"] == 7.0


def test_only_the_version_that_is_served_stays_on_the_disk() -> None:
    async def scenario(site: Site) -> None:
        engine, _ = await begun(site)
        await factory.serve(engine, 1)
        assert [path.name for path in (site.root / "engine/0").iterdir()] == ["v1"]
        with pytest.raises(TransferError):
            await engine.receiver.begin(replace(factory.version_of([[0.0]], 2)[0], total_bytes=5))

    on_a_site("vllm", scenario)


def test_several_likeliest_tokens_are_told_from_log_probabilities_before_sampling() -> None:
    """Logits of 16 bits are often equal, and a top-k of one keeps all that are."""
    assert all(map(is_tie, [0.0, -math.log(2), -1e-6, -math.log(3), -0.6931]))
    assert not any(map(is_tie, [-0.4, -0.9, -1.3, -11.9, -40.0]))
