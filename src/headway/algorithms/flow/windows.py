"""Which denoising steps get noise and are trained: all of them, a few at random, or a window that slides.

Outside its window a sample follows the ODE: those steps are neither stored nor trained. Steps are counted from 0 at
pure noise. The last step, onto the data, is never in a window: CPS has no noise there, and any other would stay on
the picture.

Does not draw for samples but for groups: members that share a window can share the ODE prefix before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError
from headway.seeding import Rng


@dataclass(frozen=True, slots=True)
class Window:
    """Steps start … start + length − 1."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first step behind it."""
        return self.start + self.length

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.end


def full_window(steps: int) -> Window:
    """Flow-GRPO: every step but the last."""
    return Window(0, _stochastic(steps))


def random_window(steps: int, width: int, rng: Rng) -> Window:
    """Flow-GRPO-Fast: `width` steps at random inside the first half, from step 0 where the half is too short."""
    _fits(steps, width)
    return Window(rng.randrange(0, max(steps // 2 - width, 0) + 1), width)


def sliding_window(steps: int, width: int, update: int, *, interval: int = 25, stride: int = 1) -> Window:
    """MixGRPO: from the noise on, `stride` steps further every `interval` training steps; at the end from the start."""
    _fits(steps, width)
    if interval < 1 or stride < 1:
        raise ConfigError("interval and stride are at least 1", key="sde_window", value=(interval, stride))
    places = (_stochastic(steps) - width) // stride + 1
    return Window(update // interval % places * stride, width)


def _stochastic(steps: int) -> int:
    if steps < 2:
        raise ConfigError("no step is left to train: the last one has no noise", key="num_inference_steps", value=steps)
    return steps - 1


def _fits(steps: int, width: int) -> None:
    if not 1 <= width <= _stochastic(steps):
        raise ConfigError(
            f"does not fit into {steps} denoising steps", key="sde_window_size", value=width, hint=f"1 to {steps - 1}"
        )
