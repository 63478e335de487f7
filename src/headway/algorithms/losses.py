"""Policy losses, one plain function each, behind a table by `pg_variant`.

Every loss is per action: what becomes of masks, denominators, KL and corrections is decided elsewhere
(`objective.py` puts them together). r = exp(ℓ − ℓ_b) is against the behaviour policy, with its log clamped to ±20
(`ratio.py`); giving ℓ recomputed with the current weights as ℓ_b makes r ≡ 1 and turns the correction off.

Guarantees: finite for finite input; gradient only through ℓ, other policies are constants. All but `gspo` work on
tensors of any one shape; `gspo` wants whole sequences.

Legend: N packed actions. `logp_N` ℓ with gradient, `behaviour_N` ℓ_b, `proximal_N` ℓ_p, `advantage_N` A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, require_input
from headway.algorithms.packed_sequences import importance_ratio, importance_ratio_at
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionLoss:
    """What a loss says about each action."""

    loss_N: Tensor
    clipped_N: Tensor
    """Where a clip or a bound changed the weight of the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoParams:
    """`ppo`: ratio inside [1 − clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c of the dual clip; None is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpoParams:
    """`decoupled_ppo`: the clip of `ppo`, and the cap C of the behaviour weight."""

    clip: PpoParams = field(default_factory=PpoParams)
    weight_cap: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VanillaParams:
    """`vanilla` has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TisParams:
    """`tis`: bounds of the weight."""

    lower: float = 0.0
    upper: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoParams:
    """`cispo`: weight inside [1 − epsilon_low, 1 + epsilon_high]."""

    epsilon_low: float = 0.1
    epsilon_high: float = 0.1
    unified_mask: bool = False
    """Drop (A > 0, r above) and (A < 0, r below): what PPO would have clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToprParams:
    """`topr`: weights of samples with a positive reward and of the others."""

    positive_weight: float = 1.0
    negative_weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi15Params:
    """`kimi15`: τ of the squared log-ratio."""

    tau: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoParams:
    """`gspo`: sequence ratio inside [1 − clip_low, 1 + clip_high]."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4


def clipped_surrogate(ratio_N: Tensor, advantage_N: Tensor, params: PpoParams) -> ActionLoss:
    """−min(rA, clip(r)·A); with dual clip, for A < 0, −max(·, c·A)."""
    low, high = 1 - params.clip_low, 1 + params.clip_high
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
    above_N, below_N = ratio_N > high, ratio_N < low
    clipped_N = ((advantage_N > 0) & above_N) | ((advantage_N < 0) & below_N)
    if params.dual_clip is not None:
        floor_N = params.dual_clip * advantage_N
        clipped_N = clipped_N | ((advantage_N < 0) & (ratio_N > params.dual_clip))
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, floor_N), gain_N)
    return ActionLoss(loss_N=-gain_N, clipped_N=clipped_N)


def ppo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, params: PpoParams) -> ActionLoss:
    """Clipped surrogate on exp(ℓ − ℓ_b)."""
    return clipped_surrogate(importance_ratio(logp_N, behaviour_N), advantage_N, params)


def decoupled_ppo(
    logp_N: Tensor,
    behaviour_N: Tensor,
    proximal_N: Tensor,
    advantage_N: Tensor,
    params: DecoupledPpoParams,
) -> ActionLoss:
    """Clipped surrogate on exp(ℓ − ℓ_p), times sg(min(exp(ℓ_p − ℓ_b), C))."""
    inner = clipped_surrogate(importance_ratio(logp_N, proximal_N), advantage_N, params.clip)
    weight_N = importance_ratio(proximal_N, behaviour_N).detach().clamp(max=params.weight_cap)
    return ActionLoss(loss_N=inner.loss_N * weight_N, clipped_N=inner.clipped_N)


def vanilla(logp_N: Tensor, advantage_N: Tensor, params: VanillaParams) -> ActionLoss:
    """−A·ℓ. Corrects for nothing."""
    return ActionLoss(loss_N=-advantage_N * logp_N, clipped_N=torch.zeros_like(advantage_N, dtype=torch.bool))


def tis(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, params: TisParams) -> ActionLoss:
    """−sg(clip(r, lo, hi))·A·ℓ."""
    ratio_N = importance_ratio(logp_N, behaviour_N).detach()
    weight_N = ratio_N.clamp(params.lower, params.upper)
    return ActionLoss(loss_N=-weight_N * advantage_N * logp_N, clipped_N=weight_N != ratio_N)


def cispo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, params: CispoParams) -> ActionLoss:
    """−sg(clip(r, 1 − e_lo, 1 + e_hi))·A·ℓ: every action keeps a gradient, unless the unified mask drops it."""
    low, high = 1 - params.epsilon_low, 1 + params.epsilon_high
    ratio_N = importance_ratio(logp_N, behaviour_N).detach()
    weight_N = ratio_N.clamp(low, high)
    if params.unified_mask:
        dropped_N = ((advantage_N > 0) & (ratio_N > high)) | ((advantage_N < 0) & (ratio_N < low))
        weight_N = weight_N.masked_fill(dropped_N, 0.0)
    return ActionLoss(loss_N=-weight_N * advantage_N * logp_N, clipped_N=weight_N != ratio_N)


def topr(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, reward_N: Tensor, params: ToprParams) -> ActionLoss:
    """Reward > 0: −w₊·A·ℓ, however old; else −w₋·sg(clip(r, 0, 1))·A·ℓ."""
    ratio_N = importance_ratio(logp_N, behaviour_N).detach()
    good_N = reward_N > 0
    tapered_N = params.negative_weight * ratio_N.clamp(0.0, 1.0)
    weight_N = torch.where(good_N, torch.full_like(ratio_N, params.positive_weight), tapered_N)
    return ActionLoss(loss_N=-weight_N * advantage_N * logp_N, clipped_N=~good_N & (ratio_N > 1))


def kimi15(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, params: Kimi15Params) -> ActionLoss:
    """−A·ℓ + (τ/2)·(ℓ − ℓ_b)²: pulled back to the behaviour policy instead of weighted."""
    pull_N = 0.5 * params.tau * (logp_N - behaviour_N.detach()).square()
    return ActionLoss(loss_N=pull_N - advantage_N * logp_N, clipped_N=torch.zeros_like(advantage_N, dtype=torch.bool))


def gspo(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    params: GspoParams,
) -> ActionLoss:
    """Clipped surrogate on the sequence ratio exp(mean over masked actions of ℓ − ℓ_b)."""
    ratio_N = importance_ratio_at("geometric", logp_N, behaviour_N, mask_N, sequence_N, sequences)
    return clipped_surrogate(ratio_N, advantage_N, PpoParams(clip_low=params.clip_low, clip_high=params.clip_high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table: the loss, the type of its parameters, and whether it wants whole sequences."""

    params: type
    loss: Callable[[Actions, Any], ActionLoss]
    whole_sequences: bool = False


VARIANTS: Mapping[str, Variant] = {
    "ppo": Variant(params=PpoParams, loss=lambda x, p: ppo(x.logp_N, x.behaviour_N, x.advantage_N, p)),
    "decoupled_ppo": Variant(
        params=DecoupledPpoParams,
        loss=lambda x, p: decoupled_ppo(
            x.logp_N, x.behaviour_N, require_input(x.proximal_N, "proximal_N", "decoupled_ppo"), x.advantage_N, p
        ),
    ),
    "vanilla": Variant(params=VanillaParams, loss=lambda x, p: vanilla(x.logp_N, x.advantage_N, p)),
    "tis": Variant(params=TisParams, loss=lambda x, p: tis(x.logp_N, x.behaviour_N, x.advantage_N, p)),
    "cispo": Variant(params=CispoParams, loss=lambda x, p: cispo(x.logp_N, x.behaviour_N, x.advantage_N, p)),
    "topr": Variant(
        params=ToprParams,
        loss=lambda x, p: topr(
            x.logp_N, x.behaviour_N, x.advantage_N, require_input(x.reward_N, "reward_N", "topr"), p
        ),
    ),
    "kimi15": Variant(params=Kimi15Params, loss=lambda x, p: kimi15(x.logp_N, x.behaviour_N, x.advantage_N, p)),
    "gspo": Variant(
        params=GspoParams,
        loss=lambda x, p: gspo(x.logp_N, x.behaviour_N, x.advantage_N, x.mask_N, x.sequence_N, x.sequences, p),
        whole_sequences=True,
    ),
}
"""Every `pg_variant` there is."""


def variant(name: str) -> Variant:
    """The row of `pg_variant`."""
    if name not in VARIANTS:
        raise ConfigError("no such policy loss", key="pg_variant", value=name, hint=f"one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
