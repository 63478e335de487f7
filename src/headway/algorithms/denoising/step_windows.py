"""Which denoising steps get noise and are trained: all of them, a few at random, or a window that slides.

Outside its window a sample follows the ODE: those steps are neither stored nor trained. Steps are counted from 0 at
pure noise. The last step, onto the data, is never in a window: CPS has no noise there, and any other would stay on
the picture.

Does not draw for samples but for groups: members that share a window can share the ODE prefix before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.denoising.denoising_samplers import DenoisingSampler, euler_step, logp
from headway.errors import ConfigError
from headway.seeding import Rng


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps start … start + length − 1."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first step behind it."""
        return self.start + self.length

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.end


def make_full_window(steps: int) -> StepWindow:
    """Flow-GRPO: every step but the last."""
    return StepWindow(0, _stochastic(steps))


def draw_random_window(steps: int, width: int, rng: Rng) -> StepWindow:
    """Flow-GRPO-Fast: `width` steps at random inside the first half, from step 0 where the half is too short."""
    _fits(steps, width)
    return StepWindow(rng.randrange(0, max(steps // 2 - width, 0) + 1), width)


def make_sliding_window(steps: int, width: int, update: int, *, interval: int = 25, stride: int = 1) -> StepWindow:
    """MixGRPO: from the noise on, `stride` steps further every `interval` training steps; at the end from the start."""
    _fits(steps, width)
    if interval < 1 or stride < 1:
        raise ConfigError("interval and stride are at least 1", key="sde_window", value=(interval, stride))
    places = (_stochastic(steps) - width) // stride + 1
    return StepWindow(update // interval % places * stride, width)


def _stochastic(steps: int) -> int:
    if steps < 2:
        raise ConfigError("no step is left to train: the last one has no noise", key="num_inference_steps", value=steps)
    return steps - 1


def _fits(steps: int, width: int) -> None:
    if not 1 <= width <= _stochastic(steps):
        raise ConfigError(
            f"does not fit into {steps} denoising steps", key="sde_window_size", value=width, hint=f"1 to {steps - 1}"
        )


VelocityFunction = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...], s [B]) → v: a denoiser with its conditioning and guidance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceStep:
    """One drawn step of a batch."""

    step: int
    x: Tensor
    x_next: Tensor
    logp: Tensor
    """[B], under the policy that drew it."""


@torch.no_grad()
def solve_ode(velocity: VelocityFunction, x: Tensor, grid: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """Steps `first` … `last` − 1 without noise; all of them unless told otherwise."""
    for step in range(first, len(grid) - 1 if last is None else last):
        s, s_next = _levels(grid, step, x)
        x = euler_step(x, velocity(x, s), s, s_next)
    return x


@torch.no_grad()
def draw_window_steps(
    velocity: VelocityFunction,
    x: Tensor,
    grid: Tensor,
    sampler: DenoisingSampler,
    window: StepWindow,
    draw: Callable[[Tensor], Tensor],
) -> list[ReferenceStep]:
    """The steps of `window` from `x` at its start; `draw(x)` gives standard normal noise of the shape of x."""
    actions = []
    for step in range(window.start, window.end):
        s, s_next = _levels(grid, step, x)
        law = sampler.step(x, velocity(x, s), s, s_next)
        x_next = law.draw(draw(x))
        actions.append(ReferenceStep(step=step, x=x, x_next=x_next, logp=logp(x_next, *law)))
        x = x_next
    return actions


def _levels(grid: Tensor, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
    return grid[step].to(x.device).expand(len(x)), grid[step + 1].to(x.device).expand(len(x))
