"""DiffusionNFT: reinforcement on the forward process. It needs clean images and rewards, no log-probabilities.

An image that was made and scored is noised again to a level s, and the model's velocity is regressed in two ways at
once: towards the paths of good images, and away from those of bad ones. docs/denoising.md has the formulas. The solver
and the weights that made an image enter only through the image, which suits asynchronous training.

Guarantees: the gradient flows through v alone; results are at least float32. The trainer samples s and the noise.

Legend: B samples; x0, x_s, v are [B, ...]; s, advantages, r and losses are [B].
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.denoising import mean_per_sample, predict_data, widen_precision
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionNftParams:
    """Step size, clipping, weighting and KL of DiffusionNFT."""

    beta: float = 1.0
    """β, the share of the new policy in v⁺: the smaller, the further an update goes from the old policy."""
    clip: float = 5.0
    """Advantages of ±`clip` and beyond count as certainly good and certainly bad."""
    weight_floor: float | None = 1e-5
    """Each error is divided by its own size, but by no less than this, so that all noise levels count alike. None
    divides by s² instead, which is the loss on velocities written above."""
    kl_coef: float = 0.0
    """Coefficient of ‖v − v_ref‖², used if there is a reference."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError("must be positive", key="nft_beta", value=self.beta, hint="0.1 to 1 is usual")
        if not self.clip > 0:
            raise ConfigError("must be positive", key="advantage_clip", value=self.clip, hint="5 is usual")


def advantage_to_optimality(advantage_B: Tensor, clip: float = 5.0) -> Tensor:
    """Map advantages to probabilities of being good: r = ½ + ½·clip(A/c, −1, 1)."""
    return 0.5 + 0.5 * (widen_precision(advantage_B) / clip).clamp(-1, 1)


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x0: Tensor,
    x_s: Tensor,
    s: Tensor,
    advantage: Tensor,
    params: DiffusionNftParams,
    v_ref: Tensor | None = None,
) -> Tensor:
    """Return the loss per sample, [B]; the trainer averages.

    The loss is scaled by clip/β as published, so that the gradient at v = v_old depends on neither.
    """
    v, old = widen_precision(v), widen_precision(v_old).detach()
    r = advantage_to_optimality(advantage, params.clip).to(v.device, v.dtype).detach()
    good = _error((1 - params.beta) * old + params.beta * v, x0, x_s, s, params.weight_floor)
    bad = _error((1 + params.beta) * old - params.beta * v, x0, x_s, s, params.weight_floor)
    loss = (r * good + (1 - r) * bad) * params.clip / params.beta
    if v_ref is not None and params.kl_coef:
        loss = loss + params.kl_coef * mean_per_sample((v - widen_precision(v_ref).detach()).square())
    return loss


def _error(v: Tensor, x0: Tensor, x_s: Tensor, s: Tensor, floor: float | None) -> Tensor:
    """Return the weighted squared error of the image that `v` predicts, [B]."""
    error = predict_data(x_s, v, s) - widen_precision(x0)
    squared = mean_per_sample(error.square())
    if floor is None:
        return squared / s.to(squared.dtype).square()
    return squared / mean_per_sample(error.detach().abs()).clamp(min=floor)


def old_policy_decay(update: int, *, begin: int = 0, rise: float = 1e-3, most: float = 0.5) -> float:
    """Return the share of the old policy that stays after step `update`: 0 until `begin`, then rising to `most`."""
    return min(max(update - begin, 0) * rise, most)


@torch.no_grad()
def update_old_policy(old: Iterable[Tensor], new: Iterable[Tensor], decay: float) -> None:
    """Set old ← decay·old + (1 − decay)·new in place."""
    for slow, fast in zip(old, new, strict=True):
        slow.mul_(decay).add_(fast.to(slow.dtype), alpha=1 - decay)
