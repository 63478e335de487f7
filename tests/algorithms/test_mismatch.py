"""The mismatch correction against its formulas."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from headway.algorithms.mismatch import (
    ImportanceWeightSettings,
    MismatchCorrection,
    RatioFilterSettings,
    compute_mean_weight,
    filter_mask,
    importance_weight,
    make_mismatch_correction,
)
from headway.config import ImportanceWeightConfig, RatioFilterConfig, TrainInferCorrectionConfig
from tests.algorithms.factory import World, bits, gradient, objective, reals, whole, world

RATIO = (0.5, 1.5, 9.0, 1.1, 0.9)
BEHAVIOUR = reals(-1.0, -2.0, -3.0, -0.5, -0.25)
PROXIMAL = BEHAVIOUR + reals(*RATIO).log()
MASK = bits("11011")
SEQUENCE = whole(0, 0, 0, 1, 1)
WHERE = (PROXIMAL, BEHAVIOUR, MASK, SEQUENCE, 2)


def where_of(place: World) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """What weights and filters read, of a whole batch."""
    fixed = place.fixed
    return fixed["proximal_N"], fixed["behaviour_N"], fixed["mask_N"], fixed["sequence_N"], fixed["sequences"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.5, 1.2, 1.2, 1.1, 0.9]),
        ("sequence", [0.75, 0.75, 0.75, 0.99, 0.99]),
        ("geometric", [sqrt(0.75), sqrt(0.75), sqrt(0.75), sqrt(0.99), sqrt(0.99)]),
    ],
)
def test_the_weight_is_truncated_at_its_level(level: str, expected: list[float]) -> None:
    weight = importance_weight(*WHERE, ImportanceWeightSettings(level=level, upper_bound=1.2))  # type: ignore[arg-type]
    torch.testing.assert_close(weight, reals(*expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", (0.5 + 1.2 + 1.1 + 0.9) / 4),
        ("sequence", (0.75 + 0.99) / 2),
        ("geometric", (sqrt(0.75) + sqrt(0.99)) / 2),
        ("segment", (0.5 + 1.2 + sqrt(0.99)) / 3),
    ],
)
def test_the_mean_weight_is_that_of_actions_or_of_what_shares_a_weight(level: str, mean: float) -> None:
    settings = ImportanceWeightSettings(level=level, upper_bound=1.2)  # type: ignore[arg-type]
    assert compute_mean_weight(*WHERE, settings, whole(0, 1, 1, 2, 2), 3) == pytest.approx(mean, rel=1e-12)
    nothing = (*WHERE[:2], bits("00000"), *WHERE[3:])
    assert compute_mean_weight(*nothing, settings, whole(0, 1, 1, 2, 2), 3) == 1.0


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.8, 1.2, "00011"),
        ("token", 0.4, 1.6, "11011"),
        ("sequence", 0.8, 1.2, "00011"),
        ("geometric", 0.8, 0.9, "11000"),
    ],
)
def test_a_filter_drops_what_leaves_its_range(level: str, low: float, high: float, expected: str) -> None:
    kept = filter_mask(*WHERE, [RatioFilterSettings(level=level, low=low, high=high)])  # type: ignore[arg-type]
    assert torch.equal(kept, bits(expected))


@pytest.mark.parametrize(
    ("level", "measure", "high", "expected"),
    [
        ("token", "k2", 0.1, "01011"),
        ("token", "k3", 0.1, "01011"),
        ("sequence", "k2", 0.3, "00011"),
        ("geometric", "k3", 0.15, "11011"),
        ("largest", "k2", 0.2, "00011"),
        ("largest", "k3", 0.2, "11011"),
    ],
)
def test_a_filter_may_bound_a_distance(level: str, measure: str, high: float, expected: str) -> None:
    """k2 of the first three are 0.24, 0.08, 2.4; k3 are 0.19, 0.09, 5.8; the third is masked."""
    one = RatioFilterSettings(level=level, measure=measure, high=high)  # type: ignore[arg-type]
    assert torch.equal(filter_mask(*WHERE, [one]), bits(expected))


def test_filters_see_what_the_ones_before_them_kept() -> None:
    token, sequence = RatioFilterSettings(low=0.8, high=2.0), RatioFilterSettings(level="sequence", low=1.2, high=2.0)
    assert torch.equal(filter_mask(*WHERE, [token, sequence]), bits("01000"))
    assert torch.equal(filter_mask(*WHERE, [sequence, token]), bits("00000"))


def test_turns_are_weighed_and_dropped_by_their_geometric_mean() -> None:
    turns = whole(0, 1, 1, 2, 2), 3
    weight = importance_weight(*WHERE, ImportanceWeightSettings(level="segment", upper_bound=9.0), *turns)
    torch.testing.assert_close(weight, reals(0.5, 1.5, 1.5, sqrt(0.99), sqrt(0.99)), rtol=1e-12, atol=0)
    kept = filter_mask(*WHERE, [RatioFilterSettings(level="segment", low=0.9, high=2.0)], *turns)
    assert torch.equal(kept, bits("01011"))


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [("token", -0.1, 0.1, "01011"), ("sequence", -0.1, 0.0, "00011"), ("segment", None, 0.05, "10011")],
)
def test_a_filter_drops_by_the_difference_of_probabilities(
    level: str, low: float | None, high: float, expected: str
) -> None:
    row = RatioFilterConfig(ratio_low=0.0, ratio_high=9.0, agg_type=level, diff_low=low, diff_high=high)  # type: ignore[arg-type]
    correction = make_mismatch_correction(TrainInferCorrectionConfig(filters=(row,)))
    difference = PROXIMAL.exp() - BEHAVIOUR.exp()
    assert [round(float(one), 2) for one in difference] == [-0.18, 0.07, 0.4, 0.06, -0.08]
    assert torch.equal(filter_mask(*WHERE, correction.filters, whole(0, 1, 1, 2, 2), 3), bits(expected))


def test_no_filter_is_the_mask_itself() -> None:
    assert torch.equal(filter_mask(*WHERE, []), MASK)


def test_a_ratio_of_sequences_does_not_overflow() -> None:
    far = (BEHAVIOUR + 1e5, *WHERE[1:])
    weight = importance_weight(*far, ImportanceWeightSettings(level="sequence", upper_bound=1e30))
    assert torch.isfinite(weight).all()


def test_dropped_actions_leave_the_numerator_and_not_the_denominator() -> None:
    place = world(11)
    narrow = MismatchCorrection(filters=(RatioFilterSettings(low=0.7, high=1.4),))
    kept = filter_mask(
        *where_of(place),
        narrow.filters,
    )
    assert 0 < int(kept.sum()) < int(place.fixed["mask_N"].sum())
    silenced = torch.where(kept, place.fixed["advantage_N"], torch.zeros_like(place.fixed["advantage_N"]))
    expected = gradient(objective("tis"), place, advantage_N=silenced)
    found = gradient(objective("tis", mismatch=narrow), place)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    result = objective("tis", mismatch=narrow)(place.actions(place.table), place.totals())
    share = 1 - int(kept.sum()) / int(place.fixed["mask_N"].sum())
    assert result.sums.summary()["dropped_fraction"] == pytest.approx(share)


def test_the_weight_multiplies_the_policy_loss_of_any_variant() -> None:
    place = world(12)
    weight = importance_weight(
        *where_of(place),
        ImportanceWeightSettings(level="token", upper_bound=1.2),
    )
    for name in ("vanilla", "ppo", "tis"):
        found = gradient(objective(name, mismatch=MismatchCorrection(weight=ImportanceWeightSettings())), place)
        expected = gradient(objective(name), place, advantage_N=place.fixed["advantage_N"] * weight)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_only_what_is_enabled_is_taken_from_the_configuration() -> None:
    assert make_mismatch_correction(TrainInferCorrectionConfig()) == MismatchCorrection()
    assert not MismatchCorrection().active
    config = TrainInferCorrectionConfig(
        is_weight=ImportanceWeightConfig(enabled=True, weight_type="geometric", upper_bound=3.0),
        filters=(RatioFilterConfig(enabled=False), RatioFilterConfig(agg_type="sequence")),
    )
    made = make_mismatch_correction(config)
    assert made.weight == ImportanceWeightSettings(level="geometric", upper_bound=3.0)
    assert made.filters == (RatioFilterSettings(level="sequence", low=0.8, high=1.2),)
    assert made.active
    assert made.needs_whole_sequences
    assert not MismatchCorrection(weight=ImportanceWeightSettings()).needs_whole_sequences
