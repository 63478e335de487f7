"""The mathematics of post-training on packed tensors: losses, corrections, aggregation, KL, advantages, log-probs.

    params = advantage_params_of(resolved)
    made = estimate_advantages(reward_batch, params, kl_coef=controller.coef)           # once per batch
    totals = BatchTotals.of(made.mask_N, sequence_N, sequences)                # once per optimizer step
    result = objective_of(resolved)(actions, totals)                           # for each micro-batch
    result.loss.backward()

Needs torch and nothing else. Knows no model, no device, no process: what runs where is the trainer's business.
"""

from headway.algorithms.actions import Actions
from headway.algorithms.advantages import (
    AdvantageParams,
    Advantages,
    RewardBatch,
    Steps,
    advantage_params_of,
    estimate_advantages,
)
from headway.algorithms.aggregate import BatchTotals, action_weights, weighted_sum
from headway.algorithms.kl import KlController, kl_controller, kl_estimate
from headway.algorithms.logprobs import TokenLogps, token_logps
from headway.algorithms.metrics import PolicySums
from headway.algorithms.mismatch import Mismatch, mismatch_of
from headway.algorithms.normalise import zero_variance
from headway.algorithms.objective import ObjectiveResult, PolicyObjective, objective_of
from headway.algorithms.returns import value_loss

__all__ = [
    "Actions",
    "AdvantageParams",
    "Advantages",
    "BatchTotals",
    "KlController",
    "Mismatch",
    "ObjectiveResult",
    "PolicyObjective",
    "PolicySums",
    "RewardBatch",
    "Steps",
    "TokenLogps",
    "action_weights",
    "advantage_params_of",
    "estimate_advantages",
    "kl_controller",
    "kl_estimate",
    "mismatch_of",
    "objective_of",
    "token_logps",
    "value_loss",
    "weighted_sum",
    "zero_variance",
]
