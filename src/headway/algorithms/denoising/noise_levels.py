"""The straight path between noise and data: its noise levels, points on it, and the ends that a velocity predicts.

s = 1 is noise, s = 0 is data, x_s = (1 − s)·x₀ + s·e, v = e − x₀. Everything is computed in at least float32.

Legend: B samples; s is [B], each sample may be anywhere on the path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ConfigError

DEFAULT_SHIFT = 3.0
"""Shift k that most models use: it puts more steps where there is more noise."""


def make_timesteps(steps: int, shift: float = DEFAULT_SHIFT, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `steps` + 1 falling noise levels from exactly 1 to exactly 0, [steps + 1]."""
    if steps < 1:
        raise ConfigError("a path has at least one step", key="num_inference_steps", value=steps)
    if shift <= 0:
        raise ConfigError("must be positive", key="timestep_shift", value=shift, hint="1 is an even grid, 3 is usual")
    return shift_noise_levels(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).to(dtype)


def shift_noise_levels(s: Tensor, shift: float) -> Tensor:
    """Map s to k·s/(1 + (k − 1)·s), which leaves 0 and 1 unchanged."""
    return shift * s / (1 + (shift - 1) * s)


def add_noise(x0: Tensor, noise: Tensor, s_B: Tensor) -> Tensor:
    """Return x_s on the straight path from the data `x0` to `noise`."""
    x0 = widen_precision(x0)
    s = broadcast_per_sample(s_B, x0)
    return (1 - s) * x0 + s * widen_precision(noise)


def predict_data(x: Tensor, v: Tensor, s_B: Tensor) -> Tensor:
    """Return x̂₀ = x − s·v, the data end of the path."""
    x = widen_precision(x)
    return x - broadcast_per_sample(s_B, x) * widen_precision(v)


def predict_noise(x: Tensor, v: Tensor, s_B: Tensor) -> Tensor:
    """Return ê = x + (1 − s)·v, the noise end of the path."""
    x = widen_precision(x)
    return x + (1 - broadcast_per_sample(s_B, x)) * widen_precision(v)


def apply_guidance(v_conditional: Tensor, v_unconditional: Tensor, scale: float) -> Tensor:
    """Return v_u + g·(v_c − v_u), in rollout and in training alike; g = 1 is the conditional velocity."""
    unconditional = widen_precision(v_unconditional)
    return unconditional + scale * (widen_precision(v_conditional) - unconditional)


def widen_precision(x: Tensor) -> Tensor:
    """Return `x` in at least float32: half precision is too coarse for the differences and quotients here."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def broadcast_per_sample(a_B: Tensor, x: Tensor) -> Tensor:
    """Return `a_B` with the device and precision of `x` [B, ...], shaped to be multiplied with it."""
    return a_B.to(device=x.device, dtype=x.dtype).reshape(-1, *(1,) * (x.dim() - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """Average over everything but the batch, [B]."""
    return x.flatten(1).mean(1)
