"""Settings of denoising: those that engine and trainer must agree on, and those of the trainer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from headway.algorithms.diffusion_nft import DiffusionNftParams
from headway.denoising.models.denoiser import Denoiser
from headway.errors import ConfigError
from headway.seeding import make_rng
from headway.trainers.local.settings import LocalSettings

_DEFAULT_NOISE_LEVELS = {"sde": 0.7, "cps": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingSettings:
    """The path from noise to picture, and which of its steps are actions.

    Engine and trainer need the same settings: otherwise the ratio of their probabilities means nothing.
    """

    sampler: Literal["sde", "cps"] = "cps"
    """How noise is added: Flow-SDE, or coefficients-preserving sampling."""
    noise_level: float | None = None
    """a of the sampler. None: 0.7 for sde, 0.8 for cps; 0 is the ODE."""
    shift: float | None = None
    """k of the noise levels. None: the noise levels that the model comes with."""
    window: Literal["full", "random", "sliding", "last"] = "random"
    """Steps that get noise and are trained: all but the last (Flow-GRPO); a few at random in the first half, the same
    for a whole group (Flow-GRPO-Fast); a few that move on with the policy's version (MixGRPO). `last`: no step gets
    noise, and training uses the clean latent at the end (DiffusionNFT)."""
    window_size: int = 2
    """Steps of a window that is not full."""
    window_range: tuple[int, ...] = ()
    """Steps that a random window is drawn from, first and end. Empty: the first half."""
    window_interval: int = 25
    """Versions between two moves of a sliding window."""
    window_stride: int = 1
    """Steps that a sliding window moves by."""
    share_prefix: bool = True
    """Whether the members of a group start from one noise and share the steps before their window."""
    guidance: float = 1.0
    """Guidance scale of training; trained requests must bring the same one."""
    seed: int = 0
    """Together with the group's number it decides windows."""

    def __post_init__(self) -> None:
        if self.sampler not in _DEFAULT_NOISE_LEVELS:
            raise ConfigError("must be sde or cps", key="denoising.sampler", value=self.sampler)
        for key in ("window_size", "window_interval", "window_stride"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=f"denoising.{key}", value=getattr(self, key))
        self.make_sampler()

    def make_sampler(self) -> DenoisingSampler:
        """Return the sampler that steps are drawn from."""
        level = _DEFAULT_NOISE_LEVELS[self.sampler] if self.noise_level is None else self.noise_level
        return FlowSdeSampler(level) if self.sampler == "sde" else CpsSampler(level)

    def make_timesteps(self, model: Denoiser, steps: int) -> Tensor:
        """Return noise levels from 1 to 0, [steps + 1]."""
        if self.shift is None:
            return model.make_timesteps(steps).float().cpu()
        return make_timesteps(steps, self.shift)

    def make_window(self, steps: int, group: int, version: int) -> StepWindow | None:
        """Return the steps of a group that get noise. Raises `ConfigError` if they do not fit."""
        if self.window == "last":
            return None
        if self.window == "full":
            return make_full_window(steps)
        if self.window == "random":
            span = (self.window_range[0], self.window_range[1]) if self.window_range else None
            return draw_random_window(steps, self.window_size, make_rng(self.seed, "window", group), span)
        return make_sliding_window(
            steps, self.window_size, max(version, 0), interval=self.window_interval, stride=self.window_stride
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingTrainerSettings:
    """Settings of a trainer of denoising models."""

    local: LocalSettings
    """Optimizer, objective, advantages, epochs, precision, device: as for language models."""
    denoising: DenoisingSettings
    micro_batch_samples: int = 8
    """Samples of one forward pass, with all their trained steps."""
    kl_coef: float | None = None
    """Coefficient of the KL to the initial policy; None: no KL. The KL of `local.objective` stays off."""
    kl_mode: Literal["exact", "compatible"] = "exact"
    """The KL of two Gaussians, or |dt| times it, as published Flow-SDE code computes it."""
    nft: DiffusionNftParams | None = None
    """Parameters of DiffusionNFT, which then replaces the policy loss."""
    nft_levels: int = 2
    """Noise levels that DiffusionNFT noises each picture to."""
    seed: int = 0
