"""What a practitioner looks at after a step, kept as sums so that micro-batches and ranks add up exactly.

Nothing here leaves the device until `summary`: a micro-batch costs no synchronisation. All tensors are scalars
without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.actions import (
    Actions,
    AggregationMode,
    BatchTotals,
    make_action_weights,
    require_input,
    sum_weighted,
)
from headway.algorithms.kl import KlEstimator, estimate_kl
from headway.algorithms.losses import (
    ActionLoss,
    CispoParams,
    DecoupledPpoParams,
    GspoParams,
    Kimi15Params,
    PpoParams,
    TisParams,
    ToprParams,
    VanillaParams,
    variant,
)
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
    """Sums over trained actions (fields ending in `_max`: the largest), and parts of the loss, which add up too."""

    loss: Tensor
    pg_loss: Tensor
    kl_loss: Tensor
    """Before its coefficient."""
    entropy_mean: Tensor
    """Entropy under the aggregation of the loss; 0 where none was given."""
    actions: Tensor
    clipped: Tensor
    dropped: Tensor
    """Actions that the mismatch filters took out."""
    ratio: Tensor
    """exp(ℓ − ℓ_b), as all of `ratio_*`."""
    ratio_squared: Tensor
    ratio_max: Tensor
    k1: Tensor
    """ℓ_b − ℓ: the plain estimate of KL(behaviour ‖ policy)."""
    k3: Tensor
    """r − 1 − log r: the same, never negative."""
    mismatch_k3: Tensor
    """The same for ℓ_p instead of ℓ: what trainer and engine disagree about; 0 without ℓ_p."""
    mismatch_ratio_max: Tensor
    advantage: Tensor

    def __add__(self, other: PolicyMetricSums) -> PolicyMetricSums:
        """Of two micro-batches, or two ranks."""
        return PolicyMetricSums(**{name: _join(name, getattr(self, name), getattr(other, name)) for name in _NAMES})

    def summary(self) -> dict[str, float]:
        """Plain numbers by the names they are logged under; a batch without actions gives zeros."""
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


_NAMES = tuple(field.name for field in fields(PolicyMetricSums))


def _join(name: str, one: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(one, other) if name.endswith("_max") else one + other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BehaviourDivergence:
    """How far one policy is from the one that acted, summed over trained actions."""

    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    k1: Tensor
    k3: Tensor


def measure_divergence(logp_N: Tensor, behaviour_N: Tensor, mask_N: Tensor) -> BehaviourDivergence:
    """Ratios and KL of `logp_N` against `behaviour_N`."""
    with torch.no_grad():
        log_ratio_N = clamp_log_ratio(torch.where(mask_N, logp_N - behaviour_N, torch.zeros_like(logp_N)))
        ratio_N = torch.where(mask_N, log_ratio_N.exp(), torch.zeros_like(log_ratio_N))
        return BehaviourDivergence(
            ratio=ratio_N.sum(),
            ratio_squared=ratio_N.square().sum(),
            ratio_max=torch.cat([ratio_N.flatten(), ratio_N.new_zeros(1)]).amax(),
            k1=-log_ratio_N.sum(),
            k3=(torch.expm1(log_ratio_N) - log_ratio_N).sum(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveResult:
    """One micro-batch's part."""

    loss: Tensor
    """Scalar with gradient."""
    sums: PolicyMetricSums
    """Add them up over micro-batches and ranks, then ask for the `summary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Policy loss, mismatch correction, KL term, entropy bonus and aggregation as one function."""

    pg_variant: str
    params: Any
    """Parameters of the variant."""
    mode: AggregationMode = "token-mean"
    norm_length: int = 1
    """The constant of `seq-mean-token-sum-norm`."""
    mismatch: MismatchCorrection = NO_CORRECTION
    kl_kind: KlEstimator = "k3"
    kl_coef: float | None = None
    """Coefficient of the KL term; None: no term, and no reference read."""
    entropy_coef: float = 0.0

    def __call__(self, actions: Actions, totals: BatchTotals) -> ObjectiveResult:
        x = actions.cleaned()
        if self.whole_sequences:
            totals.require_whole(x.mask_N, x.sequence_N)
        weight_N = make_action_weights(
            self.mode, x.sequence_N, totals, norm_length=self.norm_length, dtype=x.logp_N.dtype
        )
        policy = variant(self.pg_variant).loss(x, self.params)
        correction_N, kept_N = self._correction(x)
        pg_loss = sum_weighted(policy.loss_N * correction_N, kept_N, weight_N)
        kl_loss = self._kl(x, weight_N)
        entropy = self._entropy(x, weight_N)
        loss = pg_loss if self.kl_coef is None else pg_loss + self.kl_coef * kl_loss
        if self.entropy_coef:  # Else the entropy is a metric only, and costs no backward pass.
            loss = loss - self.entropy_coef * entropy
        parts = (loss.detach(), pg_loss.detach(), kl_loss.detach(), entropy.detach())
        return ObjectiveResult(loss=loss, sums=_sums(x, policy, kept_N, parts))

    @property
    def whole_sequences(self) -> bool:
        """Whether a sequence must not be cut into several micro-batches."""
        return variant(self.pg_variant).whole_sequences or self.mismatch.whole_sequences

    def _correction(self, x: Actions) -> tuple[Tensor, Tensor]:
        """Weight and mask of the mismatch correction."""
        ones_N = torch.ones_like(x.behaviour_N)
        if not self.mismatch.active:
            return ones_N, x.mask_N
        proximal_N = require_input(x.proximal_N, "proximal_N", "train_infer_correction")
        where = (proximal_N, x.behaviour_N, x.mask_N, x.sequence_N, x.sequences)
        weight_N = ones_N if self.mismatch.weight is None else importance_weight(*where, self.mismatch.weight)
        return weight_N, filter_mask(*where, self.mismatch.filters)

    def _kl(self, x: Actions, weight_N: Tensor) -> Tensor:
        if self.kl_coef is None:
            return x.logp_N.new_zeros(())
        reference_N = require_input(x.reference_N, "reference_N", "use_kl_loss")
        return sum_weighted(estimate_kl(self.kl_kind, x.logp_N, reference_N), x.mask_N, weight_N)

    def _entropy(self, x: Actions, weight_N: Tensor) -> Tensor:
        if x.entropy_N is None:
            if self.entropy_coef:
                require_input(None, "entropy_N", "entropy_loss_coef")
            return x.logp_N.new_zeros(())
        return sum_weighted(x.entropy_N, x.mask_N, weight_N)


def _sums(
    x: Actions, policy: ActionLoss, kept_N: Tensor, parts: tuple[Tensor, Tensor, Tensor, Tensor]
) -> PolicyMetricSums:
    loss, pg_loss, kl_loss, entropy = parts
    ahead = measure_divergence(x.logp_N, x.behaviour_N, x.mask_N)
    torn = measure_divergence(x.behaviour_N if x.proximal_N is None else x.proximal_N, x.behaviour_N, x.mask_N)
    return PolicyMetricSums(
        loss=loss,
        pg_loss=pg_loss,
        kl_loss=kl_loss,
        entropy_mean=entropy,
        actions=x.mask_N.sum(),
        clipped=(policy.clipped_N & x.mask_N).sum(),
        dropped=(x.mask_N & ~kept_N).sum(),
        ratio=ahead.ratio,
        ratio_squared=ahead.ratio_squared,
        ratio_max=ahead.ratio_max,
        k1=ahead.k1,
        k3=ahead.k3,
        mismatch_k3=torn.k3,
        mismatch_ratio_max=torn.ratio_max,
        advantage=x.advantage_N.detach().sum(),
    )


def make_objective(resolved: ResolvedConfig) -> PolicyObjective:
    """From a configuration."""
    config = resolved.config
    return PolicyObjective(
        pg_variant=config.pg_variant,
        params=loss_params_of(resolved),
        mode=config.loss_agg_mode,
        norm_length=resolved.derived.response_length,
        mismatch=make_mismatch_correction(config.train_infer_correction),
        kl_kind=config.kl_loss_type,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else None,
        entropy_coef=config.entropy_loss_coef,
    )


def loss_params_of(resolved: ResolvedConfig) -> Any:
    """The parameters of the configured `pg_variant`."""
    config, low, high = resolved.config, resolved.derived.pg_clip_low, resolved.derived.pg_clip_high
    dual = config.dual_clip_c if config.dual_clip_loss else None
    clip = PpoParams(clip_low=low, clip_high=high, dual_clip=dual)
    return {
        "ppo": clip,
        "decoupled_ppo": DecoupledPpoParams(clip=clip, weight_cap=config.decoupled_weight_cap),
        "vanilla": VanillaParams(),
        "tis": TisParams(lower=config.tis_lower_bound, upper=config.tis_upper_bound),
        "cispo": CispoParams(
            epsilon_low=config.cispo_epsilon_low,
            epsilon_high=config.cispo_epsilon_high,
            unified_mask=config.cispo_use_unified_mask,
        ),
        "topr": ToprParams(positive_weight=config.topr_positive_weight, negative_weight=config.topr_negative_weight),
        "kimi15": Kimi15Params(tau=config.kimi15_tau),
        "gspo": GspoParams(clip_low=low, clip_high=high),
    }[config.pg_variant]
