"""What an engine over a core in its own process does at its edges."""

from __future__ import annotations

import asyncio
import random

import pytest

from headway.engines.base import Progress
from headway.engines.streaming_engine import BackendLost
from headway.errors import EngineCrashed, EngineError, TransferError
from headway.types import FinishReason
from tests.engine_vllm.fake_core import FakeCore, make_engine
from tests.engine_vllm.test_contracts import serve
from tests.engines import factory

STEP_S = 0.001


def test_every_token_carries_the_version_that_made_it() -> None:
    """Whatever is paused, aborted and flipped at random moments; the weights say their own version."""

    async def ask(engine: object, name: str, progress: Progress) -> None:
        request = factory.request(name, [1], count=60)
        while await engine.generate(request, progress) is FinishReason.ABORTED:  # type: ignore[attr-defined]
            pass

    async def scenario(seed: int) -> None:
        chance, engine = random.Random(seed), make_engine(FakeCore(STEP_S))
        await serve(engine.receiver, 0, says=0)
        parts = [Progress() for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask(engine, str(n), progress)) for n, progress in enumerate(parts)]
            version = 0
            while not all(task.done() for task in asking):
                await asyncio.sleep(chance.random() * 0.02)
                paused = chance.random() < 0.5
                if paused:
                    await engine.pause()
                if chance.random() < 0.5:
                    await engine.abort(str(chance.randrange(4)))
                if chance.random() < 0.7:
                    version += 1
                    await serve(engine.receiver, version, says=version)
                if paused:
                    await engine.resume()
        await engine.close()
        for progress in parts:
            assert list(progress.actions) == [run.version for run in progress.runs for _ in range(run.count)]
            assert len(progress.actions) == 60
        assert version > 2

    for seed in range(3):
        factory.run(scenario(seed))


def test_a_request_that_waits_at_the_gate_can_be_aborted() -> None:
    async def scenario() -> None:
        engine = make_engine(FakeCore(STEP_S))
        await serve(engine.receiver, 0)
        async with engine._gate:  # somebody flips
            task = asyncio.create_task(engine.generate(factory.request("a", [1]), Progress()))
            await asyncio.sleep(0)
            await engine.abort("a")
            assert await task is FinishReason.ABORTED
        await engine.close()

    factory.run(scenario())


def test_tokens_of_other_weights_than_were_given_take_it_down() -> None:
    async def scenario() -> None:
        core, said = FakeCore(STEP_S), list[str]()
        engine = make_engine(core, on_down=said.append)
        await serve(engine.receiver, 3)
        core.wrong_label = "default"
        with pytest.raises(EngineCrashed, match="weights 'default' and not '3'"):
            await engine.generate(factory.request("a", [1], count=5), Progress())
        assert len(said) == 1 and engine.receiver.version == -1
        with pytest.raises(EngineCrashed, match="default"):
            await engine.generate(factory.request("b", [1]), Progress())
        await engine.close()

    factory.run(scenario())


def test_a_core_that_ends_is_missed_at_once_also_by_an_idle_engine() -> None:
    async def scenario() -> None:
        core, said = FakeCore(STEP_S), list[str]()
        engine = make_engine(core, on_down=said.append)
        await serve(engine.receiver, 3)
        core.die()
        assert said == ["engine/0: it has ended"] and engine.receiver.version == -1
        with pytest.raises(EngineCrashed, match="it has ended"):
            await engine.pause()
        with pytest.raises(EngineCrashed):
            await serve(engine.receiver, 4)
        await engine.close()

    factory.run(scenario())


def test_a_flip_that_is_cancelled_or_fails_half_way_leaves_nothing_that_is_served() -> None:
    async def scenario(failure: BaseException, wanted: type[BaseException]) -> None:
        core, said = FakeCore(STEP_S), list[str]()
        engine = make_engine(core, on_down=said.append)
        await serve(engine.receiver, 0)

        async def fails(*_: object) -> None:
            raise failure

        core.load = fails  # type: ignore[method-assign]
        task = asyncio.create_task(engine.generate(factory.request("a", [1], count=100), Progress()))
        with pytest.raises(wanted):
            await serve(engine.receiver, 1)
        with pytest.raises(EngineCrashed, match="version 1"):
            await task
        assert len(said) == 1 and engine.receiver.version == -1
        await engine.close()

    factory.run(scenario(asyncio.CancelledError(), asyncio.CancelledError))
    factory.run(scenario(BackendLost("no such parameter"), EngineCrashed))


def test_weights_that_are_not_the_models_are_refused_and_what_it_has_is_served_on() -> None:
    async def scenario() -> None:
        engine = make_engine(FakeCore(STEP_S))
        await serve(engine.receiver, 0)
        with pytest.raises(TransferError, match=r"version 1 has .*strange"):
            await serve(engine.receiver, 1, name="strange")
        progress = Progress()
        assert await engine.generate(factory.request("a", [1], count=3), progress) is FinishReason.LENGTH
        assert list(progress.actions) == [2, 3, 4] and engine.receiver.version == 0
        await engine.close()

    factory.run(scenario())


def test_what_comes_back_whole_or_too_long_is_not_asked_again() -> None:
    async def scenario() -> None:
        engine = make_engine(FakeCore(STEP_S), end_tokens=[9])
        await serve(engine.receiver, 0)
        done = Progress()
        done.extend([8, 9], [0.0, 0.0], 0)
        assert await engine.generate(factory.request("a", [7]), done) is FinishReason.STOP
        assert await engine.generate(factory.request("a", [7], count=2), done) is FinishReason.STOP
        with pytest.raises(EngineError, match=r"128 tokens .* leave no room"):
            await engine.generate(factory.request("a", [1] * 128), Progress())
        with pytest.raises(EngineError, match="need a tokenizer"):
            await engine.generate(factory.request("a", [1], stop=("x",)), Progress())
        await engine.close()

    factory.run(scenario())


def test_a_stop_string_is_found_over_the_seam_of_two_streams() -> None:
    async def scenario() -> None:
        engine = make_engine(FakeCore(STEP_S), decode=lambda tokens: "".join(map(chr, tokens)))
        await serve(engine.receiver, 0)
        begun = Progress()
        begun.extend([ord("b")], [0.0], 0)
        assert await engine.generate(factory.request("a", [ord("a")], stop=("bc",)), begun) is FinishReason.STOP
        assert bytes(begun.actions) == b"bc"
        await engine.close()

    factory.run(scenario())
