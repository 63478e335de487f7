"""What the denoising engine makes: exact steps, windows, shared prefixes, continuations."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch

from headway.algorithms.denoising import logp, make_timesteps
from headway.denoising.denoising_engine import DenoisingEngine
from headway.denoising.denoising_runner import FixedSizeModel, make_noise
from headway.denoising.denoising_scheduler import DenoisingRequest
from headway.denoising.settings import DenoisingSettings
from headway.engines.base import Progress, Request
from headway.errors import EngineError
from headway.types import DenoisingStep, FinishReason, VersionRun
from tests.denoising.factory import latent, make_engine, make_model, request, run, serve, together

model = cache(make_model)


def made(requests: list[Request], *, slots: int = 16, **settings: Any) -> tuple[list[Progress], DenoisingEngine]:
    """What an engine makes of them."""
    found: list[Any] = []

    async def scenario() -> None:
        engine = make_engine(slots=slots, **settings)
        try:
            await serve(engine, model())
            found.extend([await together(engine, requests), engine])
        finally:
            await engine.close()

    run(scenario())
    return found[0], found[1]


def path_of(asked: Request, settings: DenoisingSettings) -> list[DenoisingStep]:
    """The same picture by a plain loop over one sample."""
    window = settings.make_window(asked.params.max_new_tokens, asked.prefix_key, 0)
    row = DenoisingRequest(
        asked, (), number=0, prompt=bytes(asked.prompt).decode(), window=window, seed=0, share_prefix=True
    )
    sampler, grid = settings.make_sampler(), make_timesteps(row.steps)
    x, conditioning = make_noise(row.first_seed(), (1, 8, 8))[None], model().encode([row.prompt])
    steps = []
    with torch.no_grad():
        for at in range(row.steps):
            row.next_step = at
            s, s_next = grid[at : at + 1], grid[at + 1 : at + 2]
            transition = sampler.step(x, model()(x, s, conditioning), s, s_next, torch.tensor([row.is_noisy]))
            x = transition.draw(make_noise(row.step_seed(), (1, 8, 8))[None])
            steps.append((x[0], float(logp(x, *transition))))
    return steps  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["full", "random", "sliding"])
@pytest.mark.parametrize("sampler", ["cps", "sde"])
def test_a_batch_of_rows_at_different_steps_is_what_a_loop_over_each_makes(kind: Any, sampler: Any) -> None:
    settings: dict[str, Any] = {"window": kind, "sampler": sampler}
    asked = [request(f"{group}.{one}", str(group), group=group, steps=6) for group in (1, 2) for one in range(3)]
    parts, _ = made(asked, slots=4, **settings)  # some wait for slots, and join the others in the middle
    for one, progress in zip(asked, parts, strict=True):
        wanted: Any = path_of(one, DenoisingSettings(**settings))
        assert list(progress.logps) == pytest.approx([value for _, value in wanted], abs=1e-4)
        for step, (x, _) in zip(progress.actions, wanted, strict=True):
            if step.after:
                torch.testing.assert_close(latent(step.after), x, atol=1e-4, rtol=1e-4)
        image = progress.actions[-1].image
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(8, 8, 3)
        shown = model().decode(wanted[-1][0][None])[0].permute(1, 2, 0) * 255
        assert float((pixels - shown).abs().max()) <= 1.0


def test_latents_are_kept_where_they_are_trained_and_each_only_once() -> None:
    (progress,), _ = made([request(steps=8)], window="random", window_size=3)
    trained = [place for place, step in enumerate(progress.actions) if step.trained]
    assert len(trained) == 3 and trained == list(range(trained[0], trained[0] + 3))
    sizes = [(len(step.before), len(step.after)) for step in progress.actions]
    assert [sizes[place] for place in trained] == [(256, 256), (0, 256), (0, 256)]
    assert all(size == (0, 0) for place, size in enumerate(sizes) if place not in trained)
    assert [value != 0.0 for value in progress.logps] == [step.trained for step in progress.actions]


def test_members_share_the_steps_before_their_window_and_part_there() -> None:
    def asked(members: int) -> list[Request]:
        return [request(f"a.{one}", group=5, steps=10) for one in range(members)]

    settings: dict[str, Any] = {"window": "random", "window_size": 2, "seed": 3}
    start = DenoisingSettings(**settings).make_window(10, 5, 0).start  # type: ignore[union-attr]
    assert start > 0
    alone, engine = made(asked(4), share_prefix=False, **settings)
    assert engine.core is not None and engine.core.runner.calls == 4 * 10
    shared, engine = made(asked(4), **settings)
    assert engine.core is not None
    assert engine.core.runner.calls == 4 * 10 - 3 * start == 4 * 10 - engine.core.scheduler.saved  # type: ignore[attr-defined]
    starts = {progress.actions[start].before for progress in shared}
    ends = {progress.actions[start].after for progress in shared}
    assert len(starts) == 1 and len(ends) == 4
    assert len({progress.actions[start].before for progress in alone}) == 4


def test_those_who_come_late_find_the_prefix_and_those_after_a_flip_make_their_own() -> None:
    settings: dict[str, Any] = {"window": "random", "window_size": 2, "seed": 3}
    start = DenoisingSettings(**settings).make_window(10, 5, 0).start  # type: ignore[union-attr]

    async def scenario() -> None:
        engine = make_engine(**settings)
        await serve(engine, model())
        (first,) = await together(engine, [request("a", group=5, steps=10)])
        (late,) = await together(engine, [request("b", group=5, steps=10)])
        assert engine.core is not None and engine.core.runner.calls == 20 - start
        assert first.actions[start].before == late.actions[start].before
        await serve(engine, make_model(seed=7), 1)
        (other,) = await together(engine, [request("c", group=5, steps=10)])
        assert engine.core.runner.calls == 30 - start
        assert other.actions[start].before != first.actions[start].before
        await engine.close()

    run(scenario())


def test_a_leader_that_is_aborted_leaves_its_place_to_a_sibling() -> None:
    settings: dict[str, Any] = {"window": "random", "window_size": 2, "seed": 3}

    async def scenario() -> None:
        engine = make_engine(**settings)
        await serve(engine, model())
        whole = await together(engine, [request(f"w.{one}", group=5, steps=10) for one in range(2)])
        await serve(engine, model(), 1)
        await engine.pause()
        parts = [Progress() for _ in range(3)]
        calls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(engine.generate(request(f"w.{one}", group=5, steps=10), part))
            for one, part in enumerate(parts)
        ]
        await asyncio.sleep(0)

        def chunk(actions: Any) -> None:
            if len(parts[0].actions) == 2:
                calls.append(asyncio.ensure_future(engine.abort("w.0")))

        parts[0].on_chunk = chunk
        await engine.resume()
        await asyncio.gather(*calls)
        assert len(calls) == 4 and len(parts[0].actions) < 10
        assert [len(part.actions) for part in parts[1:]] == [10, 10]
        assert parts[1].actions == whole[1].actions, "as if nothing had happened"
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("kept", [1, 4, 6, 9])
def test_a_request_that_was_cut_off_ends_as_if_it_had_not_been(kept: int) -> None:
    settings: dict[str, Any] = {"window": "random", "window_size": 3, "seed": 4}
    (whole,), _ = made([request(steps=10)], **settings)

    async def scenario() -> None:
        engine = make_engine(**settings)
        await serve(engine, model(), 2)
        progress = Progress()
        progress.extend(whole.actions[:kept], whole.logps[:kept], 0)
        assert await engine.generate(request(steps=10), progress) is FinishReason.STOP
        assert progress.runs == (VersionRun(version=0, count=kept), VersionRun(version=2, count=10 - kept))
        assert list(progress.logps) == pytest.approx(list(whole.logps), abs=1e-4)
        for one, other in zip(progress.actions, whole.actions, strict=True):
            assert one.trained == other.trained and bool(one.before) == bool(other.before)
            if one.after:
                torch.testing.assert_close(latent(one.after), latent(other.after), atol=1e-4, rtol=1e-4)
        await engine.close()

    run(scenario())


def test_without_temperature_it_is_the_ode_and_guidance_is_what_it_says() -> None:
    (plain,), _ = made([request(temperature=0.0)])
    assert not any(step.trained or step.after for step in plain.actions) and set(plain.logps) == {0.0}
    (guided,), engine = made([request(temperature=0.0, guidance=3.0)])
    assert guided.actions[-1].image != plain.actions[-1].image
    assert engine.core is not None and engine.core.runner.calls == 16
    (empty,), _ = made([request(temperature=0.0, prompt="", guidance=3.0)])
    (same,), _ = made([request(temperature=0.0, prompt="")])
    assert empty.actions[-1].image == same.actions[-1].image, "without a prompt there is nothing to guide to"


def test_for_nft_only_the_clean_latent_is_kept_and_members_start_apart() -> None:
    parts, _ = made([request(name, group=1) for name in ("a", "b")], window="last")
    for progress in parts:
        assert [step.trained for step in progress.actions] == [False] * 7 + [True]
        assert progress.actions[-1].after and not progress.actions[-1].before
    assert parts[0].actions[-1].after != parts[1].actions[-1].after


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    async def scenario() -> None:
        engine = make_engine(window_size=5)
        await serve(engine, model())
        with pytest.raises(EngineError, match="does not fit into 4 denoising steps"):
            await engine.generate(request(steps=4), Progress())
        assert await engine.generate(request(steps=8), Progress()) is FinishReason.STOP
        await engine.close()

    run(scenario())


def test_batches_of_any_size_on_buffers_of_a_few_are_the_same() -> None:
    """What a GPU captures, with a capture that only notes what it was asked for."""
    captured = []

    def capture(step: Any) -> Any:
        captured.append(step)
        return step

    fast = FixedSizeModel(model(), capture, max_rows=24)
    with torch.no_grad():
        for rows in (1, 3, 2, 4, 20, 3, 24):
            x, s = torch.randn(rows, 1, 8, 8), torch.rand(rows)
            told = model().encode([str(row) for row in range(rows)])
            torch.testing.assert_close(fast(x, s, told), model()(x, s, told), atol=1e-5, rtol=1e-5)
    assert len(captured) == 4, "of 1, 2, 4 and 24 rows"
