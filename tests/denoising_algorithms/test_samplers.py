"""Both samplers against their formulas, the ODE, known laws, and each sample against itself in other company."""

from __future__ import annotations

from itertools import pairwise
from math import pi, sin, sqrt

import pytest
import torch
from torch import Tensor

from headway.algorithms.denoising import (
    CpsSampler,
    DenoisingSampler,
    FlowSdeSampler,
    euler_step,
    kl_compatible,
    kl_exact,
    logp,
    make_timesteps,
)
from headway.errors import ConfigError
from tests.denoising_algorithms.factory import SAMPLERS, SHAPE, Bell, Toy, normal

both = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
GRID = make_timesteps(6, dtype=torch.float64)
LEVELS = GRID[:-1]
NEXT = GRID[1:]
X, V = normal(6, *SHAPE), normal(6, *SHAPE, seed=1)
"""Six samples, each at another step of a path of six."""


@pytest.mark.parametrize("sampler", [FlowSdeSampler(0.0), CpsSampler(0.0)], ids=SAMPLERS.keys())
def test_without_noise_a_step_is_the_ode(sampler: DenoisingSampler) -> None:
    mean, std = sampler.step(X, V, LEVELS, NEXT)
    torch.testing.assert_close(mean, euler_step(X, V, LEVELS, NEXT), rtol=1e-12, atol=1e-12)
    assert std.abs().max() == 0


def test_flow_sde_is_its_formula() -> None:
    mean, std = FlowSdeSampler(0.6).step(X, V, LEVELS, NEXT)
    for i, (s, to) in enumerate(zip(LEVELS.tolist(), NEXT.tolist(), strict=True)):
        sig, dt = 0.6 * sqrt(s / (1 - (s if s < 1 else to))), to - s
        expected = X[i] * (1 + sig**2 / (2 * s) * dt) + V[i] * (1 + sig**2 * (1 - s) / (2 * s)) * dt
        torch.testing.assert_close(mean[i], expected, rtol=1e-12, atol=1e-12)
        assert std[i].item() == pytest.approx(sig * sqrt(-dt), rel=1e-12)


def test_cps_is_its_formula() -> None:
    mean, std = CpsSampler(0.6).step(X, V, LEVELS, NEXT)
    for i, (s, to) in enumerate(zip(LEVELS.tolist(), NEXT.tolist(), strict=True)):
        sigma = to * sin(0.6 * pi / 2)
        expected = (1 - to) * (X[i] - s * V[i]) + sqrt(to**2 - sigma**2) * (X[i] + (1 - s) * V[i])
        torch.testing.assert_close(mean[i], expected, rtol=1e-12, atol=1e-12)
        assert std[i].item() == pytest.approx(sigma, rel=1e-12)


def moments(sampler: DenoisingSampler, bell: Bell, steps: int) -> tuple[float, float]:
    """Mean and variance at the end, exactly: with a linear velocity each step is x' = αx + β + std·z."""
    grid = make_timesteps(steps, dtype=torch.float64)
    probe = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean, variance = 0.0, 1.0
    for step in range(steps):
        s, to = grid[step].expand(2), grid[step + 1].expand(2)
        at, std = sampler.step(probe, bell(probe, s), s, to)
        slope = (at[1] - at[0]).item()
        mean, variance = slope * mean + at[0].item(), slope**2 * variance + std[0].item() ** 2
    return mean, variance


def test_flow_sde_keeps_the_marginals_the_better_the_finer_the_steps() -> None:
    bell = Bell()
    errors = []
    for steps in (50, 100, 200, 400):
        mean, variance = moments(FlowSdeSampler(), bell, steps)
        assert mean == pytest.approx(bell.m, abs=1e-12)
        errors.append(abs(variance / bell.c**2 - 1))
    assert all(fine < 0.55 * coarse for coarse, fine in pairwise(errors)), errors
    assert errors[-1] < 0.01


def test_flow_sde_draws_from_the_law_of_the_ode() -> None:
    bell, noise = Bell(), torch.Generator().manual_seed(5)
    grid = make_timesteps(150, dtype=torch.float64)
    x = torch.randn(20_000, 1, generator=noise, dtype=torch.float64)
    for step in range(150):
        s, to = grid[step].expand(len(x)), grid[step + 1].expand(len(x))
        z = torch.randn(x.shape, generator=noise, dtype=torch.float64)
        x = FlowSdeSampler().step(x, bell(x, s), s, to).draw(z)
        if step in (50, 100, 149):
            assert x.mean().item() == pytest.approx(bell.mean(grid[step + 1]).item(), abs=0.03)
            assert x.var().item() == pytest.approx(bell.variance(grid[step + 1]).item(), rel=0.06)


def test_cps_keeps_the_noise_in_the_latent_exactly_where_the_prediction_is_exact() -> None:
    """One picture, so that x̂₀ and ê are exact: after every step, however large, the law is N((1 − s')·x₀, s'²)."""
    bell, mean, variance = Bell(c=0.0), 0.0, 1.0
    probe = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for s, to in zip(LEVELS, NEXT, strict=True):
        at, std = CpsSampler().step(probe, bell(probe, s.expand(2)), s.expand(2), to.expand(2))
        slope = (at[1] - at[0]).item()
        mean, variance = slope * mean + at[0].item(), slope**2 * variance + std[0].item() ** 2
        assert mean == pytest.approx(bell.mean(to).item(), abs=1e-12)
        assert variance == pytest.approx(bell.variance(to).item(), abs=1e-12)


@both
def test_a_sample_does_not_feel_at_which_steps_the_others_are(sampler: DenoisingSampler) -> None:
    together, x_next = sampler.step(X, V, LEVELS, NEXT), normal(6, *SHAPE, seed=2)
    density = logp(x_next, *together)
    for i in range(6):
        one = slice(i, i + 1)
        alone = sampler.step(X[one], V[one], LEVELS[one], NEXT[one])
        assert torch.equal(alone.mean, together.mean[one]) and torch.equal(alone.std, together.std[one])
        assert torch.equal(logp(x_next[one], *alone), density[one])


@both
def test_outside_its_window_a_sample_follows_the_ode_and_inside_the_sampler(sampler: DenoisingSampler) -> None:
    noisy = torch.tensor([True, False, False, True, True, False])
    mixed, all_noisy = sampler.step(X, V, LEVELS, NEXT, noisy), sampler.step(X, V, LEVELS, NEXT)
    assert torch.equal(mixed.mean[noisy], all_noisy.mean[noisy]) and torch.equal(mixed.std[noisy], all_noisy.std[noisy])
    assert torch.equal(mixed.mean[~noisy], euler_step(X, V, LEVELS, NEXT)[~noisy])
    assert mixed.std[~noisy].abs().max() == 0
    assert torch.equal(mixed.draw(normal(6, *SHAPE, seed=3))[~noisy], mixed.mean[~noisy])


@both
def test_the_log_probability_is_that_of_the_normal_law_over_its_dimensions(sampler: DenoisingSampler) -> None:
    mean, std = sampler.step(X[:-1], V[:-1], LEVELS[:-1], NEXT[:-1])
    x_next = normal(5, *SHAPE, seed=2)
    law = torch.distributions.Normal(mean, std.reshape(-1, 1, 1, 1).expand_as(mean))
    torch.testing.assert_close(logp(x_next, mean, std), law.log_prob(x_next).flatten(1).mean(1), rtol=1e-12, atol=1e-12)


@both
def test_gradients_of_the_log_probability_are_finite_differences(sampler: DenoisingSampler) -> None:
    x_next = normal(5, *SHAPE, seed=2)

    def density(v: Tensor) -> Tensor:
        return logp(x_next, *sampler.step(X[:-1], v, LEVELS[:-1], NEXT[:-1]))

    assert torch.autograd.gradcheck(density, V[:-1].clone().requires_grad_(), rtol=1e-6, atol=1e-9)


@both
def test_gradients_reach_the_weights_of_the_velocity(sampler: DenoisingSampler) -> None:
    toy, x_next = Toy(), normal(5, *SHAPE, seed=2)
    direction = normal(*toy.inward.shape, seed=3)

    def density() -> Tensor:
        return logp(x_next, *sampler.step(X[:-1], toy(X[:-1], LEVELS[:-1]), LEVELS[:-1], NEXT[:-1])).sum()

    (gradient,) = torch.autograd.grad(density(), toy.inward)
    with torch.no_grad():
        toy.inward += 1e-6 * direction
        above = density()
        toy.inward -= 2e-6 * direction
        below = density()
    torch.testing.assert_close((gradient * direction).sum(), (above - below) / 2e-6, rtol=1e-6, atol=1e-9)


def test_a_step_without_noise_is_no_action() -> None:
    mean = normal(2, *SHAPE).requires_grad_()
    std = torch.tensor([0.0, 0.5], dtype=torch.float64)
    density = logp(normal(2, *SHAPE, seed=1), mean, std)
    density.sum().backward()
    assert density[0] == 0 and density[1] != 0
    assert mean.grad is not None
    assert mean.grad[0].abs().max() == 0 and mean.grad[1].abs().max() > 0
    assert kl_exact(mean, torch.zeros_like(mean), std)[0] == 0


def test_the_kl_is_the_closed_form_of_two_normal_laws() -> None:
    mean, std = FlowSdeSampler().step(X, V, LEVELS, NEXT)
    reference = FlowSdeSampler().step(X, V + 0.1 * normal(6, *SHAPE, seed=4), LEVELS, NEXT).mean
    wide = std.reshape(-1, 1, 1, 1).expand_as(mean)
    laws = torch.distributions.Normal(mean, wide), torch.distributions.Normal(reference, wide)
    expected = torch.distributions.kl_divergence(*laws).flatten(1).mean(1)
    torch.testing.assert_close(kl_exact(mean, reference, std), expected, rtol=1e-12, atol=1e-12)


def test_the_kl_is_the_mean_of_the_log_ratio_under_the_policy() -> None:
    """The log-ratio is linear in the noise, so two opposite draws give its mean exactly."""
    law = CpsSampler().step(X[:-1], V[:-1], LEVELS[:-1], NEXT[:-1])
    reference = law.mean + 0.05 * normal(5, *SHAPE, seed=4)
    z = normal(5, *SHAPE, seed=5)
    log_ratios = [logp(law.draw(d), *law) - logp(law.draw(d), reference, law.std) for d in (z, -z)]
    torch.testing.assert_close(kl_exact(law.mean, reference, law.std), sum(log_ratios) / 2, rtol=1e-9, atol=1e-12)


def test_the_compatible_kl_divides_by_the_diffusion_without_the_length_of_the_step() -> None:
    mean, std = FlowSdeSampler(0.7).step(X, V, LEVELS, NEXT)
    reference = mean + 0.1 * normal(6, *SHAPE, seed=4)
    below_one = torch.where(LEVELS < 1, LEVELS, NEXT)
    diffusion = 0.7 * (LEVELS / (1 - below_one)).sqrt()
    expected = (mean - reference).square().flatten(1).mean(1) / (2 * diffusion**2)
    torch.testing.assert_close(kl_compatible(mean, reference, std, NEXT - LEVELS), expected, rtol=1e-12, atol=1e-12)


@both
def test_half_precision_of_the_model_is_widened_before_anything_is_computed(sampler: DenoisingSampler) -> None:
    x, v = X.to(torch.bfloat16), V.to(torch.bfloat16)
    mean, std = sampler.step(x, v, LEVELS.float(), NEXT.float())
    expected, _ = sampler.step(x.double(), v.double(), LEVELS, NEXT)
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-5)


def test_senseless_noise_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise_level = -0\.1"):
        FlowSdeSampler(-0.1)
    with pytest.raises(ConfigError, match=r"noise_level = 1\.5"):
        CpsSampler(1.5)
