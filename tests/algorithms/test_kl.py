"""KL estimators against their formulas and finite differences, and the controller of the token penalty."""

from __future__ import annotations

from math import exp

import pytest
import torch

from headway.algorithms.kl import KlController, estimate_kl, make_kl_controller
from headway.config import Config
from tests.algorithms.factory import generator, reals

KINDS = ("k1", "k2", "k3", "abs")
LOGP = reals(-1.0, -2.0, -0.3)
REFERENCE = reals(-1.5, -0.7, -0.35)


@pytest.mark.parametrize("kind", KINDS)
def test_each_estimator_is_its_formula(kind: str) -> None:
    rules = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: exp(-d) + d - 1,
        "abs": abs,
    }
    expected = [rules[kind](d) for d in (LOGP - REFERENCE).tolist()]
    found = estimate_kl(kind, LOGP, REFERENCE)  # type: ignore[arg-type]
    torch.testing.assert_close(found, reals(*expected), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_finite_differences(kind: str) -> None:
    logp = LOGP.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate_kl(kind, x, REFERENCE), (logp,))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(kind: str) -> None:
    logp = LOGP.clone().requires_grad_()
    found = estimate_kl(kind, logp, REFERENCE)  # type: ignore[arg-type]
    plain = estimate_kl(kind[:-1], LOGP, REFERENCE)  # type: ignore[arg-type]
    torch.testing.assert_close(found.detach(), plain, rtol=1e-12, atol=1e-15)
    (slope,) = torch.autograd.grad(found.sum(), logp)
    torch.testing.assert_close(slope, LOGP - REFERENCE, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_average_to_the_exact_divergence(kind: str) -> None:
    random = generator(0)
    p = torch.randn(6, generator=random, dtype=torch.float64).log_softmax(0)
    q = torch.randn(6, generator=random, dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    mean = (p.exp() * estimate_kl(kind, p, q)).sum()  # type: ignore[arg-type]
    torch.testing.assert_close(mean, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_extreme_differences_stay_finite(kind: str, gap: float) -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    estimate = estimate_kl(kind, logp, torch.tensor([-1.0 + gap]))  # type: ignore[arg-type]
    estimate.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(estimate).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_without_a_target_the_coefficient_stays() -> None:
    controller = make_kl_controller(Config(add_token_level_kl=True, init_kl_coef=0.3))
    controller.update(100.0, 512)
    assert controller.coef == 0.3


def test_without_the_penalty_the_coefficient_is_nothing() -> None:
    assert make_kl_controller(Config(init_kl_coef=0.3)).coef == 0.0


def test_the_adaptive_coefficient_follows_the_relative_error() -> None:
    controller = make_kl_controller(Config(add_token_level_kl=True, init_kl_coef=0.2, target_kl=1.0, kl_horizon=1000))
    controller.update(1.1, 100)
    assert controller.coef == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    controller.update(50.0, 100)
    assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02)


def test_it_finds_the_coefficient_that_keeps_the_target() -> None:
    controller = KlController(0.01, target=2.0, horizon=1000)
    for _ in range(2000):
        controller.update(1 / controller.coef, 100)
    assert controller.coef == pytest.approx(0.5, rel=0.01)


def test_a_step_larger_than_the_horizon_moves_it_by_a_fifth_at_most() -> None:
    controller = KlController(1.0, target=1.0, horizon=10)
    controller.update(0.0, 10_000)
    assert controller.coef == pytest.approx(0.8)


def test_it_goes_on_from_a_checkpoint() -> None:
    first, second = (KlController(0.2, target=1.0, horizon=100) for _ in range(2))
    first.update(9.0, 50)
    second.restore(first.state())
    assert second.coef == first.coef != 0.2
