"""Episodes whose turns begin with all turns before them: the KV of one is kept for the next."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headway.engines.base import Progress
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.paged_slots import PagedSlots

from . import factory
from .factory import VOCABULARY, make_engine, make_model, request, run, serve, together, worst
from .test_cuda_blocks import DEVICES, in_blocks


def engines() -> list[Any]:
    kinds = [pytest.param({}, id="steps")]
    for device in DEVICES:
        name, marks = (device, ()) if isinstance(device, str) else (device.values[0], device.marks)
        kinds.append(pytest.param({"device": name}, id=f"blocks on {name}", marks=marks))
    return kinds


def made(model: Any, kind: dict[str, Any], **options: Any) -> NativeEngine:
    return in_blocks(model, **kind, **options) if kind else make_engine(model, **options)


async def continued(engine: NativeEngine) -> int:
    """Turns that were continued, or tokens where pages count them."""
    found: list[Any] = []
    await engine._get_thread().call(lambda core: found.append(core.scheduler.slots) or [])
    count: int = found[0].reused_tokens if isinstance(found[0], PagedSlots) else found[0].prefixes.continued_turns
    return count


@pytest.mark.parametrize("kind", engines())
def test_turns_go_on_behind_what_was_computed_and_say_the_same(kind: dict[str, Any]) -> None:
    async def scenario() -> None:
        model, chance = make_model(), random.Random(5)
        engine = made(model, kind, slots=2, slot_tokens=120, prefix_tokens=400)
        await serve(engine, model)
        contexts = [[chance.randrange(1, VOCABULARY) for _ in range(9)] for _ in range(4)]
        for turn in range(3):
            asked = [
                request(f"{n}/{turn}", context, session=str(n), continues=True, count=12)
                for n, context in enumerate(contexts)
            ]
            for each, progress in zip(asked, await together(engine, asked), strict=True):
                assert worst(model, each, progress) < 1e-4
                said = [chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 7))]
                contexts[int(each.session)] += [*progress.actions, *said]
        least = 8 * (9 + 12 - 1) if kind else 8
        assert await continued(engine) >= least, "every turn but the first of each"
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("kind", engines())
def test_a_context_that_was_changed_is_taken_up_as_far_as_it_is_the_same(kind: dict[str, Any]) -> None:
    async def scenario() -> None:
        model = make_model()
        engine = made(model, kind)
        await serve(engine, model)
        first = request("a/0", [5, 6, 7, 8, 9], session="a", continues=True)
        await together(engine, [first])
        for name, prompt in (("a/1", [5, 6, 7, 30, 31, 32]), ("a/2", [40, 41]), ("a/3", [40])):
            asked = request(name, prompt, session="a", continues=True)
            (progress,) = await together(engine, [asked])
            assert worst(model, asked, progress) < 1e-4
        assert await continued(engine) == (3 if kind else 2), "the third begins with nothing of the second"
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("kind", engines())
def test_nothing_is_taken_up_under_other_weights(kind: dict[str, Any]) -> None:
    async def scenario() -> None:
        old, new = make_model(seed=0), make_model(seed=1)
        engine = made(old, kind)
        await serve(engine, old, 0)
        first = request("a/0", range(1, 20), session="a", continues=True)
        (begun,) = await together(engine, [first])
        await serve(engine, new, 1)
        asked = request("a/1", [*first.prompt, *begun.actions, 4], session="a")
        (progress,) = await together(engine, [asked])
        assert worst(new, asked, progress) < 1e-4
        assert await continued(engine) == 0
        await engine.close()

    run(scenario())


def test_a_turn_that_two_policies_have_made_is_not_kept() -> None:
    async def scenario() -> None:
        old, new = make_model(seed=0), make_model(seed=1)
        runners: list[factory.SlowRunner] = []

        def runner(*parts: Any) -> factory.SlowRunner:
            runners.append(factory.SlowRunner(*parts))
            return runners[0]

        engine = make_engine(old, make_runner=runner)
        await serve(engine, old, 4)
        first, begun = request("a/0", [5, 6, 7], session="a", continues=True, count=30), Progress()
        task = asyncio.create_task(engine.generate(first, begun))
        await asyncio.to_thread(runners[0].midway.wait, 10.0)
        await serve(engine, new, 5)
        await task
        assert len(begun.runs) == 2
        asked = request("a/1", [*first.prompt, *begun.actions, 4], session="a", count=5)
        (progress,) = await together(engine, [asked])
        assert worst(new, asked, progress) < 1e-4
        assert await continued(engine) == 0
        await engine.close()

    run(scenario())
