"""The path between noise and data: the grid of noise levels, points on the path, and what a velocity says of its ends.

s = 1 is noise, s = 0 is data, x_s = (1 − s)·x₀ + s·e, v = e − x₀. Everything is computed in at least float32.

Legend: B samples; s is [B], each sample may be anywhere on the path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.algorithms.flow.shapes import beside, wide
from headway.errors import ConfigError

SHIFT = 3.0
"""k of the usual grid: more steps where there is more noise."""


def timesteps(steps: int, shift: float = SHIFT, dtype: torch.dtype = torch.float32) -> Tensor:
    """`steps` + 1 noise levels from exactly 1 to exactly 0, falling; [steps + 1]."""
    if steps < 1:
        raise ConfigError("a path has at least one step", key="num_inference_steps", value=steps)
    if shift <= 0:
        raise ConfigError("must be positive", key="timestep_shift", value=shift, hint="1 is an even grid, 3 is usual")
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).to(dtype)


def shifted(s: Tensor, shift: float) -> Tensor:
    """s ← k·s/(1 + (k − 1)·s): 0 and 1 stay."""
    return shift * s / (1 + (shift - 1) * s)


def noised(x0: Tensor, noise: Tensor, s_B: Tensor) -> Tensor:
    """x_s on the straight path from the data `x0` to `noise`."""
    x0 = wide(x0)
    s = beside(s_B, x0)
    return (1 - s) * x0 + s * wide(noise)


def data_of(x: Tensor, v: Tensor, s_B: Tensor) -> Tensor:
    """x̂₀ = x − s·v, where the path ends."""
    x = wide(x)
    return x - beside(s_B, x) * wide(v)


def noise_of(x: Tensor, v: Tensor, s_B: Tensor) -> Tensor:
    """ê = x + (1 − s)·v, where the path began."""
    x = wide(x)
    return x + (1 - beside(s_B, x)) * wide(v)


def guided(v_conditional: Tensor, v_unconditional: Tensor, scale: float) -> Tensor:
    """v_u + g·(v_c − v_u), in rollout and in training alike; g = 1 is the conditional velocity."""
    low = wide(v_unconditional)
    return low + scale * (wide(v_conditional) - low)
