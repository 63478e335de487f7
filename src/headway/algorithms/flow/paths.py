"""From noise to data by the book: one batch in step, everything that was drawn kept. The measure for engines.

An engine that lets requests join and leave at any step has to give what this gives. Tests compare with it, and
scripts that only want pictures call `solve_ode`.

Legend: B samples; x is [B, ...]; the grid is that of `timesteps`, steps are counted from 0 at its noisy end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.flow.samplers import Sampler, euler_step, logp
from headway.algorithms.flow.windows import Window

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...], s [B]) → v: a denoiser with its conditioning and guidance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action:
    """One drawn step of a batch."""

    step: int
    x: Tensor
    x_next: Tensor
    logp: Tensor
    """[B], under the policy that drew it."""


@torch.no_grad()
def solve_ode(velocity: Velocity, x: Tensor, grid: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """Steps `first` … `last` − 1 without noise; all of them unless told otherwise."""
    for step in range(first, len(grid) - 1 if last is None else last):
        s, s_next = _levels(grid, step, x)
        x = euler_step(x, velocity(x, s), s, s_next)
    return x


@torch.no_grad()
def draw_window(
    velocity: Velocity, x: Tensor, grid: Tensor, sampler: Sampler, window: Window, draw: Callable[[Tensor], Tensor]
) -> list[Action]:
    """The steps of `window` from `x` at its start; `draw(x)` gives standard normal noise of the shape of x."""
    actions = []
    for step in range(window.start, window.end):
        s, s_next = _levels(grid, step, x)
        law = sampler.step(x, velocity(x, s), s, s_next)
        x_next = law.draw(draw(x))
        actions.append(Action(step=step, x=x, x_next=x_next, logp=logp(x_next, *law)))
        x = x_next
    return actions


def _levels(grid: Tensor, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
    return grid[step].to(x.device).expand(len(x)), grid[step + 1].to(x.device).expand(len(x))
