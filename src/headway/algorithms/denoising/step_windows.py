"""Which denoising steps get noise and are trained: all of them, a few at random, or a window that slides.

A sample follows the ODE outside its window: those steps are neither stored nor trained. Steps are counted from 0 at
pure noise. The last step, onto the data, is never in a window: CPS has no noise there, and the noise of any other
sampler would stay on the picture.

A window belongs to a group, not to a sample: members that share a window can share the ODE prefix before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError
from headway.seeding import Rng


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps start … start + length − 1."""

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


def draw_random_window(steps: int, width: int, rng: Rng) -> StepWindow:
    """Draw `width` steps inside the first half (Flow-GRPO-Fast); start at step 0 if the half is too short."""
    _check_width(steps, width)
    return StepWindow(rng.randrange(0, max(steps // 2 - width, 0) + 1), width)


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
