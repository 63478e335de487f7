"""The policy objective: what a trainer calls for each micro-batch.

    objective = objective_of(resolved)
    totals = BatchTotals.of(mask_N, sequence_N, sequences)        # once per optimizer step, over all of it
    for part in micro_batches:
        result = objective(part, totals)
        result.loss.backward()                                    # gradients add up to those of the whole batch

    loss = agg(pg_variant · mismatch weight, over kept actions) + kl_loss_coef·agg(KL) − entropy_loss_coef·agg(entropy)

Guarantees: the sum of the losses of all micro-batches is the loss of the batch, in any cut and any packing, over any
number of ranks; a micro-batch without trained actions has loss 0 and gradient 0. A loss over sequences that is given
part of one raises. Ratios are against the behaviour policy unless a loss asks for the proximal one.

Does not compute log-probabilities (`logprobs.py`) or advantages (`advantages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, required
from headway.algorithms.aggregate import AggregationMode, BatchTotals, action_weights, weighted_sum
from headway.algorithms.kl import KlEstimator, kl_estimate
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
from headway.algorithms.metrics import PolicySums, divergence
from headway.algorithms.mismatch import NO_CORRECTION, Mismatch, filter_mask, importance_weight, mismatch_of
from headway.config import Resolved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveResult:
    """One micro-batch's part."""

    loss: Tensor
    """Scalar with gradient."""
    sums: PolicySums
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
    mismatch: Mismatch = NO_CORRECTION
    kl_kind: KlEstimator = "k3"
    kl_coef: float | None = None
    """Coefficient of the KL term; None: no term, and no reference read."""
    entropy_coef: float = 0.0

    def __call__(self, actions: Actions, totals: BatchTotals) -> ObjectiveResult:
        x = actions.cleaned()
        if self.whole_sequences:
            totals.require_whole(x.mask_N, x.sequence_N)
        weight_N = action_weights(self.mode, x.sequence_N, totals, norm_length=self.norm_length, dtype=x.logp_N.dtype)
        policy = variant(self.pg_variant).loss(x, self.params)
        correction_N, kept_N = self._correction(x)
        pg_loss = weighted_sum(policy.loss_N * correction_N, kept_N, weight_N)
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
        proximal_N = required(x.proximal_N, "proximal_N", "train_infer_correction")
        where = (proximal_N, x.behaviour_N, x.mask_N, x.sequence_N, x.sequences)
        weight_N = ones_N if self.mismatch.weight is None else importance_weight(*where, self.mismatch.weight)
        return weight_N, filter_mask(*where, self.mismatch.filters)

    def _kl(self, x: Actions, weight_N: Tensor) -> Tensor:
        if self.kl_coef is None:
            return x.logp_N.new_zeros(())
        reference_N = required(x.reference_N, "reference_N", "use_kl_loss")
        return weighted_sum(kl_estimate(self.kl_kind, x.logp_N, reference_N), x.mask_N, weight_N)

    def _entropy(self, x: Actions, weight_N: Tensor) -> Tensor:
        if x.entropy_N is None:
            if self.entropy_coef:
                required(None, "entropy_N", "entropy_loss_coef")
            return x.logp_N.new_zeros(())
        return weighted_sum(x.entropy_N, x.mask_N, weight_N)


def _sums(x: Actions, policy: ActionLoss, kept_N: Tensor, parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> PolicySums:
    loss, pg_loss, kl_loss, entropy = parts
    ahead = divergence(x.logp_N, x.behaviour_N, x.mask_N)
    torn = divergence(x.behaviour_N if x.proximal_N is None else x.proximal_N, x.behaviour_N, x.mask_N)
    return PolicySums(
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


def objective_of(resolved: Resolved) -> PolicyObjective:
    """From a configuration."""
    config = resolved.config
    return PolicyObjective(
        pg_variant=config.pg_variant,
        params=loss_params_of(resolved),
        mode=config.loss_agg_mode,
        norm_length=resolved.derived.response_length,
        mismatch=mismatch_of(config.train_infer_correction),
        kl_kind=config.kl_loss_type,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else None,
        entropy_coef=config.entropy_loss_coef,
    )


def loss_params_of(resolved: Resolved) -> Any:
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
