"""Policy losses: plain functions, registered under the values of `pg_variant`.

    def my_loss(actions: Actions, settings: LossSettings) -> Tensor | ActionLoss

A loss returns one number per action, [N]: either a tensor, or an `ActionLoss` that also says which actions were
clipped. It must not apply masks, denominators, the KL term or the mismatch correction; `objective.py` does that. Its
gradient flows through `actions.logp_N` only. Facts that the configuration asks about (does the loss correct for
off-policy data, does it need a proximal policy?) are `algorithm_traits.LossTraits`, stored under the same name.

r = exp(ℓ − ℓ_b) is the ratio to the behaviour policy, with its logarithm clamped to ±20 (`packed_sequences.py`).
Passing ℓ, recomputed with the current weights, as ℓ_b makes r ≡ 1 and turns the off-policy correction off.

Guarantees: finite for finite input. All built-in losses but `gspo` work on a part of a sequence too.
Legend: N packed actions; ℓ is `logp_N`, ℓ_b `behaviour_N`, ℓ_p `proximal_N`, A `advantage_N`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, require_input
from headway.algorithms.packed_sequences import importance_ratio, importance_ratio_at
from headway.registry import POLICY_LOSSES
from headway.user_code import raise_plugin_error


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Numbers that the built-in losses read; each names the loss that reads it."""

    clip_low: float = 0.2
    """`ppo`, `decoupled_ppo`, `gspo`: the ratio is clipped to [1 − clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    dual_clip: float | None = None
    """`ppo`, `decoupled_ppo`: the constant c of the dual clip; None turns it off."""
    decoupled_weight_cap: float = 5.0
    """`decoupled_ppo`: the largest weight exp(ℓ_p − ℓ_b)."""
    tis_lower: float = 0.0
    """`tis`: bounds of the weight."""
    tis_upper: float = 1.0
    cispo_epsilon_low: float = 0.1
    """`cispo`: the weight is clipped to [1 − epsilon_low, 1 + epsilon_high]."""
    cispo_epsilon_high: float = 0.1
    cispo_unified_mask: bool = False
    """`cispo`: drop the actions that PPO would have clipped."""
    topr_positive_weight: float = 1.0
    """`topr`: weight of samples with a positive reward."""
    topr_negative_weight: float = 1.0
    """`topr`: weight of all other samples."""
    kimi15_tau: float = 0.1
    """`kimi15`: coefficient τ of the squared log-ratio."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionLoss:
    """The loss of each action."""

    loss_N: Tensor
    clipped_N: Tensor
    """Actions whose weight was changed by a clip or a bound; a metric."""


LossFunction = Callable[[Actions, LossSettings], Tensor | ActionLoss]


def compute_action_loss(name: str, actions: Actions, settings: LossSettings) -> ActionLoss:
    """Call the loss registered under `name`. Raise `ConfigError` if there is none."""
    function: LossFunction = POLICY_LOSSES.get(name, key="pg_variant")
    try:
        found = function(actions, settings)
    except (SystemExit, KeyboardInterrupt) as error:  # the trainer's process goes on; any other error names its line
        raise_plugin_error("policy loss", name, function, error)
    return _unclipped(found) if isinstance(found, Tensor) else found


def _unclipped(loss_N: Tensor) -> ActionLoss:
    return ActionLoss(loss_N=loss_N, clipped_N=torch.zeros_like(loss_N, dtype=torch.bool))


def _clipped_surrogate(ratio_N: Tensor, advantage_N: Tensor, settings: LossSettings, c: float | None) -> ActionLoss:
    """Return −min(rA, clip(r)·A); with a dual clip c, for A < 0, −max(·, c·A)."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
    clipped_N = _is_clipped(ratio_N, advantage_N, low, high)
    if c is not None:
        clipped_N = clipped_N | ((advantage_N < 0) & (ratio_N > c))
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, c * advantage_N), gain_N)
    return ActionLoss(loss_N=-gain_N, clipped_N=clipped_N)


def _is_clipped(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """Return where PPO has no gradient: (A > 0, r above) and (A < 0, r below)."""
    return ((advantage_N > 0) & (ratio_N > high)) | ((advantage_N < 0) & (ratio_N < low))


def ppo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the clipped surrogate on exp(ℓ − ℓ_b)."""
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N)
    return _clipped_surrogate(ratio_N, actions.advantage_N, settings, settings.dual_clip)


def decoupled_ppo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the clipped surrogate on exp(ℓ − ℓ_p), times the constant min(exp(ℓ_p − ℓ_b), cap)."""
    proximal_N = require_input(actions.proximal_N, "proximal_N", "decoupled_ppo")
    ratio_N = importance_ratio(actions.logp_N, proximal_N)
    inner = _clipped_surrogate(ratio_N, actions.advantage_N, settings, settings.dual_clip)
    weight_N = importance_ratio(proximal_N, actions.behaviour_N).detach().clamp(max=settings.decoupled_weight_cap)
    return ActionLoss(loss_N=inner.loss_N * weight_N, clipped_N=inner.clipped_N)


def vanilla(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −A·ℓ, which corrects for nothing."""
    return _unclipped(-actions.advantage_N * actions.logp_N)


def tis(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −clip(r, lower, upper)·A·ℓ; the weight is a constant."""
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N).detach()
    weight_N = ratio_N.clamp(settings.tis_lower, settings.tis_upper)
    return ActionLoss(loss_N=-weight_N * actions.advantage_N * actions.logp_N, clipped_N=weight_N != ratio_N)


def cispo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −clip(r, 1 − e_low, 1 + e_high)·A·ℓ: every action keeps a gradient, unless the unified mask drops it."""
    low, high = 1 - settings.cispo_epsilon_low, 1 + settings.cispo_epsilon_high
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N).detach()
    weight_N = ratio_N.clamp(low, high)
    if settings.cispo_unified_mask:
        weight_N = weight_N.masked_fill(_is_clipped(ratio_N, actions.advantage_N, low, high), 0.0)
    return ActionLoss(loss_N=-weight_N * actions.advantage_N * actions.logp_N, clipped_N=weight_N != ratio_N)


def topr(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −w₊·A·ℓ for rewards above 0, however old the sample is; else −w₋·clip(r, 0, 1)·A·ℓ."""
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N).detach()
    positive_N = require_input(actions.reward_N, "reward_N", "topr") > 0
    tapered_N = settings.topr_negative_weight * ratio_N.clamp(0.0, 1.0)
    weight_N = torch.where(positive_N, torch.full_like(ratio_N, settings.topr_positive_weight), tapered_N)
    loss_N = -weight_N * actions.advantage_N * actions.logp_N
    return ActionLoss(loss_N=loss_N, clipped_N=~positive_N & (ratio_N > 1))


def kimi15(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −A·ℓ + (τ/2)·(ℓ − ℓ_b)²: the policy is pulled back to the behaviour policy instead of weighted."""
    pull_N = 0.5 * settings.kimi15_tau * (actions.logp_N - actions.behaviour_N.detach()).square()
    return _unclipped(pull_N - actions.advantage_N * actions.logp_N)


def gspo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the clipped surrogate on the sequence ratio exp(mean over masked actions of ℓ − ℓ_b)."""
    x = actions
    ratio_N = importance_ratio_at("geometric", x.logp_N, x.behaviour_N, x.mask_N, x.sequence_N, x.sequences)
    return _clipped_surrogate(ratio_N, x.advantage_N, settings, None)


for _function in (ppo, decoupled_ppo, vanilla, tis, cispo, topr, kimi15, gspo):
    POLICY_LOSSES.register(_function.__name__, _function)
