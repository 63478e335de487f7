"""The value loss, and rows of packed actions."""

from __future__ import annotations

import pytest
import torch

from headway.algorithms.packed_sequences import RowLayout, mean_by_sequence
from headway.algorithms.returns import compute_reward_to_go, compute_value_loss
from tests.algorithms.factory import bits, generator, reals, whole


def test_the_value_loss_is_the_worse_of_plain_and_clipped() -> None:
    value, old, target = reals(1.0, 2.0, -1.0, 0.0), reals(0.9, 1.0, 0.0, 0.0), reals(0.0, 3.0, -4.0, 1.0)
    expected = [
        max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2) / 2
        for v, o, r in zip(value.tolist(), old.tolist(), target.tolist(), strict=True)
    ]
    torch.testing.assert_close(compute_value_loss(value, old, target, 0.2), reals(*expected))
    torch.testing.assert_close(compute_value_loss(value, old, target), (value - target).square() / 2)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_its_gradient_passes_finite_differences(clip: float | None) -> None:
    random = generator(0)
    old, target = (torch.randn(8, generator=random, dtype=torch.float64) for _ in range(2))
    value = torch.randn(8, generator=random, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: compute_value_loss(x, old, target, clip), (value,))


def test_a_discount_of_one_and_of_almost_one_agree() -> None:
    reward = torch.randn(3, 7, generator=generator(1), dtype=torch.float64)
    torch.testing.assert_close(compute_reward_to_go(reward, 1.0), compute_reward_to_go(reward, 1 - 1e-13))


def test_rows_hold_masked_actions_without_gaps_and_give_them_back() -> None:
    mask, sequence = bits("1011011"), whole(2, 0, 0, 2, 0, 0, 2)
    rows = RowLayout.of(mask, sequence, 4)
    x = reals(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert rows.to_rows(x).tolist() == [[3.0, 6.0, 0.0], [0.0] * 3, [1.0, 4.0, 7.0], [0.0] * 3]
    assert torch.equal(rows.to_packed(rows.to_rows(x)), torch.where(mask, x, torch.zeros_like(x)))
    assert rows.place_at_end(reals(10.0, 20.0, 30.0, 40.0)).tolist() == [0, 0, 0, 0, 0, 10.0, 30.0]


def test_the_mean_of_an_empty_sequence_is_nothing() -> None:
    assert mean_by_sequence(reals(1.0, 3.0, 9.0), bits("110"), whole(0, 0, 1), 3).tolist() == [2.0, 0.0, 0.0]
