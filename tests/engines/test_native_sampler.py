"""The sampler draws what it says, in the right proportions."""

from __future__ import annotations

import torch

from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.token_sampler import sample_tokens
from headway.types import SamplingParams

from .factory import request


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(300)
    count = 20_000
    uniforms = ((torch.arange(count) + 0.5) / count).tolist()
    tokens, logps = sample_tokens(logits.repeat(count, 1), [SamplingParams()] * count, uniforms)
    found = torch.bincount(torch.tensor(tokens), minlength=300) / count
    wanted = logits.softmax(-1)
    assert float((found - wanted).abs().max()) < 2 / count
    assert torch.allclose(torch.tensor(logps), wanted.log()[tokens], atol=1e-5)


def test_the_edges_of_the_uniform_interval_give_tokens_that_can_be_drawn() -> None:
    logits = torch.full((2, 1000), float("-inf"))
    logits[:, 130] = logits[:, 977] = 0.0
    tokens, logps = sample_tokens(logits, [SamplingParams()] * 2, [0.0, 1.0 - 2**-53])
    assert tokens == [130, 977]
    assert all(abs(logp + 0.693147) < 1e-5 for logp in logps)


def test_greedy_takes_the_best_and_reports_it_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logps = sample_tokens(logits.clone(), [SamplingParams(temperature=0.0)], [0.99])
    assert tokens == [1]
    assert abs(logps[0] - logits.log_softmax(-1)[0, 1].item()) < 1e-6


def test_uniform_numbers_fill_the_interval_and_differ_by_position_request_and_seed() -> None:
    drawn = []
    sequence = NativeSequence(request("a"), (), slot_tokens=20_000)
    for _ in range(10_000):
        drawn.append(sequence.next_uniform())
        sequence.append(1, 0.0)
    assert len(set(drawn)) == len(drawn) and 0 <= min(drawn) < 0.001 and 0.999 < max(drawn) < 1
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.01
    others = [NativeSequence(request("b"), (), slot_tokens=9), NativeSequence(request("a"), (), slot_tokens=9, seed=1)]
    assert len({drawn[0], *(other.next_uniform() for other in others)}) == 3
