"""How latents are denoised: what engine and trainer must agree on, or a ratio between them means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from headway.algorithms.denoising import (
    CpsSampler,
    DenoisingSampler,
    FlowSdeSampler,
    StepWindow,
    draw_random_window,
    make_full_window,
    make_sliding_window,
    make_timesteps,
)
from headway.algorithms.denoising.noise_levels import DEFAULT_SHIFT
from headway.errors import ConfigError
from headway.seeding import make_rng

_USUAL_NOISE = {"sde": 0.7, "cps": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingSettings:
    """The path from noise to picture, and which of its steps are actions."""

    sampler: Literal["sde", "cps"] = "cps"
    """Where noise is added: Flow-SDE, or coefficients-preserving."""
    noise_level: float | None = None
    """a of the sampler. None: 0.7 for sde, 0.8 for cps; 0 is the ODE."""
    shift: float | None = None
    """k of the grid of noise levels. None: the grid that the model comes with, else 3."""
    window: Literal["full", "random", "sliding", "last"] = "random"
    """Steps that get noise and are trained: all but the last (Flow-GRPO); a few at random in the first half, the same
    for a whole group (Flow-GRPO-Fast); a few that move on with the policy's version (MixGRPO). `last`: none gets noise,
    and the clean latent at the end is what is trained on (DiffusionNFT)."""
    window_size: int = 2
    """Steps of a window that is not full."""
    window_interval: int = 25
    """Versions between two moves of a sliding window."""
    window_stride: int = 1
    """Steps that it moves by."""
    share_prefix: bool = True
    """The members of a group start from one noise and share the steps before their window."""
    guidance: float = 1.0
    """Of training; a request brings its own, which must be this one where it is trained."""
    seed: int = 0
    """With the group's number it decides windows."""

    def __post_init__(self) -> None:
        if self.sampler not in _USUAL_NOISE:
            raise ConfigError("must be sde or cps", key="denoising.sampler", value=self.sampler)
        for key in ("window_size", "window_interval", "window_stride"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=f"denoising.{key}", value=getattr(self, key))
        self.make_sampler()

    def make_sampler(self) -> DenoisingSampler:
        """The law of a step."""
        level = _USUAL_NOISE[self.sampler] if self.noise_level is None else self.noise_level
        return FlowSdeSampler(level) if self.sampler == "sde" else CpsSampler(level)

    def grid_of(self, model: Any, steps: int) -> Tensor:
        """Noise levels from 1 to 0, [steps + 1]."""
        own = getattr(model, "grid", None)
        if own is not None and self.shift is None:
            grid: Tensor = own(steps)
            return grid.float().cpu()
        return make_timesteps(steps, DEFAULT_SHIFT if self.shift is None else self.shift)

    def window_of(self, steps: int, group: int, version: int) -> StepWindow | None:
        """The steps of a group that get noise. Raises `ConfigError` where they do not fit."""
        if self.window == "last":
            return None
        if self.window == "full":
            return make_full_window(steps)
        if self.window == "random":
            return draw_random_window(steps, self.window_size, make_rng(self.seed, "window", group))
        return make_sliding_window(
            steps, self.window_size, max(version, 0), interval=self.window_interval, stride=self.window_stride
        )
