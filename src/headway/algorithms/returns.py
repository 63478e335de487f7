"""What follows an action: discounted rewards, generalised advantages, and the loss of the critic that predicts them.

Rows are sequences of trained actions without gaps (`packing.Rows`), zeros behind their end; what the environment said
in between is no action and discounts nothing. The value behind the last action is 0: an episode cut off by a limit is
taken for one that ended.

Legend: S rows, T columns, N packed actions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reward_to_go(reward_ST: Tensor, gamma: float) -> Tensor:
    """Σ_k γᵏ r_{t+k}."""
    if gamma == 1.0:
        return reward_ST.flip(1).cumsum(1).flip(1)
    return_ST = reward_ST.clone()
    for t in range(reward_ST.shape[1] - 2, -1, -1):
        return_ST[:, t] += gamma * return_ST[:, t + 1]
    return return_ST


def generalised_advantages(reward_ST: Tensor, value_ST: Tensor, *, gamma: float, lambd: float) -> Tensor:
    """A_t = Σ_k (γλ)ᵏ δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t."""
    following_ST = torch.cat([value_ST[:, 1:], value_ST.new_zeros(value_ST.shape[0], 1)], dim=1)
    delta_ST = reward_ST + gamma * following_ST[:, : value_ST.shape[1]] - value_ST
    return reward_to_go(delta_ST, gamma * lambd)


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, clip: float | None = None) -> Tensor:
    """½·max((V − R)², (clip(V, V_old ± c) − R)²) per action; without a clip ½(V − R)²."""
    error_N = (value_N - return_N).square()
    if clip is not None:
        near_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return 0.5 * error_N
