"""Normalised rewards, discounted returns and generalised advantages, and the loss of the critic that predicts them.

Rewards are normalised over sets of samples: the groups, or the whole batch. Statistics are computed in float64. A set
whose values are all equal is centred to exactly 0 and never divided by its vanishing spread (in float32 a mean that is
one bit off, divided by 1e-6, would be an advantage of a percent). The standard deviation is that of the set itself
(divided by n), as in `headway.rewards.base`, unless the caller asks for n − 1. Members that are not kept are in no
statistic and come out as 0.

Returns work on rows: sequences of trained actions without gaps (`packed_sequences.RowLayout`) with zeros behind their
end. Tokens of the environment are no actions and discount nothing. The value behind the last action is 0, so an episode
that a limit cut off is treated as one that ended.

Legend: S samples or rows, G sets (groups), N packed actions, T columns.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import RowLayout, sum_by_sequence

NormType = Literal["group", "batch", "domain", "none"]

STD_EPSILON = 1e-6
"""Added to the standard deviation of rewards."""
TINY_WEIGHT = 1e-8
"""Added to the sum of the weights of a baseline."""
WHITEN_EPSILON = 1e-8
"""Added to the variance of advantages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRewards:
    """The turns of agentic samples; those of one sample are in the order of time."""

    step_N: Tensor
    """The turn that each action belongs to."""
    sample_K: Tensor
    """The sample that each turn belongs to."""
    reward_K: Tensor
    """Reward of each turn. A score of the whole episode is added to the last turn."""
    state_K: Tensor | None = None
    """Number of the observation of each turn: equal within a group exactly where observations are. For `gigpo`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStatistics:
    """Mean and standard deviation of each set, over the members that are kept."""

    count_G: Tensor
    mean_G: Tensor
    std_G: Tensor
    """Exactly 0 where all kept members are equal, or there is at most one."""

    @property
    def unbiased_std_G(self) -> Tensor:  # noqa: N802
        """Return the standard deviation with n − 1 instead of n below the squares."""
        return self.std_G * (self.count_G.double() / (self.count_G - 1).clamp(min=1)).sqrt()


def compute_group_statistics(x_S: Tensor, keep_S: Tensor, set_S: Tensor, sets: int) -> GroupStatistics:
    """Compute the statistics of `sets` sets; `set_S` says which set a member is in."""
    kept_x, kept_set = x_S[keep_S].double(), set_S[keep_S]
    count_G = torch.bincount(kept_set, minlength=sets)
    mean_G = sum_by_sequence(kept_x, kept_set, sets) / count_G.clamp(min=1)
    low_G = mean_G.new_full((sets,), torch.inf).scatter_reduce(0, kept_set, kept_x, "amin")
    high_G = mean_G.new_full((sets,), -torch.inf).scatter_reduce(0, kept_set, kept_x, "amax")
    mean_G = torch.where(low_G == high_G, low_G, mean_G)
    variance_G = sum_by_sequence((kept_x - mean_G[kept_set]).square(), kept_set, sets) / count_G.clamp(min=1)
    return GroupStatistics(count_G=count_G, mean_G=mean_G, std_G=variance_G.sqrt())


def normalise_rewards(
    x_S: Tensor,
    keep_S: Tensor,
    group_S: Tensor,
    groups: int,
    *,
    mean_type: NormType,
    std_type: NormType,
    domain_S: Tensor | None = None,
    unbiased: bool = False,
    epsilon: float = STD_EPSILON,
) -> Tensor:
    """Return (x − mean)/(std + ε), each over the group, the domain, the batch or not at all; [S] in float64.

    `unbiased` divides the squares by n − 1 instead of n.
    """
    wide_S = x_S.double()
    one_S = torch.zeros_like(group_S)
    sets: dict[NormType, tuple[Tensor, int]] = {"group": (group_S, groups), "batch": (one_S, 1), "domain": (one_S, 1)}
    if domain_S is not None and domain_S.numel():
        sets["domain"] = domain_S, int(domain_S.max()) + 1
    if mean_type != "none":
        set_S, count = sets[mean_type]
        wide_S = wide_S - compute_group_statistics(x_S, keep_S, set_S, count).mean_G[set_S]
    if std_type != "none":
        set_S, count = sets[std_type]
        statistics = compute_group_statistics(x_S, keep_S, set_S, count)
        std_S = (statistics.unbiased_std_G if unbiased else statistics.std_G)[set_S]
        wide_S = torch.where(std_S > 0, wide_S / (std_S + epsilon), wide_S)
    return torch.where(keep_S, wide_S, torch.zeros_like(wide_S))


def leave_one_out(x_S: Tensor, keep_S: Tensor, group_S: Tensor, groups: int) -> Tensor:
    """Return x − mean of the other kept members of the group, [S] in float64; 0 where there are none."""
    statistics = compute_group_statistics(x_S, keep_S, group_S, groups)
    count_S = statistics.count_G[group_S]
    # n/(n−1)·(x − mean) equals x − mean of the others, and is exactly 0 where all members are equal.
    scaled_S = (x_S.double() - statistics.mean_G[group_S]) * count_S / (count_S - 1).clamp(min=1)
    return torch.where(keep_S & (count_S > 1), scaled_S, torch.zeros_like(scaled_S))


def compute_question_values(logp_S: Tensor, right_S: Tensor, keep_S: Tensor, group_S: Tensor, groups: int) -> Tensor:
    """Return c·(1 − 4(d − ½)²) of each group: c = exp(mean of `logp_S`), and d is the share of wrong answers."""
    confidence_G = compute_group_statistics(logp_S, keep_S, group_S, groups).mean_G.exp()
    wrong_G = 1 - compute_group_statistics(right_S, keep_S, group_S, groups).mean_G
    return confidence_G * (1 - 4 * (wrong_G - 0.5).square())


def whiten_over_actions(
    advantage_N: Tensor, mask_N: Tensor, domain_N: Tensor | None = None, epsilon: float = WHITEN_EPSILON
) -> Tensor:
    """Return (A − mean)/√(var + ε) over the masked actions of the batch, or of each of its domains; 0 elsewhere."""
    if domain_N is not None:
        masks = [mask_N & (domain_N == domain) for domain in torch.unique(domain_N)]
        return sum((whiten_over_actions(advantage_N, one_N) for one_N in masks), torch.zeros_like(advantage_N))
    masked = advantage_N[mask_N].double()
    white_N = torch.zeros_like(advantage_N)
    if masked.numel():
        white = (masked - masked.mean()) / (masked.var(correction=0) + epsilon).sqrt()
        white_N[mask_N] = white.to(white_N.dtype)
    return white_N


def compute_reward_to_go(reward_ST: Tensor, gamma: float) -> Tensor:
    """Return Σ_k γᵏ r_{t+k}."""
    if gamma == 1.0:
        return reward_ST.flip(1).cumsum(1).flip(1)
    return_ST = reward_ST.clone()
    for t in range(reward_ST.shape[1] - 2, -1, -1):
        return_ST[:, t] += gamma * return_ST[:, t + 1]
    return return_ST


def compute_step_returns(steps: TurnRewards, gamma: float) -> Tensor:
    """Return the discounted return of each step within its sample, [K] in float64."""
    samples = int(steps.sample_K.max()) + 1 if steps.sample_K.numel() else 0
    rows = RowLayout.of(torch.ones_like(steps.sample_K, dtype=torch.bool), steps.sample_K, samples)
    return rows.to_packed(compute_reward_to_go(rows.to_rows(steps.reward_K.double()), gamma))


def compute_gae(reward_ST: Tensor, value_ST: Tensor, *, gamma: float, lambd: float) -> Tensor:
    """Return A_t = Σ_k (γλ)ᵏ δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t."""
    following_ST = torch.cat([value_ST[:, 1:], value_ST.new_zeros(value_ST.shape[0], 1)], dim=1)
    delta_ST = reward_ST + gamma * following_ST[:, : value_ST.shape[1]] - value_ST
    return compute_reward_to_go(delta_ST, gamma * lambd)


def compute_value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, clip: float | None = None) -> Tensor:
    """Return ½·max((V − R)², (clip(V, V_old ± c) − R)²) per action; without a clip ½(V − R)²."""
    error_N = (value_N - return_N).square()
    if clip is not None:
        near_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return 0.5 * error_N
