"""The mathematics of denoising by flow matching: a denoising step is an action with a log-probability.

docs/denoising.md shows the calls of engine and trainer. Log-densities are *means* over the dimensions of the latent,
which is why clip ranges are near 1e-4.

Guarantees: with a = 0 both samplers are the Euler step of the ODE. A sample's result does not depend on the other
samples of its batch nor on their noise levels, so that requests may join and leave between any two steps. A step
without noise (std = 0) is not an action: its `logp` is 0 and has no gradient. Results are at least float32, whatever
precision the model has. Nothing here knows a model, draws noise or holds state.

s = 1 is noise, s = 0 is data, x_s = (1 − s)·x₀ + s·e, v = e − x₀. Steps are counted from 0 at pure noise.

Legend: B samples; x, v, mean are [B, ...]; s, s_next and std are [B], each sample may be anywhere on the path;
dt = s_next − s < 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi, sin
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.seeding import Rng

VelocityFunction = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...], s [B]) → v: a denoiser with its conditioning and guidance."""
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


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps start … start + length − 1, which get noise and are trained.

    A sample follows the ODE outside its window: those steps are neither stored nor trained. The last step, onto the
    data, is never in a window: CPS has no noise there, and the noise of any other sampler would stay on the picture. A
    window belongs to a group: members that share a window can share the ODE prefix before it.
    """

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first step after the window."""
        return self.start + self.length

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.end


def make_full_window(steps: int) -> StepWindow:
    """Return every step but the last (Flow-GRPO)."""
    return StepWindow(0, _count_noisy_steps(steps))


def draw_random_window(steps: int, width: int, rng: Rng, span: tuple[int, int] | None = None) -> StepWindow:
    """Draw `width` steps inside `span`, else inside the first half (Flow-GRPO-Fast).

    The window starts where the span does if the span is too short.
    """
    _check_width(steps, width)
    first, end = span or (0, steps // 2)
    return StepWindow(rng.randrange(first, max(end - width, first) + 1), width)


def make_sliding_window(steps: int, width: int, update: int, *, interval: int = 25, stride: int = 1) -> StepWindow:
    """Return a window that moves `stride` steps every `interval` updates and restarts at the noise end (MixGRPO)."""
    _check_width(steps, width)
    if interval < 1 or stride < 1:
        raise ConfigError("interval and stride are at least 1", key="sde_window", value=(interval, stride))
    positions = (_count_noisy_steps(steps) - width) // stride + 1
    return StepWindow(update // interval % positions * stride, width)


def _count_noisy_steps(steps: int) -> int:
    """Return how many steps may get noise: all but the last."""
    if steps < 2:
        raise ConfigError("no step is left to train: the last one has no noise", key="num_inference_steps", value=steps)
    return steps - 1


def _check_width(steps: int, width: int) -> None:
    if not 1 <= width <= _count_noisy_steps(steps):
        raise ConfigError(
            f"does not fit into {steps} denoising steps", key="sde_window_size", value=width, hint=f"1 to {steps - 1}"
        )
