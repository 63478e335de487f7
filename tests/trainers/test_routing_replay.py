"""Mixtures of experts are trained with the experts that the engine has chosen."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from headway.models.expert_routing import RoutingRecorder, find_mixture, unpack_routing
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenRow, make_token_rows
from headway.trainers.local.tree_packing import TokenPack, pack_rows
from headway.types import (
    Episode,
    ExpertRouting,
    FinishReason,
    Generation,
    Sample,
    SampleGroup,
    Task,
    Turn,
    VersionRun,
)

from ..engines.families import make_family

KINDS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
LINES = ((3, 1, 4, 1, 5, 9, 2, 6), (3, 1, 4, 1, 2, 7, 1))


def pack_lines(routing: list[Any]) -> TokenPack:
    rows, first = [], 0
    for line, experts in zip(LINES, routing, strict=True):
        actions = tuple(range(4, len(line)))
        rows.append(TokenRow(sample_id="x", group=0, tokens=line, actions=actions, first=first, routing=experts))
        first += len(actions)
    (pack,) = pack_rows(rows, budget=100)
    return pack


@torch.no_grad()
def record(model: Any, line: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
    mixture = find_mixture(model)
    assert mixture is not None
    recorder = RoutingRecorder(mixture)
    recorder.store, recorder.rows = recorder.make_store(len(line)), torch.arange(len(line))
    logits = model(input_ids=torch.tensor([line]), use_cache=False).logits[0].log_softmax(-1)
    recorder.detach()
    routing = recorder.pack(recorder.store, 0)
    assert routing is not None
    return unpack_routing(routing), logits


def move(routing: np.ndarray, experts: int) -> np.ndarray:
    """Other experts for every token."""
    return ((routing + 1) % experts).astype(np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_computes_with_the_experts_that_it_is_given_and_with_its_own_weights_for_them(kind: str) -> None:
    model = make_family(kind)
    recorded = [record(model, line) for line in LINES]
    policy = PolicyModel(deepcopy(model), LocalSettings(gradient_checkpointing=True))
    assert policy.replays_routing
    free = policy.logps(pack_lines([None, None])).logp_N
    same = policy.logps(pack_lines([routing for routing, _ in recorded])).logp_N
    assert same.tolist() == pytest.approx(free.tolist(), abs=1e-5), "what it would choose itself"
    moved = pack_lines([move(routing, 4) for routing, _ in recorded])
    forced = policy.logps(moved).logp_N
    assert (forced - free).abs().max() > 1e-3
    forced.sum().backward()  # type: ignore[no-untyped-call]
    routers = {n: p for n, p in policy.trainable().items() if ("gate.weight" in n or "router.weight" in n)}
    assert routers and all(one.grad is not None and bool(one.grad.abs().sum() > 0) for one in routers.values())
    again = policy.logps(pack_lines([None, None])).logp_N
    assert again.tolist() == free.tolist(), "nothing is left of it"


def test_tokens_whose_experts_are_not_known_are_routed_by_the_trainer() -> None:
    model = make_family("mixtral")
    routing = [record(model, line)[0] for line in LINES]
    policy = PolicyModel(deepcopy(model), LocalSettings())
    free = policy.logps(pack_lines([None, None])).logp_N
    routing[0][3:] = -1
    routing[1] = None  # type: ignore[call-overload]
    assert policy.logps(pack_lines(routing)).logp_N.tolist() == pytest.approx(free.tolist(), abs=1e-5)


def test_a_reference_and_a_setting_of_false_route_by_themselves() -> None:
    model = make_family("qwen3_moe")
    moved = pack_lines([move(record(model, line)[0], 4) for line in LINES])
    policy = PolicyModel(deepcopy(model), LocalSettings(routing_replay=False))
    assert not policy.replays_routing
    free = policy.logps(pack_lines([None, None])).logp_N
    assert policy.logps(moved).logp_N.tolist() == free.tolist()


def test_a_router_that_cannot_be_replayed_is_found_by_a_trial() -> None:
    assert not PolicyModel(make_family("phimoe"), LocalSettings()).replays_routing
    assert not PolicyModel(make_family("llama"), LocalSettings()).replays_routing


def test_the_experts_of_all_turns_lie_at_the_tokens_that_they_belong_to() -> None:
    """Two turns of one context, then one of a new context: the engine reports each token once."""

    def turn(observation: int, actions: int, start: int, count: int, value: int, *, fresh: bool = False) -> Turn:
        routing = ExpertRouting(start=start, layers=1, experts=2, width=1, data=bytes([value, value + 1] * count))
        made = Generation(
            actions=[5] * actions,
            logps=[-1.0] * actions,
            runs=(VersionRun(version=0, count=actions),),
            finish=FinishReason.STOP,
            routing=routing,
        )
        return Turn(observation=[4] * observation, generation=made, starts_new_context=fresh)

    turns = (turn(3, 2, 0, 4, 10), turn(1, 2, 4, 3, 20), turn(2, 2, 0, 3, 30, fresh=True))
    episode = Episode(sample_id="0", task=Task(position=0), turns=turns)
    sample = Sample(sample_id="0", episode=episode, oldest=0, newest=0, actions=6)
    (row,) = make_token_rows([SampleGroup(group_id=0, task=episode.task, samples=(sample,))], 23)
    assert row.routing is not None and row.routing.shape == (12, 1, 2)
    assert row.routing[:, 0, 0].tolist() == [10] * 4 + [20] * 3 + [-1] + [30] * 3 + [-1]
    first, second = row.context_segments
    assert first.routing is not None and second.routing is not None
    assert second.routing[:, 0, 1].tolist() == [31] * 3 + [-1]
