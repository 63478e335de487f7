"""Noise, small velocities with parameters, and a velocity whose law is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.algorithms.denoising import CpsSampler, DenoisingSampler, FlowSdeSampler

SHAPE = (2, 3, 4)
SAMPLERS: dict[str, DenoisingSampler] = {"flow_sde": FlowSdeSampler(), "cps": CpsSampler()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    """Data from N(m, c²): the path's law and its velocity in closed form."""

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
