"""Importance ratios: exp of a difference of log-probabilities, per action or per sequence.

Guarantees: never infinite and never NaN for finite or −inf log-probabilities. The log-ratio is clamped to
±`MAX_LOG_RATIO` before the exponential (e²⁰ ≈ 5e8, far outside every clip range); beyond the clamp the gradient
through the ratio is 0, since such an action says nothing about the policy that is trained. The base is a constant.

Legend: N packed actions, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.packing import sequence_means, sequence_sums

MAX_LOG_RATIO = 20.0
"""Largest |log ratio| that an exponential is taken of."""

Level = Literal["token", "sequence", "geometric"]
"""Per action; per sequence as a product; per sequence as a geometric mean."""


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` where its exponential is harmless."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(logp_N: Tensor, base_N: Tensor) -> Tensor:
    """exp(ℓ − ℓ_base) per action."""
    return bounded(logp_N - base_N.detach()).exp()


def ratio_at(
    level: Level, logp_N: Tensor, base_N: Tensor, mask_N: Tensor, sequence_N: Tensor, sequences: int
) -> Tensor:
    """exp(ℓ − ℓ_base) at `level`, one number per action; actions of a sequence share theirs.

    The levels of sequences look at masked actions only and want whole sequences.
    """
    log_ratio_N = logp_N - base_N.detach()
    if level == "token":
        return bounded(log_ratio_N).exp()
    if level == "geometric":
        log_ratio_S = sequence_means(log_ratio_N, mask_N, sequence_N, sequences)
    else:
        masked_N = torch.where(mask_N, log_ratio_N, torch.zeros_like(log_ratio_N))
        log_ratio_S = sequence_sums(masked_N, sequence_N, sequences)
    return bounded(log_ratio_S).exp()[sequence_N]
