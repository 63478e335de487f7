"""The policy objective: the function that a trainer calls for each micro-batch, and the metrics that it sums up.

    loss = agg(pg_variant · mismatch weight, over kept actions) + kl_loss_coef·agg(KL) − entropy_loss_coef·agg(entropy)

Guarantees: the losses of all micro-batches add up to the loss of the batch, in any cut and any packing, over any number
of ranks. A micro-batch without trained actions has loss 0 and gradient 0. A loss over sequences that is given a part of
one raises. Ratios are against the behaviour policy unless a loss asks for the proximal one. Metrics are sums, so those
of micro-batches and ranks add up exactly, and nothing leaves the device until `summary`: a micro-batch costs no host
synchronisation. docs/algorithms.md shows the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from headway.algorithm_traits import LOSS_TRAITS
from headway.algorithms.actions import (
    Actions,
    AggregationMode,
    BatchTotals,
    make_action_weights,
    require_input,
    sum_weighted,
)
from headway.algorithms.kl import KlEstimator, estimate_kl
from headway.algorithms.losses import ActionLoss, LossSettings, compute_action_loss
from headway.algorithms.mismatch import (
    NO_CORRECTION,
    MismatchCorrection,
    filter_mask,
    importance_weight,
    make_mismatch_correction,
)
from headway.algorithms.packed_sequences import clamp_log_ratio
from headway.config import ResolvedConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyMetricSums:
    """Sums over trained actions (largest values where the name ends in `_max`), and the terms of the loss.

    All are scalars without gradient.
    """

    loss: Tensor
    pg_loss: Tensor
    kl_loss: Tensor
    """KL term before its coefficient."""
    entropy_mean: Tensor
    """Entropy under the aggregation of the loss; 0 where none was given."""
    actions: Tensor
    clipped: Tensor
    dropped: Tensor
    """Actions that the mismatch filters took out."""
    ratio: Tensor
    """exp(ℓ − ℓ_b), as in all of `ratio_*`."""
    ratio_squared: Tensor
    ratio_max: Tensor
    k1: Tensor
    """ℓ_b − ℓ: the plain estimate of KL(behaviour ‖ policy)."""
    k3: Tensor
    """r − 1 − log r: the same KL, never negative."""
    mismatch_k3: Tensor
    """The same for ℓ_p instead of ℓ: the disagreement of trainer and engine; 0 without ℓ_p."""
    mismatch_ratio_max: Tensor
    advantage: Tensor

    def __add__(self, other: PolicyMetricSums) -> PolicyMetricSums:
        """Combine the sums of two micro-batches, or of two ranks."""
        return PolicyMetricSums(**{name: _add(name, getattr(self, name), getattr(other, name)) for name in _NAMES})

    def make_zeros(self) -> PolicyMetricSums:
        """Return the sums of no actions."""
        return PolicyMetricSums(**{name: getattr(self, name).new_zeros(()) for name in _NAMES})

    def summary(self) -> dict[str, float]:
        """Return plain numbers by the names they are logged under; a batch without actions gives zeros."""
        value = {name: float(getattr(self, name)) for name in _NAMES}
        actions = max(value["actions"], 1.0)
        squares = value["ratio_squared"] * actions
        return {
            "loss": value["loss"],
            "pg_loss": value["pg_loss"],
            "kl_loss": value["kl_loss"],
            "entropy": value["entropy_mean"],
            "actions": value["actions"],
            "clip_fraction": value["clipped"] / actions,
            "dropped_fraction": value["dropped"] / actions,
            "ratio_mean": value["ratio"] / actions,
            "ratio_max": value["ratio_max"],
            "ess": value["ratio"] ** 2 / squares if squares > 0 else 0.0,
            "behaviour_kl_k1": value["k1"] / actions,
            "behaviour_kl": value["k3"] / actions,
            "mismatch_kl": value["mismatch_k3"] / actions,
            "mismatch_ratio_max": value["mismatch_ratio_max"],
            "advantage_mean": value["advantage"] / actions,
        }


_NAMES = tuple(one.name for one in fields(PolicyMetricSums))


def _add(name: str, one: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(one, other) if name.endswith("_max") else one + other


@torch.no_grad()
def _measure_divergence(logp_N: Tensor, behaviour_N: Tensor, mask_N: Tensor) -> dict[str, Tensor]:
    """Return ratios and KL of `logp_N` against `behaviour_N`, by the names of `PolicyMetricSums`."""
    log_ratio_N = clamp_log_ratio(torch.where(mask_N, logp_N - behaviour_N, torch.zeros_like(logp_N)))
    ratio_N = torch.where(mask_N, log_ratio_N.exp(), torch.zeros_like(log_ratio_N))
    return {
        "ratio": ratio_N.sum(),
        "ratio_squared": ratio_N.square().sum(),
        "ratio_max": torch.cat([ratio_N.flatten(), ratio_N.new_zeros(1)]).amax(),
        "k1": -log_ratio_N.sum(),
        "k3": (torch.expm1(log_ratio_N) - log_ratio_N).sum(),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveResult:
    """One micro-batch's part of the loss and of the metrics."""

    loss: Tensor
    """Scalar with gradient."""
    sums: PolicyMetricSums
    """Metrics, which are added up over micro-batches and ranks before `summary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Policy loss, mismatch correction, KL term, entropy bonus and aggregation as one function."""

    pg_variant: str
    settings: LossSettings = field(default_factory=LossSettings)
    mode: AggregationMode = "token-mean"
    norm_length: int = 1
    """The constant of `seq-mean-token-sum-norm`."""
    mismatch: MismatchCorrection = NO_CORRECTION
    kl_kind: KlEstimator = "k3"
    kl_coef: float | None = None
    """Coefficient of the KL term; with None there is no term, and no reference is read."""
    entropy_coef: float = 0.0

    def __call__(self, actions: Actions, totals: BatchTotals) -> ObjectiveResult:
        x = actions.cleaned()
        if self.needs_whole_sequences:
            totals.require_whole(x.mask_N, x.sequence_N)
        weight_N = make_action_weights(
            self.mode, x.sequence_N, totals, norm_length=self.norm_length, dtype=x.logp_N.dtype
        )
        policy = compute_action_loss(self.pg_variant, x, self.settings)
        correction_N, kept_N = self._correct_mismatch(x, totals.mean_weight)
        pg_loss = sum_weighted(policy.loss_N * correction_N, kept_N, weight_N)
        kl_loss = self._kl(x, weight_N)
        entropy = self._entropy(x, weight_N)
        loss = pg_loss if self.kl_coef is None else pg_loss + self.kl_coef * kl_loss
        if self.entropy_coef:  # Without a coefficient the entropy is a metric only, and costs no backward pass.
            loss = loss - self.entropy_coef * entropy
        terms = {"loss": loss, "pg_loss": pg_loss, "kl_loss": kl_loss, "entropy_mean": entropy}
        return ObjectiveResult(loss=loss, sums=_sum_metrics(x, policy, kept_N, terms))

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a sequence must not be cut into several micro-batches."""
        return (
            LOSS_TRAITS.get(self.pg_variant, key="pg_variant").needs_whole_sequences
            or self.mismatch.needs_whole_sequences
        )

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether an action with advantage 0 has no gradient, so that its sample may be left out."""
        plain = self.kl_coef is None and not self.entropy_coef
        return plain and LOSS_TRAITS.get(self.pg_variant, key="pg_variant").skips_zero_advantages

    def _correct_mismatch(self, x: Actions, mean_weight: float) -> tuple[Tensor, Tensor]:
        """Return the weight and the mask of the mismatch correction."""
        ones_N = torch.ones_like(x.behaviour_N)
        if not self.mismatch.active:
            return ones_N, x.mask_N
        proximal_N = require_input(x.proximal_N, "proximal_N", "train_infer_correction")
        inputs = (proximal_N, x.behaviour_N, x.mask_N, x.sequence_N, x.sequences)
        turns, weight = (x.turn_N, x.turns), self.mismatch.weight
        weight_N = ones_N if weight is None else importance_weight(*inputs, weight, *turns) / mean_weight
        return weight_N, filter_mask(*inputs, self.mismatch.filters, *turns)

    def _kl(self, x: Actions, weight_N: Tensor) -> Tensor:
        if self.kl_coef is None:
            return x.logp_N.new_zeros(())
        reference_N = require_input(x.reference_N, "reference_N", "use_kl_loss")
        return sum_weighted(estimate_kl(self.kl_kind, x.logp_N, reference_N), x.mask_N, weight_N)

    def _entropy(self, x: Actions, weight_N: Tensor) -> Tensor:
        if x.entropy_N is None and not self.entropy_coef:
            return x.logp_N.new_zeros(())
        return sum_weighted(require_input(x.entropy_N, "entropy_N", "entropy_loss_coef"), x.mask_N, weight_N)


def _sum_metrics(x: Actions, policy: ActionLoss, kept_N: Tensor, terms: dict[str, Tensor]) -> PolicyMetricSums:
    mismatch = _measure_divergence(x.behaviour_N if x.proximal_N is None else x.proximal_N, x.behaviour_N, x.mask_N)
    return PolicyMetricSums(
        **{name: term.detach() for name, term in terms.items()},
        **_measure_divergence(x.logp_N, x.behaviour_N, x.mask_N),
        actions=x.mask_N.sum(),
        clipped=(policy.clipped_N & x.mask_N).sum(),
        dropped=(x.mask_N & ~kept_N).sum(),
        mismatch_k3=mismatch["k3"],
        mismatch_ratio_max=mismatch["ratio_max"],
        advantage=x.advantage_N.detach().sum(),
    )


def make_objective(resolved: ResolvedConfig) -> PolicyObjective:
    """Read the objective from a configuration."""
    config, derived = resolved.config, resolved.derived
    settings = LossSettings(
        clip_low=derived.pg_clip_low,
        clip_high=derived.pg_clip_high,
        dual_clip=config.dual_clip_c if config.dual_clip_loss else None,
        decoupled_weight_cap=config.decoupled_weight_cap,
        decoupled_weight_type=config.decoupled_weight_type,
        tis_lower=config.tis_lower_bound,
        tis_upper=config.tis_upper_bound,
        cispo_epsilon_low=config.cispo_epsilon_low,
        cispo_epsilon_high=config.cispo_epsilon_high,
        cispo_unified_mask=config.cispo_use_unified_mask,
        sao_epsilon_low=config.sao_epsilon_low,
        sao_epsilon_high=config.sao_epsilon_high,
        topr_positive_weight=config.topr_positive_weight,
        topr_negative_weight=config.topr_negative_weight,
        kimi15_tau=config.kimi15_tau,
        sapo_tau_positive=config.sapo_tau_positive,
        sapo_tau_negative=config.sapo_tau_negative,
        clip_cov_ratio=config.clip_cov_ratio,
        clip_cov_low=config.clip_cov_low,
        clip_cov_high=config.clip_cov_high,
        cppo_length=derived.response_length,
        cppo_weight_min=config.cppo_weight_min,
        cppo_budget=config.cppo_budget,
        cppo_budget_quantile=config.cppo_budget_quantile,
        cppo_budget_scale=config.cppo_budget_scale,
        kl_cov_ratio=config.kl_cov_ratio,
        kl_cov_coef=config.kl_cov_coef,
    )
    return PolicyObjective(
        pg_variant=config.pg_variant,
        settings=settings,
        mode=config.loss_agg_mode,
        norm_length=config.loss_norm_length or derived.response_length,
        mismatch=make_mismatch_correction(config.train_infer_correction),
        kl_kind=config.kl_loss_type,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else None,
        entropy_coef=config.entropy_loss_coef,
    )
