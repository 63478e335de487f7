"""The mathematics of post-training on packed tensors: losses, corrections, aggregation, KL, advantages, log-probs.

    params = advantage_params_of(resolved)
    made = estimate_advantages(reward_batch, params, kl_coef=controller.coef)           # once per batch
    totals = BatchTotals.of(made.mask_N, sequence_N, sequences)                # once per optimizer step
    result = objective_of(resolved)(actions, totals)                           # for each micro-batch
    result.loss.backward()

Needs torch and nothing else. Knows no model, no device, no process: what runs where is the trainer's business.
"""

from headway.algorithms.actions import Actions, BatchTotals, make_action_weights, sum_weighted
from headway.algorithms.advantages import (
    Advantages,
    AdvantageSettings,
    RewardBatch,
    TurnRewards,
    estimate_advantages,
    make_advantage_settings,
)
from headway.algorithms.kl import KlController, estimate_kl, make_kl_controller
from headway.algorithms.logprobs import TokenLogps, compute_token_logps
from headway.algorithms.mismatch import MismatchCorrection, make_mismatch_correction
from headway.algorithms.objective import ObjectiveResult, PolicyMetricSums, PolicyObjective, make_objective
from headway.algorithms.returns import compute_value_loss, find_zero_variance_groups

__all__ = [
    "Actions",
    "AdvantageSettings",
    "Advantages",
    "BatchTotals",
    "KlController",
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
    "find_zero_variance_groups",
    "make_action_weights",
    "make_advantage_settings",
    "make_kl_controller",
    "make_mismatch_correction",
    "make_objective",
    "sum_weighted",
]
