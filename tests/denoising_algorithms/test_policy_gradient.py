"""What is climbed is the expected reward: the gradient through log-probabilities against its closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.algorithms.denoising import DenoisingSampler, StepWindow, logp, make_timesteps, solve_ode
from tests.denoising_algorithms.factory import SAMPLERS, Bell, draw_window_steps, normal

both = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
STEPS, WINDOW, SAMPLES = 6, StepWindow(1, 2), 60_000
GRID = make_timesteps(STEPS, dtype=torch.float64)


def end_slope(sampler: DenoisingSampler) -> float:
    """d(mean of the end)/dθ where θ is added to the velocity in the window only: every step is linear here."""
    bell, probe = Bell(), torch.tensor([0.0, 1.0], dtype=torch.float64)
    moved = 0.0
    for step in range(STEPS):
        s, to = GRID[step].expand(2), GRID[step + 1].expand(2)
        noisy = torch.tensor([step in WINDOW] * 2)
        at = sampler.step(probe, bell(probe, s), s, to, noisy).mean
        pushed = sampler.step(probe, bell(probe, s) + 1.0, s, to, noisy).mean
        moved = (at[1] - at[0]).item() * moved + ((pushed - at)[0].item() if step in WINDOW else 0.0)
    return moved


@both
def test_the_gradient_of_windowed_steps_is_that_of_the_expected_reward(sampler: DenoisingSampler) -> None:
    """Reward: the end itself. Behaviour θ = 0; ∇ = E[A·∇ℓ] over what was drawn, with the batch mean as baseline."""
    bell = Bell()
    generator = torch.Generator().manual_seed(11)
    x = solve_ode(bell, normal(SAMPLES, 1, seed=10), GRID[: WINDOW.start + 1])
    made = draw_window_steps(
        bell, x, GRID, sampler, WINDOW, lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)
    )
    reward = solve_ode(bell, made[-1].x_next, GRID[WINDOW.end :])[:, 0]
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    density = torch.zeros(SAMPLES, dtype=torch.float64)
    for action in made:
        s, to = GRID[action.step].expand(SAMPLES), GRID[action.step + 1].expand(SAMPLES)
        density = density + logp(action.x_next, *sampler.step(action.x, bell(action.x, s) + theta, s, to))
    (slope,) = torch.autograd.grad(((reward - reward.mean()) * density).mean(), theta)
    assert slope.item() == pytest.approx(end_slope(sampler), rel=0.03)


def test_climbing_by_it_raises_the_reward() -> None:
    """Twenty steps of Flow-GRPO-Fast on one number: the mean of the data moves to where the reward is."""
    sampler, bell, theta = SAMPLERS["cps"], Bell(), torch.zeros((), dtype=torch.float64, requires_grad=True)
    rewards = []

    def velocity(x: Tensor, s: Tensor) -> Tensor:
        return bell(x, s) + theta

    for update in range(20):
        generator = torch.Generator().manual_seed(update)
        x = solve_ode(velocity, normal(256, 1, seed=100 + update), GRID[: WINDOW.start + 1])
        made = draw_window_steps(
            velocity, x, GRID, sampler, WINDOW, lambda x, g=generator: torch.randn(x.shape, generator=g, dtype=x.dtype)
        )
        reward = -(solve_ode(velocity, made[-1].x_next, GRID[WINDOW.end :])[:, 0] - 1.5).square()
        rewards.append(reward.mean().item())
        advantage = (reward - reward.mean()) / reward.std()
        loss = torch.zeros((), dtype=torch.float64)
        for action in made:
            s, to = GRID[action.step].expand(256), GRID[action.step + 1].expand(256)
            ratio = (logp(action.x_next, *sampler.step(action.x, velocity(action.x, s), s, to)) - action.logp).exp()
            loss = loss - (ratio * advantage).mean()
        (slope,) = torch.autograd.grad(loss, theta)
        theta.data -= 0.3 * slope
    assert rewards[0] < -0.5 and min(rewards[-5:]) > -0.1
