"""The mathematics of post-training on packed tensors: losses, corrections, aggregation, KL, advantages, log-probs.

    settings = make_advantage_settings(resolved)
    advantages = estimate_advantages(reward_batch, settings, kl_coef=controller.coef)    # once per batch
    totals = BatchTotals.of(advantages.mask_N, sequence_N, sequences)                    # once per optimizer step
    result = make_objective(resolved)(actions, totals)                                   # for each micro-batch
    result.loss.backward()

The package needs torch and nothing else. It knows no model, no device and no process; the trainers do.
"""

from headway.algorithms.actions import Actions, BatchTotals, make_action_weights, sum_weighted
from headway.algorithms.advantages import (
    Advantages,
    AdvantageSettings,
    Estimate,
    EstimatorInputs,
    RewardBatch,
    TurnRewards,
    estimate_advantages,
    make_advantage_settings,
)
from headway.algorithms.kl import KlController, estimate_kl, make_kl_controller
from headway.algorithms.logprobs import TokenLogps, compute_token_logps
from headway.algorithms.losses import ActionLoss, LossSettings
from headway.algorithms.mismatch import MismatchCorrection, make_mismatch_correction
from headway.algorithms.objective import ObjectiveResult, PolicyMetricSums, PolicyObjective, make_objective
from headway.algorithms.returns import compute_value_loss

__all__ = [
    "ActionLoss",
    "Actions",
    "AdvantageSettings",
    "Advantages",
    "BatchTotals",
    "Estimate",
    "EstimatorInputs",
    "KlController",
    "LossSettings",
    "MismatchCorrection",
    "ObjectiveResult",
    "PolicyMetricSums",
    "PolicyObjective",
    "RewardBatch",
    "TokenLogps",
    "TurnRewards",
    "compute_token_logps",
    "compute_value_loss",
    "estimate_advantages",
    "estimate_kl",
    "make_action_weights",
    "make_advantage_settings",
    "make_kl_controller",
    "make_mismatch_correction",
    "make_objective",
    "sum_weighted",
]
