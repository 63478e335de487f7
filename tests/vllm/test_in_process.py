"""An engine with a real vLLM in its own process meets the same contracts as our own, and says what its weights say."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.engines.base import Engine, Progress, Request
from headway.engines.remote_engine import RemoteEngine
from headway.errors import ConfigError, EngineCrashed, TransferError
from headway.types import FinishReason
from headway.weights.base import Bucket, WeightReceiver, WeightSource, WeightTransport
from headway.weights.host_transports import SharedMemoryTransport
from headway.weights.weight_store import SharedArena, WeightStore
from tests.contracts.engine_contract import EngineContract
from tests.contracts.weights_contract import WeightsContract
from tests.engines import factory
from tests.vllm.in_process import (
    InProcessPool,
    WatchedRemoteEngine,
    load,
    make_in_process_spec,
    publish,
    serve,
    servers,
    shared_by,
    start,
)
from tests.vllm.server_pool import DISTURBED_TOKENS, SHAPE, ServerPool, exact, family, gone, save
from tests.vllm.test_tokens import FLIPS, always, check_versions_of_tokens, make_request, other_names


@pytest.fixture(scope="module")
def inside(place: ServerPool) -> Iterator[InProcessPool]:
    made = InProcessPool(place)
    try:
        yield made
    finally:
        made.close()


class InVllm:
    """Runs scenarios where the children are."""

    @pytest.fixture(autouse=True)
    def at(self, inside: InProcessPool) -> None:
        self.inside = inside

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.inside.place.run(scenario)


class TestInProcessEngine(InVllm, EngineContract):
    LENGTH = DISTURBED_TOKENS

    def make(self, name: str = "engine/0") -> Engine:
        return self.inside.engine(name, ends=(self.LENGTH + 3,))

    async def serve(self, engine: Engine, version: int) -> None:
        assert isinstance(engine, RemoteEngine)
        await serve(engine, self.inside.place.counting, version)

    def request(self, name: str = "a") -> Request:
        return factory.request(name, [1, 2, 3], count=self.LENGTH + 20)

    async def midway(self, engine: Engine, progress: Progress) -> None:
        assert isinstance(engine, WatchedRemoteEngine)
        await engine.made(5)

    async def crash(self, engine: Engine) -> None:
        """vLLM's core alone: its family and our child are gone with it, and nobody has to ask for that."""
        child = self.inside.kept[engine.name].pid
        everybody = family(child)
        self.inside.kill(engine.name)
        assert len(everybody) >= 3 and await asyncio.to_thread(gone, everybody)


class TestInsideReceiver(InVllm, WeightsContract):
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        store = WeightStore(bucket_mb=1.0, wire_dtype=None, arena=SharedArena())
        for version in (1, 2):
            store.publish(version, dict(self.inside.place.counting.named_parameters()))
        return store, SharedMemoryTransport(), self.inside.engine().receiver

    def corrupted(self, bucket: Bucket) -> Bucket:
        return replace(bucket, payload=replace(bucket.payload, start=bucket.payload.start + 4))


@exact
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_model_after_the_temperature(
    inside: InProcessPool, temperature: float
) -> None:
    async def scenario() -> None:
        engine, model = inside.engine(), inside.place.random
        await serve(engine, model, 0)
        requests = [make_request(60, (5, 9, n), str(n), temperature=temperature) for n in range(6)]
        for request, progress in zip(requests, await factory.together(engine, requests), strict=True):
            assert len(progress.actions) == 60
            assert factory.worst(model, request, progress) < 1e-3

    inside.place.run(scenario())


@exact
def test_log_probabilities_are_those_of_what_was_drawn_from(inside: InProcessPool) -> None:
    """After top-k: one of three, and their probabilities are one together."""

    async def scenario() -> None:
        engine, model = inside.engine(), inside.place.random
        await serve(engine, model, 0)
        progress, request = Progress(), make_request(40, temperature=1.5, top_k=3)
        assert await engine.generate(request, progress) is FinishReason.LENGTH
        full = factory.full_logps(model, request.prompt, progress.actions, 1.5)
        best = full.topk(3, dim=-1)
        chosen = torch.tensor(list(progress.actions))[:, None]
        assert (best.indices == chosen).any(dim=-1).all()
        exact = full.gather(1, chosen)[:, 0] - best.values.logsumexp(-1)
        assert float((exact - torch.tensor(list(progress.logps))).abs().max()) < 1e-3

    inside.place.run(scenario())


def test_a_stop_string_is_found_also_over_the_seam_of_a_flip(inside: InProcessPool) -> None:
    from headway.models.tiny_model import make_character_tokenizer

    stop = make_character_tokenizer().decode([30, 31])

    async def scenario() -> None:
        engine = inside.engine()
        await serve(engine, inside.place.counting, 0)
        progress = Progress()
        assert await engine.generate(make_request(60, (20,), stop=(stop,)), progress) is FinishReason.STOP
        assert list(progress.actions) == list(range(21, 32))
        begun = Progress()
        begun.extend(list(range(21, 31)), [0.0] * 10, 0)
        assert await engine.generate(make_request(60, (20,), stop=(stop,)), begun) is FinishReason.STOP
        assert list(begun.actions) == list(range(21, 32))

    inside.place.run(scenario())


@pytest.mark.parametrize("seed", range(2))
def test_every_token_carries_the_version_that_made_it(inside: InProcessPool, seed: int) -> None:
    async def scenario() -> None:
        engine = inside.engine()
        stores = {version: publish(always(version), version) for version in range(1, FLIPS + 1)}

        async def load_version(version: int) -> None:
            await load(engine, stores[version], version)

        await serve(engine, always(0), 0)
        await check_versions_of_tokens(engine, seed, load_version)
        for store in stores.values():
            store.close()

    inside.place.run(scenario())


@exact
def test_a_pause_keeps_requests_and_their_kv_where_they_are(inside: InProcessPool) -> None:
    """Goes on at once, and with what the model says after all that came before the pause."""

    async def scenario() -> None:
        engine, model = inside.engine(), inside.place.random
        await serve(engine, model, 0)
        progress, request = Progress(), make_request(450, (5, 9, 1))
        task = asyncio.create_task(engine.generate(request, progress))
        for _ in range(3):
            await engine.made(min(len(progress.actions) + 20, 450))
            await engine.pause()
            kept = len(progress.actions)
            await asyncio.sleep(0.2)
            assert len(progress.actions) == kept
            await engine.resume()
        assert await task is FinishReason.LENGTH
        assert factory.worst(model, request, progress) < 1e-3

    inside.place.run(scenario())


def test_weights_whose_names_do_not_match_never_reach_vllm(inside: InProcessPool) -> None:
    async def scenario() -> None:
        engine = inside.engine()
        await serve(engine, inside.place.counting, 0)
        with pytest.raises(TransferError, match=r"version 1 has also .*q_norm.weight"):
            await serve(engine, other_names(), 1)
        tied = factory.make_model(**SHAPE, tie_word_embeddings=True)
        with pytest.raises(TransferError, match=r"version 1 lacks lm_head.weight"):
            await serve(engine, tied, 1)
        assert await engine.generate(make_request(5), Progress()) is FinishReason.LENGTH, "it serves what it had"
        assert engine.receiver.version == 0

    inside.place.run(scenario())


def test_weights_that_vllm_cannot_load_take_it_down_with_its_words(inside: InProcessPool) -> None:
    """Their names are right, and a shape is not."""

    async def scenario() -> None:
        engine = inside.engine()
        await serve(engine, inside.place.counting, 0)
        narrow = factory.make_model(**SHAPE, intermediate_size=64)
        with pytest.raises(EngineCrashed, match=r"version 1: .*"):
            await serve(engine, narrow, 1)
        assert engine.receiver.version == -1
        with pytest.raises(EngineCrashed):
            await engine.generate(make_request(5), Progress())

    inside.place.run(scenario())


def told_at_the_start(place: ServerPool, tmp_path: Path, model: Path, **args: object) -> Exception:
    """What is said about one that does not come up."""
    found: list[Exception] = []

    async def scenario() -> None:

        spec = make_in_process_spec(servers(model, tmp_path, **args), 0, ())
        engine = RemoteEngine(spec, 8, start)
        try:
            await engine.start()
        except (EngineCrashed, ConfigError) as error:
            found.append(error)
        finally:
            await engine.close()

    place.run(scenario())
    return found[0]


def test_one_that_dies_while_it_loads_says_why_with_its_last_lines(place: ServerPool, tmp_path: Path) -> None:
    model = save(factory.counting_model(**SHAPE), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights at all")
    said = str(told_at_the_start(place, tmp_path, model))
    assert "SafetensorError: Error while deserializing header" in said and "\n  | " in said


def test_an_option_that_vllm_does_not_know_is_refused(place: ServerPool, tmp_path: Path) -> None:
    error = told_at_the_start(place, tmp_path, place.model, nonsense=3)
    assert isinstance(error, ConfigError) and "server_args.nonsense = 3" in str(error)


PARENT = """
import asyncio, sys, time
from pathlib import Path
from headway.engines.remote_engine import RemoteEngine
from tests.vllm.in_process import make_in_process_spec, servers, start

async def main():
    spec = make_in_process_spec(servers(Path(sys.argv[1])), 0, ())
    engine = RemoteEngine(spec, 8, start)
    await engine.start()
    print(engine._child._peers[0].pid, flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


def test_all_its_processes_end_with_us_when_we_are_killed_and_leave_no_shared_memory(place: ServerPool) -> None:
    import subprocess
    import sys

    line = [sys.executable, "-c", PARENT, str(place.model)]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as parent:
        assert parent.stdout is not None
        everybody = family(int(parent.stdout.readline()))
        assert len(everybody) >= 5, "ours, vLLM's core and worker, a watchdog and a tracker"
        left = shared_by(everybody)
        parent.send_signal(signal.SIGKILL)
    assert gone(everybody)
    assert left and not any(path.exists() for path in left)
