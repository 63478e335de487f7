"""Packing, sharing prompts, cutting into micro-batches, checkpointing and skipping change no gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.trainers.local import tree_attention
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenRow, make_token_rows
from headway.trainers.local.training_thread import CommitGate
from headway.trainers.local.tree_packing import PromptTree, common_prefix_length, pack_rows, pack_rows_evenly
from headway.types import Batch, Sample, SampleGroup

from .factory import VOCABULARY, batch, exact, tiny

PPO = PolicyObjective(pg_variant="ppo", settings=LossSettings(clip_low=5.0, clip_high=5.0), entropy_coef=0.01)


class Stop(Exception):
    """Thrown where the weights would be moved."""


def gradients(data: Batch, model: Callable[[], Any] = exact, **options: Any) -> dict[str, Tensor]:
    """Before the clip, in float64."""
    defaults: dict[str, Any] = {
        "advantages": AdvantageSettings(adv_estimator="grpo"),
        "objective": PPO,
        "precision": "fp64",
        "micro_batch_tokens": 10_000,
        "gradient_checkpointing": False,
    }
    learner = LocalLearner(model(), LocalSettings(**{**defaults, **options}))
    found: dict[str, Tensor] = {}

    def ready(what: str) -> float:
        for name, one in learner.policy.trainable().items():
            found[name] = torch.zeros_like(one) if one.grad is None else one.grad.clone()
        raise Stop

    learner.state.optimizer.clip_gradients = ready  # type: ignore[method-assign]
    with pytest.raises(Exception, match="Stop"):
        learner.learn(data, CommitGate())
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor], *, rtol: float = 1e-9, atol: float = 1e-13) -> None:
    assert any(float(grad.abs().max()) > 1e-6 for grad in one.values())
    for name, grad in one.items():
        torch.testing.assert_close(other[name], grad, rtol=rtol, atol=atol)


CHANGES: dict[str, dict[str, Any]] = {
    "members one by one": {"share_prompts": False, "micro_batch_tokens": 1},
    "not shared": {"share_prompts": False},
    "small micro-batches": {"micro_batch_tokens": 40},
    "smallest micro-batches": {"micro_batch_tokens": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "all of it": {"gradient_checkpointing": True, "micro_batch_tokens": 30},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("turns", [1, 3])
def test_how_a_batch_is_laid_out_changes_no_gradient(change: str, turns: int) -> None:
    data = batch(0, turns=turns)
    same(gradients(data), gradients(data, **CHANGES[change]))


@pytest.mark.parametrize("change", CHANGES)
def test_nor_with_rotary_positions_and_fewer_key_heads(change: str) -> None:
    data = batch(0, turns=2)
    same(gradients(data, tiny), gradients(data, tiny, **CHANGES[change]), rtol=1e-3, atol=1e-7)


def test_large_trees_are_attended_in_parts_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(0, turns=2, longest=20)
    whole = gradients(data)
    monkeypatch.setattr(tree_attention, "SMALL_TREE_TOKENS", 0)
    same(whole, gradients(data))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_groups_that_teach_nothing_are_skipped_without_a_trace(mode: Any) -> None:
    flat, spread = batch(5, groups=2, flat=True), batch(0, groups=2)
    data = Batch(trained=0, groups=(*spread.groups, *flat.groups))
    plain = PolicyObjective(pg_variant="ppo", settings=LossSettings(), mode=mode, norm_length=50)
    assert plain.skips_zero_advantages
    every = PolicyObjective(pg_variant="ppo", settings=LossSettings(), mode=mode, norm_length=50, entropy_coef=1e-300)
    assert not every.skips_zero_advantages
    same(gradients(data, objective=plain), gradients(data, objective=every))
    kimi = PolicyObjective(pg_variant="kimi15")
    assert not kimi.skips_zero_advantages


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_entropy_is_that_of_the_actions_that_were_looked_at(mode: Any) -> None:
    """Groups that are skipped, however many, do not make it look smaller."""
    plain = PolicyObjective(pg_variant="ppo", settings=LossSettings(), mode=mode)
    chosen = LocalSettings(objective=plain, advantages=AdvantageSettings(), precision="fp64", micro_batch_tokens=40)
    spread, flat = batch(0, groups=2), batch(5, groups=4, flat=True)
    alone = LocalLearner(exact(), chosen).learn(spread, CommitGate())["entropy"]
    among = LocalLearner(exact(), chosen).learn(Batch(trained=0, groups=(*spread.groups, *flat.groups)), CommitGate())
    assert among["skipped_samples"] == 16
    assert among["entropy"] == pytest.approx(alone, rel=1e-12)
    assert 3.0 < alone < 3.14  # a little less than log 23


def test_losses_over_sequences_get_whole_ones() -> None:
    gspo = PolicyObjective(pg_variant="gspo", settings=LossSettings(clip_low=5.0, clip_high=5.0))
    data = batch(0)
    same(gradients(data, objective=gspo), gradients(data, objective=gspo, micro_batch_tokens=25))


def test_a_shared_prompt_is_encoded_once_and_nothing_is_padded() -> None:
    data = batch(0, groups=2, members=8)
    rows = make_token_rows(data.groups, VOCABULARY)
    packs = pack_rows(rows, budget=10_000)
    assert len(packs) == 1 and len(packs[0].trees) == 2
    prompts = [len(group.task.prompt) for group in data.groups]
    actions = sum(group.actions for group in data.groups)
    assert packs[0].token_L.numel() == sum(prompts) + actions
    alone = pack_rows(rows, budget=10_000, share=False)
    assert alone[0].token_L.numel() == sum(8 * prompt for prompt in prompts) + actions
    for budget in (1, 30, 77, 200):
        cut = pack_rows(rows, budget=budget)
        numbers = torch.cat([pack.action_N for pack in cut])
        assert sorted(numbers.tolist()) == list(range(actions))
        assert all(pack.token_L.numel() <= budget or len(pack.trees[0].members) == 1 for pack in cut)


@pytest.mark.parametrize(("groups", "ways"), [(1, 2), (3, 2), (3, 4), (1, 8)])
def test_ranks_have_one_pack_each_where_one_for_all_would_do(groups: int, ways: int) -> None:
    data = batch(0, groups=groups, members=8)
    rows = make_token_rows(data.groups, VOCABULARY)
    packs = pack_rows_evenly(rows, ways, budget=10_000)
    assert ways // 2 < len(packs) <= ways, "more packs would be another round for all"
    numbers = torch.cat([pack.action_N for pack in packs])
    assert sorted(numbers.tolist()) == list(range(sum(group.actions for group in data.groups)))
    sizes = [pack.token_L.numel() for pack in packs]
    assert max(sizes) < 0.8 * sum(sizes), "nobody has nearly everything"


def test_observations_are_read_and_never_trained() -> None:
    data = batch(0, turns=3)
    rows = make_token_rows(data.groups, VOCABULARY)
    pack = pack_rows(rows, budget=10_000)[0]
    made = [token for group in data.groups for one in group.samples for turn in one.episode.turns
            for token in turn.generation.actions]  # fmt: skip
    order = pack.action_N.argsort()
    assert pack.chosen_N[order].tolist() == made
    assert sum(len(row.tokens) for row in rows) > len(made) + sum(row.prompt_length for row in rows)


def anew(sample: Sample, shared: int) -> Sample:
    """The last turn of three saw only its own observation, which begins as the first one does, or not."""
    turns = sample.episode.turns
    other = (turns[0].observation[0] + 1) % VOCABULARY
    last = replace(turns[2], observation=(*turns[0].observation[:shared], other, 7), starts_new_context=True)
    return replace(sample, episode=replace(sample.episode, turns=(*turns[:2], last)))


def strands(sample: Sample) -> list[Sample]:
    """The same as two samples."""
    turns = sample.episode.turns
    parts = [replace(sample.episode, turns=turns[:2]), replace(sample.episode, turns=turns[2:])]
    return [
        replace(sample, episode=part, actions=sum(len(turn.generation.actions) for turn in part.turns))
        for part in parts
    ]


@pytest.mark.parametrize("shared", [0, 2])
def test_a_context_that_began_anew_is_a_strand_of_its_own(shared: int) -> None:
    whole = batch(0, turns=3, groups=2)
    groups = (replace(one, samples=tuple(anew(sample, shared) for sample in one.samples)) for one in whole.groups)
    data = Batch(trained=0, groups=tuple(groups))
    learner = LocalLearner(exact(), LocalSettings(precision="fp64", micro_batch_tokens=10_000))
    for group in data.groups:
        apart = tuple(strand for one in group.samples for strand in strands(one))
        wanted = learner.score("policy", SampleGroup(group_id=0, task=group.task, samples=apart), CommitGate())
        found = learner.score("policy", group, CommitGate())
        flat = [[*one, *other] for one, other in zip(wanted[::2], wanted[1::2], strict=True)]
        assert [len(one) for one in found] == [one.actions for one in group.samples]
        for one, other in zip(found, flat, strict=True):
            assert one == pytest.approx(other, abs=1e-12)
    for change in CHANGES.values():
        same(gradients(data), gradients(data, **change))


def stateless(sample: Sample) -> Sample:
    """Every turn saw only the state it was in, one of two."""
    turns = tuple(
        replace(turn, observation=(1, 2, 3, 4, 5, 6 + number % 2, 8, 9), starts_new_context=True)
        for number, turn in enumerate(sample.episode.turns)
    )
    return replace(sample, episode=replace(sample.episode, turns=turns))


def test_a_state_that_many_turns_saw_is_encoded_once() -> None:
    whole = batch(0, turns=3, groups=2, members=4)
    data = Batch(trained=0, groups=tuple(replace(g, samples=tuple(map(stateless, g.samples))) for g in whole.groups))
    (pack,) = pack_rows(make_token_rows(data.groups, VOCABULARY), budget=10_000)
    assert [tree.prefix for tree in pack.trees] == [8, 8, 8, 8] and [len(tree.members) for tree in pack.trees] == [
        8,
        4,
    ] * 2
    assert pack.token_L.numel() == 4 * 8 + sum(group.actions for group in data.groups)
    for change in CHANGES.values():
        same(gradients(data), gradients(data, **change))


def test_who_sees_whom() -> None:
    mask = tree_attention.make_tree_mask(PromptTree(start=0, prefix=2, members=(1, 2))).int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert common_prefix_length([(1, 2, 3), (1, 2), (1, 2, 4)]) == 2
    assert common_prefix_length([(1,), (2,)]) == 0 and common_prefix_length([(5, 6)]) == 2


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("before", [0, 40])
def test_long_sequences_are_computed_without_a_mask_of_all_pairs(
    before: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (600, 600 + before, 600 + before))
    wanted = tree_attention.causal_attention(q, k, v, before, window, None)
    largest: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spied(*args: Any, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        largest.append(0 if attn_mask is None else attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", spied)
    monkeypatch.setattr(tree_attention, "LARGEST_MASK", 1000)
    found = tree_attention.causal_attention(q, k, v, before, window, None)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert max(largest) <= (0 if window is None else 256 * (256 + 30))


def test_a_sample_longer_than_the_budget_is_a_pack_of_its_own_and_changes_no_gradient() -> None:
    rows: list[TokenRow] = []
    for number, (length, first) in enumerate(((40, 0), (5, 40), (3, 45), (60, 48))):
        tokens, actions = (*range(3, 9), *[number] * length), tuple(range(6, 6 + length))
        rows.append(TokenRow(sample_id="x", group=number // 2, tokens=tokens, actions=actions, first=first))
    packs = pack_rows(rows, budget=20)
    assert sorted(pack.token_L.numel() for pack in packs) == [20, 46, 66]
    found = []
    for some in (packs, pack_rows(rows, budget=1000)):
        policy = PolicyModel(exact(), LocalSettings(precision="fp64"))
        for pack in some:
            policy.logps(pack).logp_N.sum().backward()
        found.append([one.grad for one in policy.trainable().values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
