"""The closed form of continuous batching: when step n of a batch that does not change ends.

A step with b requests and K tokens of context costs `s + r·b + c·K`, and K grows by b each step. The first n steps
of a stretch therefore take `n·first + growth·n·(n−1)/2` with `first` the cost of its first step and `growth = c·b`.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

TOLERANCE_S = 1e-9
"""Instants closer than this are one."""


class Pace(NamedTuple):
    """How fast one stretch goes."""

    first_s: float
    """Cost of its first step."""
    growth_s: float
    """By how much each step costs more than the one before."""

    def time_of(self, steps: int) -> float:
        """When the first `steps` steps have ended, from the start of the stretch."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_in(self, elapsed_s: float) -> int:
        """Whole steps that have ended by `elapsed_s`. The stretch must take time."""
        elapsed_s += TOLERANCE_S
        half = self.growth_s / 2
        linear = self.first_s - half
        if half > 0:
            # The root of half·n² + linear·n = t, in the form that does not cancel for a small `half`.
            guess = 2 * elapsed_s / (linear + sqrt(linear * linear + 4 * half * elapsed_s))
        else:
            guess = elapsed_s / self.first_s
        steps = int(guess)
        while steps > 0 and self.time_of(steps) > elapsed_s:
            steps -= 1
        while self.time_of(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def next_boundary(self, elapsed_s: float) -> int:
        """The step at whose end the batch may next change: the one running, or the last if it just ended."""
        steps = self.steps_in(elapsed_s)
        return steps if self.time_of(steps) >= elapsed_s - TOLERANCE_S else steps + 1
