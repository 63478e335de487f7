"""An engine reports the experts of every token that the trainer will compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.codec import decode, encode
from headway.engines.base import Progress
from headway.engines.remote_engine import EngineHost
from headway.models.expert_routing import RoutingRecorder, find_mixture, unpack_routing

from .factory import make_engine, request, run, serve, together
from .families import make_family
from .test_cuda_blocks import DEVICES, in_blocks


@torch.no_grad()
def choose(model: Any, tokens: list[int]) -> np.ndarray:
    """The experts of all tokens but the last, by a plain forward pass."""
    mixture = find_mixture(model)
    assert mixture is not None
    recorder = RoutingRecorder(mixture)
    recorder.store, recorder.rows = recorder.make_store(len(tokens)), torch.arange(len(tokens))
    model(torch.tensor([tokens]), use_cache=False)
    recorder.detach()
    return np.sort(recorder.store[:-1].numpy().astype(np.int32), axis=-1)


def read(progress: Progress) -> np.ndarray:
    assert progress.routing is not None
    return np.sort(unpack_routing(progress.routing), axis=-1)


@pytest.mark.parametrize("device", ["steps", *DEVICES])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_members_that_share_a_prompt_report_its_experts_too(kind: str, device: str) -> None:
    async def scenario() -> None:
        model = make_family(kind)
        options: dict[str, Any] = {"slot_tokens": 64, "slots": 2, "prefill_tokens": 7, "eos": []}
        engine = make_engine(model, **options) if device == "steps" else in_blocks(model, device=device, **options)
        await serve(engine, model)
        prompts = [[(5 * step + group) % 50 + 1 for step in range(9 + 4 * group)] for group in range(2)]
        asked = [request(str(n), prompts[n // 3], group=n // 3, count=4 + 2 * n) for n in range(6)]
        for each, progress in zip(asked, await together(engine, asked), strict=True):
            assert progress.routing is not None and progress.routing.start == 0
            assert (read(progress) == choose(model, [*each.prompt, *progress.actions])).all()
        await engine.close()

    run(scenario())


def test_a_request_that_continues_reports_what_is_not_known_yet() -> None:
    async def scenario() -> None:
        model = make_family("mixtral")
        engine = make_engine(model, slot_tokens=64, eos=[])
        await serve(engine, model)
        asked = request("a", range(3, 12), count=12)
        (whole,) = await together(engine, [asked])
        part = Progress()
        part.extend(list(whole.actions[:5]), list(whole.logps[:5]), 0)
        part.routing_start = 8
        await engine.generate(asked, part)
        assert part.actions == whole.actions
        assert part.routing is not None and part.routing.start == 8
        assert (read(part) == read(whole)[8:]).all()
        await engine.close()

    run(scenario())


def test_a_dense_model_reports_none() -> None:
    async def scenario() -> None:
        model = make_family("llama")
        engine = make_engine(model, slot_tokens=64, eos=[])
        await serve(engine, model)
        (progress,) = await together(engine, [request(count=3)])
        assert progress.routing is None
        await engine.close()

    run(scenario())


def test_experts_cross_to_another_process_with_the_actions() -> None:
    async def scenario() -> None:
        model, notes = make_family("mixtral"), list[Any]()
        engine = make_engine(model, slot_tokens=64, eos=[])
        await serve(engine, model)
        host = EngineHost(engine, lambda note: notes.append(decode(encode(note))))
        asked = request("a", range(3, 9), count=5)
        await host.generate(0, asked, ((), (), (), 2))
        received = Progress()
        for counts, actions, logps, routing in notes:
            if counts:
                received.extend(actions, logps, counts[1])
            for _, experts in routing:
                received.add_routing(experts)
        assert received.routing is not None and received.routing.start == 2
        assert (read(received) == choose(model, [*asked.prompt, *received.actions])[2:]).all()
        await engine.close()

    run(scenario())
