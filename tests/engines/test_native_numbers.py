"""What the native engine computes is what the model computes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.engines.base import Progress
from headway.types import VersionRun

from . import factory
from .factory import FAMILIES, VOCABULARY, full_logps, make_engine, make_model, request, run, serve, together, worst


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_a_full_forward(family: str) -> None:
    async def scenario() -> None:
        model = make_model(family)
        engine = make_engine(model)
        await serve(engine, model)
        asked = [request(str(n), prompt, temperature=(1.0, 0.7, 1.3)[n % 3]) for n, prompt in enumerate(prompts(6))]
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            assert len(progress.actions) == 20
            assert worst(model, each, progress) < 1e-4
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral, window of 9"])
def test_greedy_answers_equal_those_of_generate(family: str) -> None:
    async def scenario() -> None:
        model = make_model(family)
        engine = make_engine(model)
        await serve(engine, model)
        asked = [request(str(n), prompt, temperature=0.0) for n, prompt in enumerate(prompts(5))]
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            ids = torch.tensor([list(each.prompt)])
            wanted = model.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
            assert list(progress.actions) == wanted[0, len(each.prompt) :].tolist()
        await engine.close()

    run(scenario())


def test_members_of_a_group_share_a_prefill_and_get_the_same_log_probabilities() -> None:
    async def scenario() -> None:
        model = make_model("qwen2")
        engine = make_engine(model, slots=3)
        await serve(engine, model)
        prompt = prompts(1, longest=40)[0] * 2
        asked = [request(str(n), prompt, group=7) for n in range(8)]
        parts = await together(engine, asked)
        for each, progress in zip(asked, parts, strict=True):
            assert worst(model, each, progress) < 1e-4
        alone = make_engine(model, slots=3)
        await serve(alone, model)
        single = await together(alone, [request("5", prompt)])
        assert single[0].actions == parts[5].actions, "sharing changes no draw"
        assert await shared(engine) == 7 and await shared(alone) == 0
        await engine.close()
        await alone.close()

    run(scenario())


async def shared(engine: Any) -> int:
    found: list[int] = []
    await engine._get_thread().call(lambda core: found.append(core.scheduler.slots.prefixes.shared_prompts) or [])
    return found[0]


def test_one_key_with_two_prompts_shares_nothing() -> None:
    async def scenario() -> None:
        model = make_model()
        engine = make_engine(model)
        await serve(engine, model)
        asked = [request(str(n), prompt, group=1) for n, prompt in enumerate(prompts(4))]
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            assert worst(model, each, progress) < 1e-4
        assert await shared(engine) == 0
        await engine.close()

    run(scenario())


def test_a_kept_prefix_is_not_used_under_other_weights() -> None:
    async def scenario() -> None:
        old, new = make_model(seed=0), make_model(seed=1)
        engine = make_engine(old)
        await serve(engine, old, 0)
        await together(engine, [request("a", range(1, 30), group=3)])
        await serve(engine, new, 1)
        asked = request("b", range(1, 30), group=3)
        (progress,) = await together(engine, [asked])
        assert worst(new, asked, progress) < 1e-4
        assert progress.runs == (VersionRun(version=1, count=20),)
        await engine.close()

    run(scenario())


def test_a_flip_in_the_middle_uses_the_new_weights_from_the_very_next_token() -> None:
    async def scenario() -> None:
        old, new = make_model(seed=0), make_model(seed=1)
        runners: list[factory.SlowRunner] = []

        def runner(*parts: Any) -> factory.SlowRunner:
            runners.append(factory.SlowRunner(*parts))
            return runners[0]

        engine = make_engine(old, make_runner=runner)
        asked, progress = await factory.flip_midway(engine, runners, old, new)
        assert [run.version for run in progress.runs] == [4, 5]
        exact = _with_kept_kv(old, new, asked.prompt, progress.actions, progress.runs[0].count)
        assert float((exact - torch.tensor(progress.logps)).abs().max()) < 1e-4
        await engine.close()

    run(scenario())


@torch.no_grad()
def _with_kept_kv(old: Any, new: Any, prompt: Any, actions: Any, made_by_old: int) -> torch.Tensor:
    """By hand: the old model's cache up to the flip, then the new model on top of it."""
    tokens = [*prompt, *actions]
    before = len(prompt) + made_by_old - 1  # the last token of the old weights is first seen by the new ones
    head = old(torch.tensor([tokens[:before]]), use_cache=True)
    tail = new(torch.tensor([tokens[before:]]), past_key_values=head.past_key_values)
    logps = torch.cat([head.logits[0], tail.logits[0]]).log_softmax(-1)[len(prompt) - 1 : -1]
    return logps.gather(1, torch.tensor(actions)[:, None])[:, 0]


def test_a_resumed_request_conditions_on_what_was_made_and_draws_as_if_never_stopped() -> None:
    async def scenario() -> None:
        model = make_model("qwen3")
        first, second = make_engine(model), make_engine(model, name="engine/1")
        await serve(first, model)
        await serve(second, model)
        asked = request("a", range(3, 20), count=24)
        (whole,) = await together(first, [asked])
        part = Progress()
        part.extend(list(whole.actions[:9]), list(whole.logps[:9]), 0)
        await second.generate(asked, part)
        assert part.actions == whole.actions
        assert worst(model, asked, part) < 1e-4
        await first.close()
        await second.close()

    run(scenario())


def test_draws_depend_on_seed_and_request_but_not_on_the_company() -> None:
    async def scenario() -> None:
        model = make_model()
        asked = [request(str(n), [1, 2, 3]) for n in range(6)]
        answers = []
        for seed, slots in ((0, 6), (0, 2), (1, 6)):
            engine = make_engine(model, seed=seed, slots=slots)
            await serve(engine, model)
            answers.append([list(progress.actions) for progress in await together(engine, asked)])
            await engine.close()
        assert answers[0] == answers[1]
        assert answers[0] != answers[2]
        assert len({tuple(answer) for answer in answers[0]}) > 1

    run(scenario())


def test_two_hundred_requests_through_eight_slots_leave_no_trace_in_each_other() -> None:
    async def scenario() -> None:
        model = make_model("qwen2")
        engine = make_engine(model, slots=8, prefill_tokens=24, prefix_tokens=120, eos=[11])
        await serve(engine, model)
        chance = random.Random(1)
        pool = prompts(40, seed=2)
        asked = [
            request(str(n), pool[n // 5], group=n // 5 if n % 3 else -1, count=chance.randint(1, 30))
            for n in range(200)
        ]
        chance.shuffle(asked)
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            assert worst(model, each, progress) < 1e-4
            assert len(progress.actions) == each.params.max_new_tokens or progress.actions[-1] == 11
        await engine.close()

    run(scenario())


def test_weights_that_travel_as_bfloat16_are_served_in_float32() -> None:
    async def scenario() -> None:
        model = make_model()
        engine = make_engine(model)
        await serve(engine, model, dtype=torch.bfloat16)
        for tensor in model.parameters():
            tensor.data = tensor.data.bfloat16().float()
        asked = request()
        (progress,) = await together(engine, [asked])
        assert worst(model, asked, progress) < 1e-4
        await engine.close()

    run(scenario())


def test_truncated_draws_report_the_distribution_they_came_from() -> None:
    async def scenario() -> None:
        model = make_model(initializer_range=0.08)
        engine = make_engine(model)
        await serve(engine, model)
        cuts = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]
        asked = [request(str(n), prompt, **cut) for n, (prompt, cut) in enumerate(zip(prompts(4), cuts, strict=True))]
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            full = full_logps(model, each.prompt, progress.actions)
            for step, (action, logp) in enumerate(zip(progress.actions, progress.logps, strict=True)):
                assert abs(_kept(full[step].exp(), each.params)[action].log().item() - logp) < 1e-4
        await engine.close()

    run(scenario())


def _kept(probs: torch.Tensor, params: Any) -> torch.Tensor:
    """Truncation by the book: sort, cut, scale."""
    order = probs.sort(descending=True).indices.tolist()
    if params.top_k:
        order = order[: params.top_k]
    mass, nucleus = float(probs[order].sum()), []
    for token in order:
        nucleus.append(token)
        if float(probs[nucleus].sum()) >= params.top_p * mass:
            break
    kept = [token for token in nucleus if probs[token] >= params.min_p * probs.max()]
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept] / probs[kept].sum()
    return cut
