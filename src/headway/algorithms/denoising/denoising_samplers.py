"""Steps from one noise level to the next: the ODE, and the two stochastic samplers whose steps are actions.

A stochastic step gives the distribution of the next latent: a Gaussian with a `mean` and one `std` per sample. The
engine draws `x' = mean + std·z` from it (`LatentTransition.draw`); the trainer computes `logp` of the drawn x'.

Guarantees: with a = 0 both samplers are the Euler step of the ODE. A sample's result does not depend on the other
samples of its batch nor on their noise levels, so that requests may join and leave between any two steps. A step
without noise (std = 0) is not an action: its `logp` is 0 and has no gradient. Results are at least float32, whatever
precision the model has.

The samplers draw no noise and hold no state. Log-densities are *means* over the dimensions of the latent, which is why
clip ranges are near 1e-4.

Legend: B samples; x, v, mean are [B, ...]; s, s_next and std are [B]; dt = s_next − s < 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi, sin
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.algorithms.denoising.noise_levels import (
    broadcast_per_sample,
    mean_per_sample,
    predict_data,
    predict_noise,
    widen_precision,
)
from headway.errors import ConfigError

VelocityFunction = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...], s [B]) → v: a denoiser with its conditioning and guidance."""


class LatentTransition(NamedTuple):
    """The Gaussian distribution of the next latent."""

    mean: Tensor
    """[B, ...]."""
    std: Tensor
    """[B]; 0 where the step is deterministic."""

    def draw(self, noise: Tensor) -> Tensor:
        """Return x' = mean + std·z for standard normal `noise`."""
        return self.mean + broadcast_per_sample(self.std, self.mean) * noise.to(self.mean.dtype)


class DenoisingSampler(Protocol):
    """A stochastic step. `noisy` (booleans, [B]) marks the samples that get noise; the others follow the ODE."""

    def step(
        self, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, noisy: Tensor | None = None
    ) -> LatentTransition: ...


def euler_step(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor) -> Tensor:
    """Return x + v·dt, one step of the ODE."""
    x = widen_precision(x)
    return x + widen_precision(v) * broadcast_per_sample(s_next - s, x)


@torch.no_grad()
def solve_ode(velocity: VelocityFunction, x: Tensor, timesteps: Tensor) -> Tensor:
    """Follow the ODE over all noise levels of `timesteps`, [steps + 1], without noise."""
    for s, s_next in pairwise(timesteps.to(x.device)):
        s_B, next_B = s.expand(len(x)), s_next.expand(len(x))
        x = euler_step(x, velocity(x, s_B), s_B, next_B)
    return x


@dataclass(frozen=True, slots=True)
class FlowSdeSampler:
    """Flow-SDE: sig = a·√(s/(1 − s)), std = sig·√(−dt). It keeps the marginals of the ODE as the steps get small.

    At s = 1 the denominator uses s_next instead of s.
    """

    a: float = 0.7

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ConfigError("must not be negative", key="noise_level", value=self.a, hint="0.7 is usual; 0: the ODE")

    def step(self, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, noisy: Tensor | None = None) -> LatentTransition:
        x, v = widen_precision(x), widen_precision(v)
        s, s_next = s.to(x.dtype), s_next.to(x.dtype)
        dt, below_one = s_next - s, torch.where(s < 1, s, s_next)
        variance = self.a**2 * s / (1 - below_one)
        pull = variance / (2 * s)
        mean = x * broadcast_per_sample(1 + pull * dt, x) + v * broadcast_per_sample((1 + pull * (1 - s)) * dt, x)
        return _where_noisy(LatentTransition(mean, (variance * -dt).sqrt()), euler_step(x, v, s, s_next), noisy)


@dataclass(frozen=True, slots=True)
class CpsSampler:
    """Coefficients-preserving sampling: std = s'·sin(a·π/2), and the rest of s' points along the predicted noise.

    The latent holds exactly s' of noise after every step, however large the step. The step to s' = 0 is deterministic.
    """

    a: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise ConfigError("must lie in [0, 1]", key="noise_level", value=self.a, hint="0.8 is usual; 0: the ODE")

    def step(self, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, noisy: Tensor | None = None) -> LatentTransition:
        x, v = widen_precision(x), widen_precision(v)
        s, s_next = s.to(x.dtype), s_next.to(x.dtype)
        std = s_next * sin(self.a * pi / 2)
        rest = broadcast_per_sample((s_next.square() - std.square()).clamp(min=0).sqrt(), x)
        mean = broadcast_per_sample(1 - s_next, x) * predict_data(x, v, s) + rest * predict_noise(x, v, s)
        return _where_noisy(LatentTransition(mean, std), euler_step(x, v, s, s_next), noisy)


def _where_noisy(stochastic: LatentTransition, straight: Tensor, noisy: Tensor | None) -> LatentTransition:
    """Use the stochastic step for samples marked `noisy` (all if None) and the ODE step for the others."""
    if noisy is None:
        return stochastic
    noisy = noisy.to(straight.device)
    mean = torch.where(broadcast_per_sample(noisy, straight).bool(), stochastic.mean, straight)
    return LatentTransition(mean, torch.where(noisy, stochastic.std, torch.zeros_like(stochastic.std)))


def logp(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of the drawn `x_next`, averaged over its dimensions, [B]; 0 where std is 0."""
    mean = widen_precision(mean)
    std = std.to(mean.dtype)
    safe = torch.where(std > 0, std, torch.ones_like(std))
    distance = (widen_precision(x_next).detach() - mean) / broadcast_per_sample(safe, mean)
    density = -0.5 * mean_per_sample(distance.square()) - safe.log() - 0.5 * log(2 * pi)
    return torch.where(std > 0, density, torch.zeros_like(density))


def kl_exact(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Tensor:
    """Return the KL of two steps of equal std, averaged like `logp`: (mu − mu_ref)²/(2·std²), [B]; 0 at std 0."""
    mean = widen_precision(mean)
    std = std.to(mean.dtype)
    safe = torch.where(std > 0, std, torch.ones_like(std))
    divergence = mean_per_sample((mean - widen_precision(mean_ref).detach()).square()) / (2 * safe.square())
    return torch.where(std > 0, divergence, torch.zeros_like(divergence))


def kl_compatible(mean: Tensor, mean_ref: Tensor, std: Tensor, dt: Tensor) -> Tensor:
    """Return |dt| times the KL, [B]: published Flow-SDE code divides by sig² instead of std² = sig²·|dt|.

    Published coefficients (β) are tuned to this. Published CPS code has no dt to drop, so CPS uses `kl_exact`.
    """
    exact = kl_exact(mean, mean_ref, std)
    return exact * dt.abs().to(exact.dtype)
