"""Aggregations against their definitions."""

from __future__ import annotations

import pytest
import torch

from headway.algorithms.actions import BatchTotals, make_action_weights, sum_weighted
from tests.algorithms.factory import bits, reals, whole

LOSS = reals(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
MASK = bits("110110")
SEQUENCE = whole(0, 0, 0, 1, 2, 2)
TOTALS = BatchTotals.of(MASK, SEQUENCE, 4)


def aggregated(mode: str, totals: BatchTotals = TOTALS) -> float:
    weight = make_action_weights(mode, SEQUENCE, totals, norm_length=10, dtype=torch.float64)  # type: ignore[arg-type]
    return float(sum_weighted(LOSS, MASK, weight))


def test_totals_count_trained_actions_and_sequences_that_have_any() -> None:
    assert (TOTALS.actions, TOTALS.sequences, TOTALS.length_S.tolist()) == (4, 3, [2, 1, 1, 0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 8 + 16) / 4),
        ("seq-mean-token-mean", (1.5 + 8 + 16) / 3),
        ("seq-mean-token-sum", (3 + 8 + 16) / 3),
        ("seq-mean-token-sum-norm", (3 + 8 + 16) / 3 / 10),
    ],
)
def test_each_mode_is_what_its_name_says(mode: str, expected: float) -> None:
    assert aggregated(mode) == pytest.approx(expected, rel=1e-14)


def test_masks_apply_to_the_numerator_even_of_what_is_not_a_number() -> None:
    weight = make_action_weights("token-mean", SEQUENCE, TOTALS, norm_length=1, dtype=torch.float64)
    spoilt = torch.where(MASK, LOSS, torch.full_like(LOSS, torch.nan))
    assert float(sum_weighted(spoilt, MASK, weight)) == aggregated("token-mean")
