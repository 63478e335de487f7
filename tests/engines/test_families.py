"""Every family that people train is served, and what is served is what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.engines.base import Progress
from headway.engines.native.model_cache_runner import ModelCacheRunner
from headway.models.model_checks import find_attention_problem
from headway.types import FinishReason

from . import factory
from .factory import make_engine, request, run, serve, together, worst
from .families import FAST, SLOW, make_family


def ask(count: int = 6) -> list[Any]:
    """Requests of different lengths and temperatures, more than there are slots."""
    prompts = [[(7 * step + 3 * number) % 52 + 1 for step in range(3 + 5 * number)] for number in range(3)]
    return [request(str(n), prompt, count=count, temperature=(1.0, 0.8)[n % 2]) for n, prompt in enumerate(prompts)]


async def check_family(model: Any, limit: float, **options: Any) -> None:
    engine = make_engine(model, slot_tokens=64, slots=2, prefill_tokens=9, eos=[], **options)
    await serve(engine, model)
    asked = ask()
    for each, progress in zip(asked, await together(engine, asked), strict=True):
        assert len(progress.actions) == 6
        assert worst(model.to("cpu"), each, progress) < limit
    await engine.close()


@pytest.mark.parametrize("kind", FAST)
def test_families_that_share_forward_passes_are_exact(kind: str) -> None:
    model = make_family(kind)
    assert find_attention_problem(model, shorter_values=True) is None
    run(check_family(model, 1e-5))


@pytest.mark.parametrize("kind", SLOW)
def test_families_that_compute_each_sequence_alone_are_exact_and_say_so(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_family(kind)
    reason = find_attention_problem(model, shorter_values=True)
    assert reason
    run(check_family(model, 3e-5))
    said = capsys.readouterr().err
    assert f"{type(model).__name__} is served slowly, one sequence after the other: {reason}" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", [*FAST, *SLOW])
def test_families_are_exact_on_a_gpu(kind: str) -> None:
    run(check_family(make_family(kind), 2e-3, device="cuda"))


@pytest.mark.parametrize(("kind", "name"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_without_soft_caps_and_sinks_the_numbers_would_differ(kind: str, name: str) -> None:
    model, other = make_family(kind), make_family(kind)
    with torch.no_grad():
        for layer in other.model.layers:
            if name == "sinks":
                layer.self_attn.sinks.fill_(-1e9)
            else:
                layer.self_attn.attn_logit_softcapping = None
        tokens = torch.arange(1, 20)[None]
        assert float((model(tokens).logits - other(tokens).logits).abs().max()) > 1e-3


def test_other_weights_serve_the_next_token_of_a_recurrent_model_on_the_state_of_the_old_ones() -> None:
    async def scenario() -> None:
        old, new = make_family("mamba2", 0), make_family("mamba2", 1)
        runners: list[Any] = []

        def core(*parts: Any) -> Any:
            from headway.engines.native.native_core import make_slow_core

            def runner(*inner: Any) -> Any:
                runners.append(factory.SlowCacheRunner(*inner))
                return runners[0]

            return make_slow_core(*parts, reason="it has recurrent layers", make_runner=runner)

        engine = make_engine(old, slot_tokens=64, eos=[], make_core=core)
        asked, progress = await factory.flip_midway(engine, runners, old, new)
        assert [each.version for each in progress.runs] == [4, 5]
        exact = _continue_state(old, new, asked.prompt, progress.actions, progress.runs[0].count)
        assert float((exact - torch.tensor(progress.logps)).abs().max()) < 1e-4
        await engine.close()

    run(scenario())


@torch.no_grad()
def _continue_state(old: Any, new: Any, prompt: Any, actions: Any, made_by_old: int) -> torch.Tensor:
    tokens = [*prompt, *actions]
    state = old(torch.tensor([prompt]), use_cache=True)
    found = [state.logits[0, -1]]
    for place in range(len(prompt), len(tokens) - 1):
        model = old if place - len(prompt) + 1 < made_by_old else new
        state = model(torch.tensor([[tokens[place]]]), cache_params=state.cache_params, use_cache=True)
        found.append(state.logits[0, -1])
    return torch.stack(found).log_softmax(-1).gather(1, torch.tensor(actions)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["mamba2", "bloom"])
def test_what_was_aborted_on_the_slow_path_goes_on_elsewhere_as_if_never_stopped(kind: str) -> None:
    async def scenario() -> None:
        model = make_family(kind)
        first, second = make_engine(model, slot_tokens=64, eos=[]), make_engine(model, slot_tokens=64, eos=[])
        await serve(first, model)
        await serve(second, model)
        asked = request("a", range(3, 12), count=20)
        (whole,) = await together(first, [asked])
        part = Progress()
        part.extend(list(whole.actions[:9]), list(whole.logps[:9]), 0)
        assert await second.generate(asked, part) is FinishReason.LENGTH
        assert part.actions == whole.actions
        assert worst(model, asked, part) < 3e-5
        await first.close()
        await second.close()

    run(scenario())


def test_a_cache_that_changes_the_numbers_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    class ForgetfulRunner(ModelCacheRunner):
        def _forward(self, tokens: list[int], kept: Any, *, use_cache: bool) -> Any:
            logits_V, found = super()._forward(tokens, kept, use_cache=use_cache)
            return logits_V + 0.1 * torch.arange(len(logits_V)) * (kept is not None), found

    async def scenario() -> None:
        from headway.engines.native.native_core import make_slow_core

        model = make_family("bloom")
        engine = make_engine(
            model,
            slot_tokens=64,
            eos=[],
            make_core=lambda *parts: make_slow_core(*parts, reason="a test", make_runner=ForgetfulRunner),
        )
        await serve(engine, model)
        asked = request("a", range(3, 12), count=8)
        (progress,) = await together(engine, [asked])
        assert worst(model, asked, progress) < 1e-5
        await engine.close()

    run(scenario())
    assert "every token computes its whole sequence again, because its cache changes" in capsys.readouterr().err
