"""A group that branches from a shared ODE prefix: its window has the distribution that separate prefixes give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.algorithms.denoising import DenoisingSampler, StepWindow, make_timesteps, solve_ode
from tests.denoising_algorithms.factory import SAMPLERS, SHAPE, Bell, Toy, draw_window_steps

both = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
STEPS, WINDOW, GROUP = 8, StepWindow(3, 2), 4
GRID = make_timesteps(STEPS, dtype=torch.float64)


class Counted:
    """A velocity that counts its rows."""

    def __init__(self, velocity: Toy | Bell) -> None:
        self.velocity, self.rows = velocity, 0

    def __call__(self, x: Tensor, s: Tensor) -> Tensor:
        self.rows += len(x)
        return self.velocity(x, s)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def windowed(velocity: Counted, x: Tensor, sampler: DenoisingSampler, seed: int) -> tuple[Tensor, Tensor]:
    """Latents of the window, one after the other in the second dimension, and their log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    made = draw_window_steps(
        velocity, x, GRID, sampler, WINDOW, lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)
    )
    return torch.stack([x, *(action.x_next for action in made)], 1), torch.stack([action.logp for action in made], 1)


@both
def test_a_branch_is_what_the_member_would_have_made_alone_from_that_prefix(sampler: DenoisingSampler) -> None:
    """And the prefix is computed once per group instead of once per member."""
    start = noise(2, *SHAPE, seed=1)
    shared, own = Counted(Toy()), Counted(Toy())
    branched = solve_ode(shared, start, GRID[: WINDOW.start + 1]).repeat_interleave(GROUP, 0)
    alone = solve_ode(own, start.repeat_interleave(GROUP, 0), GRID[: WINDOW.start + 1])
    one, other = windowed(shared, branched, sampler, 2), windowed(own, alone, sampler, 2)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert own.rows - shared.rows == 2 * WINDOW.start * (GROUP - 1)


@both
def test_branches_have_the_distribution_of_independent_prefixes_in_the_window(sampler: DenoisingSampler) -> None:
    """Mean, variance, covariance along the window, and log-probabilities, of 40,000 members each way."""
    groups, velocity = 10_000, Counted(Bell())
    shared = solve_ode(velocity, noise(groups, 1, seed=3), GRID[: WINDOW.start + 1]).repeat_interleave(GROUP, 0)
    own = solve_ode(velocity, noise(groups * GROUP, 1, seed=4), GRID[: WINDOW.start + 1])
    (path, density), (other_path, other_density) = (
        windowed(velocity, shared, sampler, 5),
        windowed(velocity, own, sampler, 6),
    )
    torch.testing.assert_close(path.mean(0), other_path.mean(0), rtol=0, atol=0.025)
    torch.testing.assert_close(covariance(path), covariance(other_path), rtol=0.06, atol=0.01)
    torch.testing.assert_close(density.mean(0), other_density.mean(0), rtol=0, atol=0.015)
    torch.testing.assert_close(density.std(0), other_density.std(0), rtol=0.04, atol=0)


def covariance(path: Tensor) -> Tensor:
    return torch.cov(path.flatten(1).T)


def test_members_of_a_branched_group_differ_only_by_what_was_drawn_in_the_window() -> None:
    """Given the prefix they are independent: what is left of a member, without its prefix, says nothing of another."""
    sampler, velocity = SAMPLERS["cps"], Counted(Bell())
    start = solve_ode(velocity, noise(10_000, 1, seed=3), GRID[: WINDOW.start + 1])
    path, _ = windowed(velocity, start.repeat_interleave(GROUP, 0), sampler, 5)
    end = path[:, -1].reshape(10_000, GROUP)
    residual = end - end.mean(1, keepdim=True)
    correlation = torch.corrcoef(residual.T)
    # Taking the mean of four away leaves a correlation of −1/3 between independent ones.
    off_diagonal = correlation[~torch.eye(GROUP, dtype=torch.bool)]
    torch.testing.assert_close(off_diagonal, torch.full_like(off_diagonal, -1 / 3), rtol=0, atol=0.03)
