"""The objective as a trainer uses it: cuts, packing, padding and ranks change nothing; masks always hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithm_traits import LOSS_TRAITS
from headway.algorithms.actions import Actions, BatchTotals
from headway.algorithms.losses import LossSettings
from headway.algorithms.mismatch import ImportanceWeightSettings, MismatchCorrection, RatioFilterSettings
from headway.algorithms.objective import PolicyObjective, make_objective
from headway.config import load_config
from headway.errors import InvariantBroken
from tests.algorithms.factory import (
    INDEPENDENT_LOSSES,
    LOSS_NAMES,
    MODES,
    World,
    generator,
    gradient,
    objective,
    select,
    world,
)

FULL = MismatchCorrection(
    weight=ImportanceWeightSettings(level="sequence", upper_bound=1.3),
    filters=(RatioFilterSettings(low=0.2, high=2.5), RatioFilterSettings(level="geometric", low=0.5, high=1.6)),
)


def everything(name: str, mode: Any) -> PolicyObjective:
    """`name` with KL, entropy and both corrections on."""
    return objective(name, mode=mode, norm_length=9, kl_coef=0.3, entropy_coef=0.2, mismatch=FULL)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def summed(goal: PolicyObjective, place: World, parts: Sequence[Tensor], totals: BatchTotals) -> tuple[Tensor, Any]:
    """Gradients and metrics of micro-batches, added up as a trainer does."""
    table, sums = place.table.clone().requires_grad_(), None
    for index in parts:
        result = goal(select(place.actions(table), index), totals)
        result.loss.backward()  # type: ignore[no-untyped-call]
        sums = result.sums if sums is None else sums + result.sums
    assert table.grad is not None
    return table.grad, sums


def parts_of(place: World, seed: int, count: int) -> list[Tensor]:
    """Whole sequences dealt to `count` micro-batches at random; some may get none."""
    owner_S = torch.randint(0, count, (place.fixed["sequences"],), generator=generator(seed))
    return [(owner_S[place.fixed["sequence_N"]] == part).nonzero().squeeze(1) for part in range(count)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
def test_micro_batches_change_no_gradient(name: str, mode: str) -> None:
    for seed in range(3):
        place, goal = world(seed), everything(name, mode)
        expected = gradient(goal, place)
        assert expected.abs().max() > 1e-6
        for count in (2, 9):
            found, sums = summed(goal, place, parts_of(place, seed, count), place.totals())
            close(found, expected)
            whole = goal(place.actions(place.table), place.totals()).sums.summary()
            assert sums.summary() == pytest.approx(whole, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [name for name in INDEPENDENT_LOSSES if not LOSS_TRAITS.get(name).needs_whole_sequences]
)
def test_losses_of_single_actions_may_even_cut_sequences(name: str, mode: Any) -> None:
    place, goal = world(1), objective(name, mode=mode, norm_length=9, kl_coef=0.3, entropy_coef=0.2)
    order = torch.randperm(place.token_N.shape[0], generator=generator(5))
    found, _ = summed(goal, place, order.tensor_split(5), place.totals())
    close(found, gradient(goal, place))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in INDEPENDENT_LOSSES if name != "cppo"])  # which reads positions
def test_the_order_of_packing_changes_no_gradient(name: str, mode: str) -> None:
    place, goal = world(2), everything(name, mode)
    order = torch.randperm(place.token_N.shape[0], generator=generator(6))
    found, _ = summed(goal, place, [order], place.totals())
    close(found, gradient(goal, place))


def rank_world(place: World, index: Tensor) -> World:
    """What a rank sees: its own sequences, numbered from 0."""
    mine = place.fixed["sequence_N"][index].unique()
    local = {
        name: value[index] if isinstance(value, Tensor) else value
        for name, value in place.fixed.items()
        if name not in ("sequence_N", "sequences")
    }
    numbers = torch.searchsorted(mine, place.fixed["sequence_N"][index])
    return World(
        table=place.table,
        context_N=place.context_N[index],
        token_N=place.token_N[index],
        fixed={**local, "sequence_N": numbers, "sequences": mine.shape[0]},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
def test_spreading_over_ranks_changes_no_gradient(name: str, mode: str) -> None:
    place, goal = world(3, sequences=10), everything(name, mode)
    ranks = [rank_world(place, index) for index in parts_of(place, 8, 3)]
    counted = [rank.totals() for rank in ranks]
    counts = {name: sum(getattr(one, name) for one in counted) for name in ("actions", "sequences")}
    total = torch.zeros_like(place.table)
    for rank, own in zip(ranks, counted, strict=True):
        parts = parts_of(rank, 9, 2)
        total += summed(goal, rank, parts, replace(own, **counts))[0]
    close(total, gradient(goal, place))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
def test_padding_changes_no_gradient_whatever_is_in_it(name: str, mode: str) -> None:
    """A padded [B, T] batch, flattened, with NaN in every number that is masked out."""
    place, goal = world(4), everything(name, mode)
    table = place.table.clone().requires_grad_()
    packed = place.actions(table)
    rows, columns = place.fixed["sequences"], 8
    mask_BT = torch.zeros(rows, columns, dtype=torch.bool)
    column_N = torch.cat([torch.arange(int(n)) for n in torch.bincount(packed.sequence_N)])
    slot_N = packed.sequence_N * columns + column_N
    mask_BT.view(-1)[slot_N] = packed.mask_N

    def padded(x_N: Tensor | None) -> Tensor:
        assert x_N is not None
        wide = torch.full((rows * columns,), torch.nan, dtype=torch.float64)
        return wide.index_put((slot_N[packed.mask_N],), x_N[packed.mask_N])

    names = ("logp_N", "behaviour_N", "advantage_N", "proximal_N", "reference_N", "reward_N", "entropy_N")
    flat = Actions(
        **{name: padded(getattr(packed, name)) for name in names},
        mask_N=mask_BT.view(-1),
        sequence_N=torch.arange(rows).repeat_interleave(columns),
        sequences=rows,
    )
    goal(flat, BatchTotals.of(flat.mask_N, flat.sequence_N, rows)).loss.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    close(table.grad, gradient(goal, place))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_micro_batch_without_trained_actions_has_no_loss_and_no_gradient(name: str, mode: str) -> None:
    place, goal = world(5), everything(name, mode)
    nothing = torch.zeros_like(place.fixed["mask_N"])
    for totals in (place.totals(), BatchTotals.of(nothing, place.fixed["sequence_N"], 7)):
        table = place.table.clone().requires_grad_()
        result = goal(place.actions(table, mask_N=nothing), totals)
        result.loss.backward()  # type: ignore[no-untyped-call]
        assert float(result.loss.detach()) == 0.0
        assert table.grad is not None
        assert torch.equal(table.grad, torch.zeros_like(table))
        assert all(value == 0.0 for value in result.sums.summary().values())


def test_an_empty_micro_batch_is_allowed() -> None:
    place = world(5)
    table = place.table.clone().requires_grad_()
    result = everything("gspo", "token-mean")(select(place.actions(table), torch.zeros(0).long()), place.totals())
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert float(result.loss.detach()) == 0.0


def test_a_masked_action_has_no_say() -> None:
    place = world(6)
    index = int((~place.fixed["mask_N"]).nonzero()[0])
    for name in LOSS_NAMES:
        goal = everything(name, "token-mean")
        wild = {key: place.fixed[key].clone() for key in ("advantage_N", "behaviour_N", "proximal_N", "reference_N")}
        for value in wild.values():
            value[index] = 1e6
        close(gradient(goal, place, **wild), gradient(goal, place))


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_a_loss_over_sequences_refuses_part_of_one(name: str) -> None:
    place = world(0)
    goal = objective(name) if name == "gspo" else objective(name, mismatch=FULL)
    torn = select(place.actions(place.table), place.fixed["mask_N"].nonzero().squeeze(1)[1:])
    with pytest.raises(InvariantBroken, match="parts of the sequences"):
        goal(torn, place.totals())


def test_the_loss_is_the_sum_of_its_terms() -> None:
    place = world(7)
    actions, totals = place.actions(place.table), place.totals()
    both = objective("ppo", kl_kind="k2", kl_coef=0.3, entropy_coef=0.2)(actions, totals)
    mask = actions.mask_N
    assert actions.reference_N is not None
    assert actions.entropy_N is not None
    kl = 0.5 * (actions.logp_N - actions.reference_N).square()[mask].mean()
    entropy = actions.entropy_N[mask].mean()
    plain = objective("ppo")(actions, totals).loss
    close(both.loss, plain + 0.3 * kl - 0.2 * entropy)
    summary = both.sums.summary()
    assert summary["kl_loss"] == pytest.approx(float(kl))
    assert summary["entropy"] == pytest.approx(float(entropy))
    assert summary["pg_loss"] == pytest.approx(float(plain))


def test_terms_that_were_asked_for_need_their_inputs() -> None:
    place = world(7)
    for goal, missing in (
        (objective("ppo", kl_coef=0.1), "reference_N"),
        (objective("ppo", entropy_coef=0.1), "entropy_N"),
        (objective("ppo", mismatch=FULL), "proximal_N"),
    ):
        with pytest.raises(InvariantBroken, match=missing):
            goal(place.actions(place.table, **{missing: None}), place.totals())


def test_only_the_policy_being_trained_gets_a_gradient() -> None:
    place = world(8)
    others = {key: place.fixed[key].clone().requires_grad_() for key in ("behaviour_N", "proximal_N", "reference_N")}
    table = place.table.clone().requires_grad_()
    everything("decoupled_ppo", "token-mean")(place.actions(table, **others), place.totals()).loss.backward()  # type: ignore[no-untyped-call]
    assert all(value.grad is None for value in others.values())
    assert table.grad is not None


def test_half_precision_is_computed_in_single() -> None:
    place = world(8)
    actions = place.actions(place.table)
    halved = replace(actions, logp_N=actions.logp_N.bfloat16())
    result = everything("ppo", "token-mean")(halved, place.totals())
    assert result.loss.dtype == torch.float32
    assert result.sums.ratio.dtype == torch.float32


def test_metrics_are_those_of_their_definitions() -> None:
    place = world(9)
    actions = place.actions(place.table)
    summary = objective("ppo", mismatch=FULL)(actions, place.totals()).sums.summary()
    mask = actions.mask_N
    log_ratio = (actions.logp_N - actions.behaviour_N)[mask]
    ratio, advantage = log_ratio.exp(), actions.advantage_N[mask]
    clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    assert summary["actions"] == int(mask.sum())
    assert summary["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert summary["ratio_max"] == pytest.approx(float(ratio.max()))
    assert summary["ess"] == pytest.approx(float(ratio.sum() ** 2 / (ratio.square().sum() * ratio.numel())))
    assert summary["behaviour_kl"] == pytest.approx(float((ratio - 1 - log_ratio).mean()))
    assert summary["behaviour_kl_k1"] == pytest.approx(float(-log_ratio.mean()))
    assert summary["clip_fraction"] == pytest.approx(float(clipped.double().mean()))
    assert summary["advantage_mean"] == pytest.approx(float(advantage.mean()))


def test_on_policy_the_effective_sample_size_is_one() -> None:
    place = world(9)
    summary = objective("tis")(
        place.actions(place.table, behaviour_N=place.actions(place.table).logp_N), place.totals()
    ).sums.summary()
    assert summary["ess"] == pytest.approx(1.0)
    assert summary["behaviour_kl"] == summary["clip_fraction"] == 0.0


def test_a_configuration_makes_the_objective_with_the_same_names() -> None:
    text = {
        "pg_variant": "ppo",
        "pg_clip_low": 0.1,
        "pg_clip_high": 0.28,
        "dual_clip_loss": True,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "response_length": 77,
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        "kl_loss_type": "k2",
        "entropy_loss_coef": 0.01,
        "train_infer_correction": {
            "is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": 2.0},
            "filters": [{"agg_type": "sequence", "ratio_low": 0.5, "ratio_high": 1.5}, {"enabled": False}],
        },
    }
    assert make_objective(load_config(text)) == PolicyObjective(
        pg_variant="ppo",
        settings=LossSettings(clip_low=0.1, clip_high=0.28, dual_clip=3.0, cppo_length=77),
        mode="seq-mean-token-sum-norm",
        norm_length=77,
        mismatch=MismatchCorrection(
            weight=ImportanceWeightSettings(level="geometric", upper_bound=2.0),
            filters=(RatioFilterSettings(level="sequence", low=0.5, high=1.5),),
        ),
        kl_kind="k2",
        kl_coef=0.05,
        entropy_coef=0.01,
    )


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_defaults_of_the_configuration_are_those_of_the_losses(name: str) -> None:
    assert make_objective(load_config({"pg_variant": name})).settings == objective(name).settings


def test_gspo_takes_the_clip_of_the_configuration() -> None:
    assert make_objective(load_config({"pg_variant": "gspo", "pg_clip": 0.01})).settings == LossSettings(
        clip_low=0.01, clip_high=0.01
    )
