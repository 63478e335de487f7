"""The grid, points on the path and guidance."""

from __future__ import annotations

import pytest
import torch

from headway.algorithms.denoising import add_noise, apply_guidance, make_timesteps, predict_data, predict_noise
from headway.errors import ConfigError
from tests.denoising_algorithms.factory import SHAPE, normal, uniform


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_the_grid_falls_from_one_to_zero(steps: int, shift: float) -> None:
    grid = make_timesteps(steps, shift)
    assert grid.shape == (steps + 1,) and grid[0] == 1 and grid[-1] == 0
    assert (grid.diff() < 0).all()


def test_the_grid_is_shifted_as_the_formula_says() -> None:
    expected = [3 * s / (1 + 2 * s) for s in (1, 0.75, 0.5, 0.25, 0)]
    torch.testing.assert_close(make_timesteps(4, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def test_a_point_of_the_path_and_its_velocity_lead_back_to_both_ends() -> None:
    x0, noise, s = normal(5, *SHAPE), normal(5, *SHAPE, seed=1), uniform(5)
    x = add_noise(x0, noise, s)
    torch.testing.assert_close(predict_data(x, noise - x0, s), x0)
    torch.testing.assert_close(predict_noise(x, noise - x0, s), noise)


def test_guidance_goes_from_the_unconditional_through_the_conditional_velocity() -> None:
    conditional, unconditional = normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
    torch.testing.assert_close(apply_guidance(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(apply_guidance(conditional, unconditional, 0.0), unconditional)
    torch.testing.assert_close(apply_guidance(conditional, unconditional, 4.5), 4.5 * conditional - 3.5 * unconditional)


def test_a_path_without_steps_or_with_a_senseless_shift_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_inference_steps = 0"):
        make_timesteps(0)
    with pytest.raises(ConfigError, match="timestep_shift"):
        make_timesteps(4, shift=0.0)
