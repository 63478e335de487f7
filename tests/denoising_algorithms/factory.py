"""Noise, small velocities with parameters, a velocity whose distribution is known, and a plain reference sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.algorithms.denoising import (
    CpsSampler,
    DenoisingSampler,
    FlowSdeSampler,
    StepWindow,
    VelocityFunction,
    logp,
)

SHAPE = (2, 3, 4)
SAMPLERS: dict[str, DenoisingSampler] = {"flow_sde": FlowSdeSampler(), "cps": CpsSampler()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceStep:
    """One drawn step of a batch."""

    step: int
    x: Tensor
    x_next: Tensor
    logp: Tensor
    """[B], under the policy that drew it."""


@torch.no_grad()
def draw_window_steps(
    velocity: VelocityFunction,
    x: Tensor,
    timesteps: Tensor,
    sampler: DenoisingSampler,
    window: StepWindow,
    draw: Callable[[Tensor], Tensor],
) -> list[ReferenceStep]:
    """Draw the steps of `window`, starting from `x`; `draw(x)` gives standard normal noise of the shape of x."""
    steps = []
    for step in range(window.start, window.end):
        s, s_next = timesteps[step].expand(len(x)), timesteps[step + 1].expand(len(x))
        transition = sampler.step(x, velocity(x, s), s, s_next)
        x_next = transition.draw(draw(x))
        steps.append(ReferenceStep(step=step, x=x, x_next=x_next, logp=logp(x_next, *transition)))
        x = x_next
    return steps


class Toy(nn.Module):
    """A velocity of 24 numbers with 2 × 25 × 24 weights, not linear, each row on its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        size = SHAPE[0] * SHAPE[1] * SHAPE[2]
        self.inward = nn.Parameter(normal(size + 1, size, seed=seed) / size**0.5)
        self.outward = nn.Parameter(normal(size, size, seed=seed + 1) / size**0.5)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(1), s[:, None]], dim=1)
        # A product per row, whatever the batch: matrix products may sum in another order in another batch.
        hidden = torch.tanh((flat[:, :, None] * self.inward).sum(1))
        return (hidden[:, :, None] * self.outward).sum(1).reshape(x.shape)


class Bell:
    """Data from N(m, c²): the distribution of the path and its velocity in closed form."""

    def __init__(self, m: float = 0.7, c: float = 0.4) -> None:
        self.m, self.c = m, c

    def mean(self, s: Tensor) -> Tensor:
        return (1 - s) * self.m

    def variance(self, s: Tensor) -> Tensor:
        return (1 - s) ** 2 * self.c**2 + s**2

    def __call__(self, x: Tensor, s: Tensor) -> Tensor:
        """E[e − x₀ | x]."""
        slope = (s - (1 - s) * self.c**2) / self.variance(s)
        around = (-1,) + (1,) * (x.dim() - 1)
        return slope.reshape(around) * (x - self.mean(s).reshape(around)) - self.m
