"""Policy losses: plain functions, registered under the values of `pg_variant`.

    def my_loss(actions: Actions, settings: LossSettings) -> Tensor | ActionLoss

A loss returns one number per action, [N]: either a tensor, or an `ActionLoss` that also says which actions were
clipped. It must not apply masks, denominators, the KL term or the mismatch correction; `objective.py` does that. Its
gradient flows through `actions.logp_N` only. Facts that the configuration asks about (does the loss correct for
off-policy data, does it need a proximal policy?) are `algorithm_traits.LossTraits`, stored under the same name.

r = exp(ℓ − ℓ_b) is the ratio to the behaviour policy, with its logarithm clamped to ±20 (`packed_sequences.py`).
Passing ℓ, recomputed with the current weights, as ℓ_b makes r ≡ 1 and turns the off-policy correction off.

Guarantees: finite for finite input. All built-in losses but `gspo`, `gmpo` and `cppo` work on a part of a sequence too.
`clip_cov` and `kl_cov` compare the actions of a micro-batch with each other, so how a batch is cut matters to them.
Legend: N packed actions; ℓ is `logp_N`, ℓ_b `behaviour_N`, ℓ_p `proximal_N`, A `advantage_N`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, require_input
from headway.algorithms.packed_sequences import (
    RatioLevel,
    RowLayout,
    clamp_log_ratio,
    importance_ratio,
    importance_ratio_at,
    mean_by_sequence,
)
from headway.registry import POLICY_LOSSES
from headway.user_code import raise_plugin_error

_TINY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Numbers that the built-in losses read; each names the loss that reads it."""

    clip_low: float = 0.2
    """`ppo`, `up`, `clip_cov`, `decoupled_ppo`, `gspo`: the ratio is clipped to [1 − clip_low, 1 + clip_high];
    `gmpo`: its logarithm to [−clip_low, clip_high]; `dppo_tv`, `dppo_kl`, `cppo` (high): actions whose
    divergence is larger are left out."""
    clip_high: float = 0.2
    dual_clip: float | None = None
    """`ppo`, `up`, `decoupled_ppo`: the constant c of the dual clip; `dppo_…`, `cppo`: the largest ratio. None: off."""
    decoupled_weight_cap: float = 5.0
    """`decoupled_ppo`: the largest weight exp(ℓ_p − ℓ_b)."""
    decoupled_weight_type: RatioLevel | Literal["none"] = "token"
    """`decoupled_ppo`: a weight for each action, for each sequence, or none."""
    tis_lower: float = 0.0
    """`tis`: bounds of the weight."""
    tis_upper: float = 1.0
    cispo_epsilon_low: float = 0.1
    """`cispo`: the weight is clipped to [1 − epsilon_low, 1 + epsilon_high]."""
    cispo_epsilon_high: float = 0.1
    cispo_unified_mask: bool = False
    """`cispo`: drop the actions that PPO would have clipped."""
    sao_epsilon_low: float = 0.3
    """`sao`: actions whose ratio is outside [1 − epsilon_low, 1 + epsilon_high] are left out."""
    sao_epsilon_high: float = 5.0
    topr_positive_weight: float = 1.0
    """`topr`: weight of samples with a positive reward."""
    topr_negative_weight: float = 1.0
    """`topr`: weight of all other samples."""
    kimi15_tau: float = 0.1
    """`kimi15`: coefficient τ of the squared log-ratio."""
    sapo_tau_positive: float = 1.0
    """`sapo`: how steep the gate is where A > 0."""
    sapo_tau_negative: float = 1.05
    """`sapo`: how steep the gate is elsewhere."""
    clip_cov_ratio: float = 2e-4
    """`clip_cov`: share of the actions that is left out."""
    clip_cov_low: float = 1.0
    """`clip_cov`: they are drawn among actions whose covariance is between these bounds."""
    clip_cov_high: float = 5.0
    cppo_length: int = 1024
    """`cppo`: position at which the weight of an action has come down to the smallest."""
    cppo_weight_min: float = 0.8
    """`cppo`: the smallest weight; the first action of a sequence has 1."""
    cppo_budget: float = 0.02
    """`cppo`: divergence for each action before; at most five times this, by the quantile of the sequence."""
    cppo_budget_quantile: float = 0.9
    cppo_budget_scale: float = 1.0
    """`cppo`: scale of that quantile."""
    kl_cov_ratio: float = 2e-4
    """`kl_cov`: share of the actions that is pulled back."""
    kl_cov_coef: float = 0.1
    """`kl_cov`: coefficient of the pull."""


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
    x, level = actions, settings.decoupled_weight_type
    proximal_N = require_input(x.proximal_N, "proximal_N", "decoupled_ppo")
    ratio_N = importance_ratio(x.logp_N, proximal_N)
    inner = _clipped_surrogate(ratio_N, x.advantage_N, settings, settings.dual_clip)
    if level == "none":
        return inner
    ratio_N = importance_ratio_at(level, proximal_N, x.behaviour_N, x.mask_N, x.sequence_N, x.sequences)
    weight_N = ratio_N.detach().clamp(max=settings.decoupled_weight_cap)
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


def sao(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −r·A·ℓ where r is inside [1 − e_low, 1 + e_high], and nothing elsewhere; the weight is a constant."""
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N).detach()
    outside_N = (ratio_N < 1 - settings.sao_epsilon_low) | (ratio_N > 1 + settings.sao_epsilon_high)
    weight_N = ratio_N.masked_fill(outside_N, 0.0)
    return ActionLoss(loss_N=-weight_N * actions.advantage_N * actions.logp_N, clipped_N=outside_N)


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


def gmpo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −A·exp(mean over masked actions of the clipped ℓ − ℓ_b): geometric means, clipped by action."""
    x = actions
    log_N = clamp_log_ratio(x.logp_N - x.behaviour_N.detach())
    clipped_N = log_N.clamp(-settings.clip_low, settings.clip_high)
    low_N = torch.where(x.advantage_N > 0, torch.minimum(log_N, clipped_N), torch.maximum(log_N, clipped_N))
    ratio_N = mean_by_sequence(low_N, x.mask_N, x.sequence_N, x.sequences).exp()[x.sequence_N]
    return ActionLoss(loss_N=-x.advantage_N * ratio_N, clipped_N=low_N != log_N)


def sapo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −(4/τ)·sigmoid(τ·(r − 1))·A, a gate that closes smoothly as r leaves 1."""
    x, positive = actions, torch.full_like(actions.advantage_N, settings.sapo_tau_positive)
    tau_N = torch.where(x.advantage_N > 0, positive, torch.full_like(positive, settings.sapo_tau_negative))
    gate_N = torch.sigmoid(tau_N * (importance_ratio(x.logp_N, x.behaviour_N) - 1)) * 4 / tau_N
    return _unclipped(-gate_N * x.advantage_N)


def dppo_tv(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −min(r, c)·A·ℓ where π − π_b has not moved too far in the direction of A; the weight is a constant."""
    moved_N = actions.logp_N.detach().exp() - actions.behaviour_N.exp()
    return _drop_divergent(actions, settings, moved_N > settings.clip_high, moved_N < -settings.clip_low)


def dppo_kl(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the same, with the KL between drawing the action or another one as the distance."""
    now_N, then_N = actions.logp_N.detach().exp(), actions.behaviour_N.exp()
    other_N = (((1 - then_N).clamp(min=0) + _TINY) / ((1 - now_N).clamp(min=0) + _TINY)).log()
    kl_N = then_N * (actions.behaviour_N - actions.logp_N.detach()) + (1 - then_N) * other_N
    above_N, below_N = (now_N > then_N) & (kl_N > settings.clip_high), (now_N < then_N) & (kl_N > settings.clip_low)
    return _drop_divergent(actions, settings, above_N, below_N)


def cppo(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the loss of `dppo_tv`, with a threshold for z = w·abs(π − π_b) that shrinks with the z of actions before.

    w falls with the position. The threshold is min(δ, δ + budget · Σ w before − Σ z before).
    """
    x, layout = actions, RowLayout.of(actions.mask_N, actions.sequence_N, actions.sequences)
    moved_N = x.logp_N.detach().exp() - x.behaviour_N.exp()
    moved_ST = layout.to_rows(moved_N.abs())
    if not moved_ST.numel():  # nothing here is trained
        return vanilla(actions, settings)
    column_T = torch.arange(moved_ST.shape[1], device=moved_ST.device)
    inside_ST = column_T < layout.length_S[:, None]
    left_T = (1 - column_T / max(settings.cppo_length - 1, 1)).clamp(min=0)
    weight_ST = (settings.cppo_weight_min + (1 - settings.cppo_weight_min) * left_T) * inside_ST
    typical_S = moved_ST.masked_fill(~inside_ST, torch.nan).nanquantile(settings.cppo_budget_quantile, dim=1)
    least, z_ST = settings.cppo_budget, weight_ST * moved_ST
    budget_S = (settings.cppo_budget_scale * typical_S.nan_to_num(0.0)).clamp(least, 5 * least)
    room_ST = budget_S[:, None] * (weight_ST.cumsum(1) - weight_ST) - (z_ST.cumsum(1) - z_ST)
    far_N = layout.to_packed((z_ST > settings.clip_high + room_ST.clamp(max=0)).to(moved_N)) > 0
    return _drop_divergent(actions, settings, far_N & (moved_N > 0), far_N & (moved_N < 0))


def _drop_divergent(actions: Actions, settings: LossSettings, above_N: Tensor, below_N: Tensor) -> ActionLoss:
    dropped_N = torch.where(actions.advantage_N > 0, above_N, below_N)
    ratio_N = importance_ratio(actions.logp_N, actions.behaviour_N).detach()
    weight_N = ratio_N if settings.dual_clip is None else ratio_N.clamp(max=settings.dual_clip)
    loss_N = -weight_N.masked_fill(dropped_N, 0.0) * actions.advantage_N * actions.logp_N
    return ActionLoss(loss_N=loss_N, clipped_N=dropped_N | (weight_N != ratio_N))


def up(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −A·ℓ where A > 0, however far the policy has moved; the loss of `ppo` elsewhere."""
    clipped, positive_N = ppo(actions, settings), actions.advantage_N > 0
    free_N = -actions.advantage_N * (actions.logp_N - actions.logp_N.detach()).exp()
    loss_N = torch.where(positive_N, free_N, clipped.loss_N)
    return ActionLoss(loss_N=loss_N, clipped_N=clipped.clipped_N & ~positive_N)


def clip_cov(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return the clipped surrogate without a few actions, drawn among those whose ℓ and A are large together.

    The draw depends on nothing but the number of actions, so it is the same after a restart.
    """
    ratio_N, covariance_N = importance_ratio(actions.logp_N, actions.behaviour_N), _covariance(actions)
    inner = _clipped_surrogate(ratio_N, actions.advantage_N, settings, None)
    inside_N = (covariance_N > settings.clip_cov_low) & (covariance_N < settings.clip_cov_high) & ~inner.clipped_N
    draw_N = torch.rand(len(ratio_N), generator=torch.Generator().manual_seed(len(ratio_N))).to(ratio_N)
    dropped_N = _mark_largest(draw_N, inside_N & actions.mask_N, actions.mask_N, settings.clip_cov_ratio)
    return ActionLoss(loss_N=inner.loss_N.masked_fill(dropped_N, 0.0), clipped_N=inner.clipped_N | dropped_N)


def kl_cov(actions: Actions, settings: LossSettings) -> ActionLoss:
    """Return −r·A, plus coef·|ℓ − ℓ_b| for the few actions whose ℓ and A are largest together."""
    log_N = clamp_log_ratio(actions.logp_N - actions.behaviour_N.detach())
    pulled_N = _mark_largest(_covariance(actions), actions.mask_N, actions.mask_N, settings.kl_cov_ratio)
    pull_N = torch.where(pulled_N, settings.kl_cov_coef * log_N.abs(), torch.zeros_like(log_N))
    return ActionLoss(loss_N=pull_N - log_N.exp() * actions.advantage_N, clipped_N=pulled_N)


def _covariance(actions: Actions) -> Tensor:
    """Return (A − mean A)·(ℓ − mean ℓ) of each action; the means are those of the trained actions here."""
    count = actions.mask_N.sum().clamp(min=1)

    def centre(x_N: Tensor) -> Tensor:
        return x_N - torch.where(actions.mask_N, x_N, torch.zeros_like(x_N)).sum() / count

    return centre(actions.advantage_N.detach()) * centre(actions.logp_N.detach())


def _mark_largest(x_N: Tensor, inside_N: Tensor, mask_N: Tensor, share: float) -> Tensor:
    """Return the largest of `x_N` inside: as many as are `share` of the masked actions, and at least one."""
    order_N = torch.where(inside_N, x_N, torch.full_like(x_N, -torch.inf)).argsort(descending=True, stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inside_N & (rank_N < (share * mask_N.sum()).floor().clamp(min=1))


for _function in (
    *(ppo, decoupled_ppo, vanilla, tis, cispo, topr, kimi15, gspo, gmpo, sapo, dppo_tv, dppo_kl),
    *(up, clip_cov, kl_cov, cppo, sao),
):
    POLICY_LOSSES.register(_function.__name__, _function)
