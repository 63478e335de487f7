"""Advantages (`adv_estimator`): from rewards of samples to one number per trained action.

Always in this order: sample masks → reward normalisation → reward clip → (token KL) → estimator → whitening over
trained actions → advantage clip. Call it once with the whole batch: groups, baselines and whitening need it all.

Rewards of samples sit on their last trained action. A token penalty −coef·KL sits on each action and counts, as
every reward does, for the actions before it. `grpo`, `rloo` and the step estimators do not discount inside a sample
or step; without a token penalty that is a broadcast.

Guarantees: float64 inside, 0 where the mask is off, no NaN for groups of one or empty samples. Does not drop
zero-variance groups: `normalise_rewards.zero_variance` finds them, and here their advantage is exactly 0.

Legend: N packed actions, S samples, K steps (turns) of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.actions import require_input
from headway.algorithms.kl import KlEstimator, estimate_kl
from headway.algorithms.packed_sequences import RowLayout, sequence_means, sequence_sums
from headway.algorithms.returns import (
    NormType,
    compute_gae,
    compute_reward_to_go,
    leave_one_out,
    normalise_rewards,
    whiten_over_actions,
)
from headway.config import ResolvedConfig
from headway.errors import ConfigError, InvariantBroken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRewards:
    """The turns of agentic samples; those of one sample in the order of time."""

    step_N: Tensor
    """Which turn each action belongs to."""
    sample_K: Tensor
    """Which sample each turn belongs to."""
    reward_K: Tensor
    """Reward of each turn; whoever scores whole episodes adds that to the last one."""
    state_K: Tensor | None = None
    """Numbers of what each turn saw: equal observations of one group have equal numbers, others different ones.
    For `gigpo`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardBatch:
    """Everything an estimator may read, of the whole batch."""

    reward_S: Tensor
    group_S: Tensor
    """Numbers below `groups`."""
    groups: int
    mask_N: Tensor
    """Actions that are trained."""
    sequence_N: Tensor
    """Which sample each action belongs to."""
    keep_S: Tensor | None = None
    """Sample mask: the others are trained by nothing and in no statistic. None: all are kept."""
    logp_N: Tensor | None = None
    """Of the policy that the token penalty is about (behaviour or proximal)."""
    reference_N: Tensor | None = None
    """ℓ_ref, for the token penalty."""
    value_N: Tensor | None = None
    """The critic's values, for `gae`."""
    steps: TurnRewards | None = None
    """For `step_reinforce` and `gigpo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How advantages are made; names are those of the configuration."""

    adv_estimator: str = "grpo"
    norm_mean_type: NormType = "group"
    norm_std_type: NormType = "group"
    gamma: float = 1.0
    lambd: float = 0.95
    step_reward_gamma: float = 0.95
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    reward_clip: float | None = None
    whiten_advantages: bool = False
    advantage_clip: float | None = None
    kl_penalty: KlEstimator | None = None
    """Estimator of the token penalty; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """What the estimator gives to the trainer."""

    advantage_N: Tensor
    mask_N: Tensor
    """`RewardBatch.mask_N` without samples that are not kept: count `BatchTotals` over this one."""
    return_N: Tensor | None
    """What the critic should have said; `gae` only."""
    kl: float
    """Token penalty before its coefficient, per action, averaged over samples: for the controller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimatorInputs:
    """A batch after its sample masks, with the penalty of each action."""

    batch: RewardBatch
    params: AdvantageSettings
    mask_N: Tensor
    keep_S: Tensor
    penalty_N: Tensor

    def normalised(self, x: Tensor, keep: Tensor, group: Tensor, groups: int) -> Tensor:
        """Normalised and clipped, by the configured norms."""
        p = self.params
        norm = normalise_rewards(x, keep, group, groups, mean_type=p.norm_mean_type, std_type=p.norm_std_type)
        return self.clipped(norm)

    def clipped(self, x: Tensor) -> Tensor:
        """Inside ± `reward_clip`."""
        limit = self.params.reward_clip
        return x if limit is None else x.clamp(-limit, limit)

    def normalised_rewards(self) -> Tensor:
        """Rewards of samples, normalised and clipped, [S]."""
        b = self.batch
        return self.normalised(b.reward_S, self.keep_S, b.group_S, b.groups)

    def rows(self) -> RowLayout:
        """Trained actions of each sample."""
        return RowLayout.of(self.mask_N, self.batch.sequence_N, self.batch.reward_S.shape[0])

    def token_rewards(self, reward_U: Tensor, rows: RowLayout) -> Tensor:
        """`reward_U` on the last action of each row, less the penalty of every action, as rows."""
        return rows.spread(rows.at_end(reward_U) - self.penalty_N)


_Estimate = tuple[Tensor, Tensor | None]
"""Advantages, and returns where there is a critic; [N]."""


def _to_go(work: EstimatorInputs, gamma: float) -> _Estimate:
    rows = work.rows()
    return rows.gather(compute_reward_to_go(work.token_rewards(work.normalised_rewards(), rows), gamma)), None


def _grpo(work: EstimatorInputs) -> _Estimate:
    return _to_go(work, 1.0)


def _reinforce(work: EstimatorInputs) -> _Estimate:
    return _to_go(work, work.params.gamma)


def _rloo(work: EstimatorInputs) -> _Estimate:
    """The penalty is part of what members are compared by, as R − coef·Σ KL."""
    b = work.batch
    total_S = work.normalised_rewards() - sequence_sums(work.penalty_N, b.sequence_N, b.reward_S.shape[0])
    return leave_one_out(total_S, work.keep_S, b.group_S, b.groups)[b.sequence_N], None


def _gae(work: EstimatorInputs) -> _Estimate:
    value_N = require_input(work.batch.value_N, "value_N", "gae").double()
    rows, p = work.rows(), work.params
    reward_ST, value_ST = work.token_rewards(work.normalised_rewards(), rows), rows.spread(value_N)
    advantage_N = rows.gather(compute_gae(reward_ST, value_ST, gamma=p.gamma, lambd=p.lambd))
    return advantage_N, torch.where(work.mask_N, advantage_N + value_N, torch.zeros_like(value_N))


def _step_reinforce(work: EstimatorInputs) -> _Estimate:
    steps, b = _steps_of(work), work.batch
    return_K, keep_K = compute_step_returns(steps, work.params.step_reward_gamma), work.keep_S[steps.sample_K]
    return _over_steps(work, steps, work.normalised(return_K, keep_K, b.group_S[steps.sample_K], b.groups))


def _gigpo(work: EstimatorInputs) -> _Estimate:
    steps, p = _steps_of(work), work.params
    if steps.state_K is None:
        raise InvariantBroken("gigpo reads steps.state_K, and the trainer gave none")
    return_K, keep_K = compute_step_returns(steps, p.step_reward_gamma), work.keep_S[steps.sample_K]
    states = int(steps.state_K.max()) + 1 if steps.state_K.numel() else 0
    std_type: NormType = "none" if p.norm_std_type == "none" else "group"
    norm_K = normalise_rewards(return_K, keep_K, steps.state_K, states, mean_type="group", std_type=std_type)
    episode_K = work.normalised_rewards()[steps.sample_K]
    score_K = p.episode_reward_weight * episode_K + p.step_reward_weight * work.clipped(norm_K)
    return _over_steps(work, steps, score_K)


def _steps_of(work: EstimatorInputs) -> TurnRewards:
    if work.batch.steps is None:
        raise InvariantBroken(f"{work.params.adv_estimator} reads steps, and the trainer gave none")
    return work.batch.steps


def _over_steps(work: EstimatorInputs, steps: TurnRewards, score_K: Tensor) -> _Estimate:
    """Each step's score on its actions; a token penalty counts inside its step."""
    rows = RowLayout.of(work.mask_N, steps.step_N, score_K.shape[0])
    return rows.gather(compute_reward_to_go(work.token_rewards(score_K, rows), 1.0)), None


def compute_step_returns(steps: TurnRewards, gamma: float) -> Tensor:
    """Discounted return of each step of its sample, [K] in float64."""
    samples = int(steps.sample_K.max()) + 1 if steps.sample_K.numel() else 0
    rows = RowLayout.of(torch.ones_like(steps.sample_K, dtype=torch.bool), steps.sample_K, samples)
    return rows.gather(compute_reward_to_go(rows.spread(steps.reward_K.double()), gamma))


ESTIMATORS: Mapping[str, Callable[[EstimatorInputs], _Estimate]] = {
    "grpo": _grpo,
    "reinforce": _reinforce,
    "reinforce_plus_plus": _reinforce,
    "rloo": _rloo,
    "gae": _gae,
    "step_reinforce": _step_reinforce,
    "gigpo": _gigpo,
}
"""Every `adv_estimator` there is. `reinforce_plus_plus` is `reinforce` whose norms the configuration sets to batch."""


def estimate_advantages(batch: RewardBatch, params: AdvantageSettings, *, kl_coef: float = 0.0) -> Advantages:
    """The whole order of the module's docstring. `kl_coef` is what the controller says now."""
    if params.adv_estimator not in ESTIMATORS:
        hint = f"one of {', '.join(ESTIMATORS)}"
        raise ConfigError("no such estimator", key="adv_estimator", value=params.adv_estimator, hint=hint)
    work, kl = _prepare(batch, params, kl_coef)
    advantage_N, return_N = ESTIMATORS[params.adv_estimator](work)
    advantage_N = torch.where(work.mask_N, advantage_N, torch.zeros_like(advantage_N))
    if params.whiten_advantages:
        advantage_N = whiten_over_actions(advantage_N, work.mask_N)
    if params.advantage_clip is not None:
        advantage_N = advantage_N.clamp(-params.advantage_clip, params.advantage_clip)
    dtype = torch.promote_types(batch.reward_S.dtype, torch.float32)
    returns = None if return_N is None else return_N.to(dtype)
    return Advantages(advantage_N=advantage_N.to(dtype), mask_N=work.mask_N, return_N=returns, kl=kl)


def _prepare(batch: RewardBatch, params: AdvantageSettings, kl_coef: float) -> tuple[EstimatorInputs, float]:
    """Sample masks, and the KL of every trained action."""
    keep_S = torch.ones_like(batch.group_S, dtype=torch.bool) if batch.keep_S is None else batch.keep_S.bool()
    mask_N = batch.mask_N.bool() & keep_S[batch.sequence_N]
    kl_N, kl = torch.zeros(mask_N.shape, dtype=torch.float64, device=mask_N.device), 0.0
    if params.kl_penalty is not None:
        logp_N = require_input(batch.logp_N, "logp_N", "add_token_level_kl").detach().double()
        reference_N = require_input(batch.reference_N, "reference_N", "add_token_level_kl").detach().double()
        kl_N = torch.where(mask_N, estimate_kl(params.kl_penalty, logp_N, reference_N), kl_N)
        samples = batch.reward_S.shape[0]
        trained_S = sequence_sums(mask_N.long(), batch.sequence_N, samples) > 0
        mean_S = sequence_means(kl_N, mask_N, batch.sequence_N, samples)
        kl = float(mean_S.sum() / trained_S.sum().clamp(min=1))
    return EstimatorInputs(batch=batch, params=params, mask_N=mask_N, keep_S=keep_S, penalty_N=kl_coef * kl_N), kl


def make_advantage_settings(resolved: ResolvedConfig) -> AdvantageSettings:
    """From a configuration."""
    config, derived = resolved.config, resolved.derived
    return AdvantageSettings(
        adv_estimator=config.adv_estimator,
        norm_mean_type=derived.norm_mean_type,
        norm_std_type=derived.norm_std_type,
        gamma=config.gamma,
        lambd=config.lambd,
        step_reward_gamma=config.step_reward_gamma,
        episode_reward_weight=config.episode_reward_weight,
        step_reward_weight=config.step_reward_weight,
        reward_clip=config.reward_clip,
        whiten_advantages=config.whiten_advantages,
        advantage_clip=config.advantage_clip,
        kl_penalty=config.kl_penalty if config.add_token_level_kl else None,
    )
