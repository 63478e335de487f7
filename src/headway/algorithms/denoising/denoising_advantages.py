"""Group advantages of flow models: mean per prompt, spread over the batch, clamped.

The same numbers come out of `estimate_advantages` with `norm_mean_type: group`, `norm_std_type: batch` and
`advantage_clip: 5`; this is for callers that have samples and no packed actions.

Legend: S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.algorithms.returns import normalise_rewards

ADVANTAGE_CLAMP = 5.0
"""Advantages end here."""


def group_advantages(
    reward_S: Tensor, group_S: Tensor, groups: int, keep_S: Tensor | None = None, clamp: float = ADVANTAGE_CLAMP
) -> Tensor:
    """(R − mean of the group)/(std of the batch + ε) within ±`clamp`, [S] in float64; 0 for samples not kept."""
    keep_S = torch.ones_like(group_S, dtype=torch.bool) if keep_S is None else keep_S
    return normalise_rewards(reward_S, keep_S, group_S, groups, mean_type="group", std_type="batch").clamp(
        -clamp, clamp
    )
