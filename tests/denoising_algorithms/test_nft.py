"""DiffusionNFT: its formula, its gradient, and where its minimum lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.algorithms.denoising import add_noise
from headway.algorithms.diffusion_nft import (
    DiffusionNftParams,
    advantage_to_optimality,
    nft_loss,
    old_policy_decay,
    update_old_policy,
)
from headway.errors import ConfigError
from tests.denoising_algorithms.factory import SHAPE, normal, uniform

X0, NOISE = normal(5, *SHAPE), normal(5, *SHAPE, seed=1)
S = 0.05 + 0.9 * uniform(5)
X_S = add_noise(X0, NOISE, S)
V, OLD = normal(5, *SHAPE, seed=2), normal(5, *SHAPE, seed=3)
ADVANTAGE = torch.tensor([2.0, -2.0, 0.0, 7.0, -0.5], dtype=torch.float64)


def test_advantages_become_probabilities() -> None:
    advantage = torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 9.0])
    assert advantage_to_optimality(advantage).tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_the_loss_is_the_two_regressions_of_the_velocity(beta: float) -> None:
    made = nft_loss(V, OLD, X0, X_S, S, ADVANTAGE, DiffusionNftParams(beta=beta, weight_floor=None))
    r = advantage_to_optimality(ADVANTAGE)
    target = NOISE - X0
    good = ((1 - beta) * OLD + beta * V - target).square().flatten(1).mean(1)
    bad = ((1 + beta) * OLD - beta * V - target).square().flatten(1).mean(1)
    torch.testing.assert_close(made, (r * good + (1 - r) * bad) * 5 / beta)


def test_weighted_errors_are_divided_by_their_own_size() -> None:
    made = nft_loss(V, OLD, X0, X_S, S, ADVANTAGE, DiffusionNftParams(beta=1.0))
    r, missed = advantage_to_optimality(ADVANTAGE), [X_S - S.reshape(-1, 1, 1, 1) * v - X0 for v in (V, 2 * OLD - V)]
    good, bad = (m.square().flatten(1).mean(1) / m.abs().flatten(1).mean(1) for m in missed)
    torch.testing.assert_close(made, (r * good + (1 - r) * bad) * 5)


def test_the_gradient_is_that_of_finite_differences() -> None:
    params = DiffusionNftParams(beta=0.5, weight_floor=None, kl_coef=0.1)

    def loss(v: Tensor) -> Tensor:
        return nft_loss(v, OLD, X0, X_S, S, ADVANTAGE, params, v_ref=OLD + 0.1)

    assert torch.autograd.gradcheck(loss, V.clone().requires_grad_(), rtol=1e-6, atol=1e-7)


def test_the_weight_of_an_error_is_a_constant_of_the_gradient() -> None:
    v = V.clone().requires_grad_()
    loss = nft_loss(v, OLD, X0, X_S, S, torch.full((5,), 9.0), DiffusionNftParams(beta=1.0)).sum()
    (gradient,) = torch.autograd.grad(loss, v)
    s = S.reshape(-1, 1, 1, 1)
    missed = X_S - s * V - X0
    weight = missed.abs().flatten(1).mean(1).reshape(-1, 1, 1, 1)
    torch.testing.assert_close(gradient, 5 * -2 * s * missed / weight / missed[0].numel())


def test_at_the_old_policy_a_sample_pulls_by_its_advantage_alone() -> None:
    """Good and bad images pull in opposite directions, one without an advantage not at all, whatever β is."""
    gradients = []
    for beta in (0.25, 1.0):
        v = OLD.clone().requires_grad_()
        loss = nft_loss(v, OLD, X0, X_S, S, ADVANTAGE, DiffusionNftParams(beta=beta, weight_floor=None)).sum()
        gradients.append(torch.autograd.grad(loss, v)[0])
    torch.testing.assert_close(*gradients)
    expected = 2 * ADVANTAGE.clamp(-5, 5).reshape(-1, 1, 1, 1) * (OLD - (NOISE - X0)) / X0[0].numel()
    torch.testing.assert_close(gradients[0], expected)


def test_the_minimum_lies_from_the_old_policy_toward_its_good_images() -> None:
    """Two images meet in one x_s, as likely: v* = v_old + (2/β)·E[r·(v − v_old)] and v_old their mean."""
    beta, advantage = 0.5, torch.tensor([3.0, -1.0], dtype=torch.float64)
    s = torch.full((2,), 0.6, dtype=torch.float64)
    x0 = normal(2, *SHAPE)
    x_s = normal(1, *SHAPE, seed=1).expand(2, *SHAPE)
    velocities = (x_s - x0) / 0.6
    old = velocities.mean(0, keepdim=True)
    r = advantage_to_optimality(advantage).reshape(-1, 1, 1, 1)
    best = (old + 2 / beta * (r * (velocities - old)).mean(0, keepdim=True)).requires_grad_()
    params = DiffusionNftParams(beta=beta, weight_floor=None)
    loss = nft_loss(best.expand(2, *SHAPE), old.expand(2, *SHAPE), x0, x_s, s, advantage, params).mean()
    (gradient,) = torch.autograd.grad(loss, best)
    assert gradient.abs().max() < 1e-12
    good = velocities[:1] - old
    assert ((best.detach() - old) * good).sum() > 0


def test_only_the_new_policy_has_a_gradient() -> None:
    old, reference = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    v = V.clone().requires_grad_()
    nft_loss(v, old, X0, X_S, S, ADVANTAGE, DiffusionNftParams(kl_coef=1.0), v_ref=reference).sum().backward()
    assert v.grad is not None and old.grad is None and reference.grad is None


def test_the_old_policy_follows_at_a_rising_distance() -> None:
    assert [old_policy_decay(update) for update in (0, 100, 500, 9000)] == [0.0, 0.1, 0.5, 0.5]
    assert old_policy_decay(100, begin=75, rise=0.0075, most=0.999) == pytest.approx(0.1875)
    old, new = [torch.zeros(2), torch.ones(1)], [torch.ones(2), torch.full((1,), 3.0)]
    update_old_policy(old, new, 0.75)
    assert old[0].tolist() == [0.25, 0.25] and old[1].tolist() == [1.5]


def test_senseless_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nft_beta = 0\.0"):
        DiffusionNftParams(beta=0.0)
    with pytest.raises(ConfigError, match="advantage_clip"):
        DiffusionNftParams(clip=0.0)
