"""Advantage estimators: plain functions, registered under the values of `adv_estimator`.

    def my_estimator(inputs: EstimatorInputs) -> Tensor | Estimate

An estimator gets the rewards and groups of the whole batch, with its settings, and returns one advantage per action,
[N]; an `Estimate` has returns for a critic too. Facts that the configuration asks about (does it need a critic, does it
compare the members of a group?) are `algorithm_traits.AdvantageTraits`, stored under the same name.

`estimate_advantages` always works in this order: sample masks, reward normalisation, reward clip, token KL penalty,
estimator, whitening over trained actions, advantage clip. Call it once with the whole batch, because groups, baselines
and whitening need all of it. The reward of a sample sits on its last trained action. A token penalty −coef·KL sits on
each action and counts, as every reward does, for the actions before it. `grpo`, `rloo` and the step estimators do not
discount inside a sample or step, which is a broadcast where there is no token penalty.

Guarantees: float64 inside, 0 where the mask is off, no NaN for groups of one or empty samples. The advantage of a
group whose rewards are all equal is exactly 0 wherever it is centred on the group.

Legend: N packed actions, S samples, K steps (turns) of all samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from headway.algorithm_traits import ADVANTAGE_TRAITS
from headway.algorithms.actions import require_input
from headway.algorithms.kl import KlEstimator, estimate_kl
from headway.algorithms.packed_sequences import RowLayout, count_by_sequence, mean_by_sequence, sum_by_sequence
from headway.algorithms.returns import (
    STD_EPSILON,
    TINY_WEIGHT,
    NormType,
    TurnRewards,
    compute_gae,
    compute_group_statistics,
    compute_question_values,
    compute_reward_to_go,
    compute_step_returns,
    leave_one_out,
    normalise_rewards,
    whiten_over_actions,
)
from headway.config import ResolvedConfig
from headway.errors import InvariantBroken
from headway.registry import ADVANTAGE_ESTIMATORS
from headway.user_code import raise_plugin_error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardBatch:
    """Everything that an estimator may read, of the whole batch."""

    reward_S: Tensor
    group_S: Tensor
    """The group that each sample belongs to: a number below `groups`."""
    groups: int
    mask_N: Tensor
    """Actions that are trained."""
    sequence_N: Tensor
    """The sample that each action belongs to."""
    keep_S: Tensor | None = None
    """Sample mask: the other samples are not trained and are in no statistic. None keeps all samples."""
    logp_N: Tensor | None = None
    """Log-probabilities of the policy that the token penalty is about (behaviour or proximal)."""
    reference_N: Tensor | None = None
    """ℓ_ref, for the token penalty."""
    value_N: Tensor | None = None
    """Values of the critic, for `gae`."""
    steps: TurnRewards | None = None
    """Turns, for `step_reinforce` and `gigpo`."""
    greedy_S: Tensor | None = None
    """Samples whose answers are greedy, for `remax`."""
    domain_S: Tensor | None = None
    """Number of the domain of each sample; None: all have the same."""
    part_PS: Tensor | None = None
    """The parts of each reward that `gdpo_parts` names, in their order. For `gdpo`."""
    correct_S: Tensor | None = None
    """Samples whose answers are right, for `codapo`."""
    behaviour_N: Tensor | None = None
    """ℓ_b, for `codapo`."""
    gradient_norm_N: Tensor | None = None
    """‖onehot − π‖² of each action under the weights at the start of the step, for `optimal_token_baseline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How advantages are made; the names are those of the configuration."""

    adv_estimator: str = "grpo"
    norm_mean_type: NormType = "group"
    norm_std_type: NormType = "group"
    gamma: float = 1.0
    lambd: float = 0.95
    step_reward_gamma: float = 0.95
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    reward_clip: float | None = None
    unbiased_std: bool = False
    gdpo_parts: Mapping[str, float] = field(default_factory=dict)
    codapo_weight_offset: float = 0.1
    accuracy_key: str | None = None
    normalized_bounds: tuple[float, float] = (-inf, inf)
    whiten_advantages: bool = False
    whiten_by_domain: bool = False
    advantage_clip: float | None = None
    kl_penalty: KlEstimator | None = None
    """KL estimator of the token penalty; None turns the penalty off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """The result of `estimate_advantages`."""

    advantage_N: Tensor
    mask_N: Tensor
    """`RewardBatch.mask_N` without samples that are not kept. Count `BatchTotals` over this mask."""
    return_N: Tensor | None
    """Target of the critic; `gae` only."""
    kl: float
    """Token penalty before its coefficient, per action, averaged over samples. Input of the KL controller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """What an estimator returns where there is a critic; both are [N]."""

    advantage_N: Tensor
    return_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimatorInputs:
    """A batch after its sample masks, with the token penalty of each action."""

    batch: RewardBatch
    settings: AdvantageSettings
    mask_N: Tensor
    keep_S: Tensor
    penalty_N: Tensor
    """coef · KL of each action; 0 without a token penalty."""

    def normalise(self, x: Tensor, keep: Tensor, group: Tensor, groups: int, domain: Tensor | None) -> Tensor:
        """Normalise `x` by the configured norms and clip it."""
        mean, std, unbiased = self.settings.norm_mean_type, self.settings.norm_std_type, self.settings.unbiased_std
        found = normalise_rewards(
            x, keep, group, groups, mean_type=mean, std_type=std, domain_S=domain, unbiased=unbiased
        )
        return self.clip(torch.where(keep, found.clamp(*self.settings.normalized_bounds), found))

    def clip(self, x: Tensor) -> Tensor:
        """Clip `x` to ± `reward_clip`."""
        limit = self.settings.reward_clip
        return x if limit is None else x.clamp(-limit, limit)

    def normalised_rewards(self) -> Tensor:
        """Return the rewards of samples, normalised and clipped, [S]."""
        batch = self.batch
        return self.normalise(batch.reward_S, self.keep_S, batch.group_S, batch.groups, batch.domain_S)

    def sample_rows(self) -> RowLayout:
        """Return the layout with one row for the trained actions of each sample."""
        return RowLayout.of(self.mask_N, self.batch.sequence_N, self.batch.reward_S.shape[0])

    def token_rewards(self, reward_U: Tensor, rows: RowLayout) -> Tensor:
        """Return, as rows, `reward_U` on the last action of each row less the penalty of every action."""
        return rows.to_rows(rows.place_at_end(reward_U) - self.penalty_N)


EstimatorFunction = Callable[[EstimatorInputs], Tensor | Estimate]


def _discounted_rewards(inputs: EstimatorInputs, gamma: float) -> Tensor:
    rows = inputs.sample_rows()
    return rows.to_packed(compute_reward_to_go(inputs.token_rewards(inputs.normalised_rewards(), rows), gamma))


def grpo(inputs: EstimatorInputs) -> Tensor:
    """Return the normalised reward of the sample on each of its actions."""
    return _discounted_rewards(inputs, 1.0)


def codapo(inputs: EstimatorInputs) -> Tensor:
    """Return the advantages of `grpo` times the value of their question, which is largest where half is right."""
    b, right_S = inputs.batch, require_input(inputs.batch.correct_S, "correct_S", "codapo")
    logp_N = require_input(b.behaviour_N, "behaviour_N", "codapo").double()
    logp_S = mean_by_sequence(logp_N, inputs.mask_N, b.sequence_N, b.reward_S.shape[0])
    value_G = compute_question_values(logp_S, right_S, inputs.keep_S, b.group_S, b.groups)
    return grpo(inputs) * (value_G + inputs.settings.codapo_weight_offset)[b.group_S][b.sequence_N]


def reinforce(inputs: EstimatorInputs) -> Tensor:
    """Return the reward-to-go discounted by `gamma`."""
    return _discounted_rewards(inputs, inputs.settings.gamma)


def rloo(inputs: EstimatorInputs) -> Tensor:
    """Return the reward less the mean of the other members; the penalty is part of the reward, as R − coef·Σ KL."""
    b = inputs.batch
    total_S = inputs.normalised_rewards() - sum_by_sequence(inputs.penalty_N, b.sequence_N, b.reward_S.shape[0])
    return leave_one_out(total_S, inputs.keep_S, b.group_S, b.groups)[b.sequence_N]


def remax(inputs: EstimatorInputs) -> Tensor:
    """Return the reward-to-go less the reward of the group's greedy answer."""
    b = inputs.batch
    greedy_S = require_input(b.greedy_S, "greedy_S", "remax") & inputs.keep_S
    baseline_G = compute_group_statistics(b.reward_S, greedy_S, b.group_S, b.groups).mean_G
    return _discounted_rewards(inputs, 1.0) - baseline_G[b.group_S][b.sequence_N]


def opo(inputs: EstimatorInputs) -> Tensor:
    """Return the reward less the group's mean reward, in which long answers count more: the optimal baseline."""
    b = inputs.batch
    length_S = count_by_sequence(inputs.mask_N, b.sequence_N, b.reward_S.shape[0]) * inputs.keep_S
    total_S = inputs.normalised_rewards() - sum_by_sequence(inputs.penalty_N, b.sequence_N, b.reward_S.shape[0])
    sums_G = (sum_by_sequence(x, b.group_S, b.groups) for x in (total_S * length_S, length_S.double()))
    weighted_G, length_G = sums_G
    return (total_S - (weighted_G / length_G.clamp(min=1))[b.group_S])[b.sequence_N]


def gpg(inputs: EstimatorInputs) -> Tensor:
    """Return the reward less the group's mean, times the samples of the batch over those with a reward."""
    b = inputs.batch
    total_S = inputs.normalised_rewards() - sum_by_sequence(inputs.penalty_N, b.sequence_N, b.reward_S.shape[0])
    scale = inputs.keep_S.sum() / ((total_S != 0) & inputs.keep_S).sum().clamp(min=1)
    mean_G = compute_group_statistics(total_S, inputs.keep_S, b.group_S, b.groups).mean_G
    return (scale * (total_S - mean_G[b.group_S]))[b.sequence_N]


def grpo_passk(inputs: EstimatorInputs) -> Tensor:
    """Return, on the best member of a group alone, its lead over the second best, divided by the group's spread."""
    b, found_S = inputs.batch, torch.zeros_like(inputs.batch.reward_S, dtype=torch.float64)
    total_S = b.reward_S.double() - sum_by_sequence(inputs.penalty_N, b.sequence_N, b.reward_S.shape[0])
    order_S = total_S.argsort(descending=True, stable=True)
    rows = RowLayout.of(inputs.keep_S[order_S], b.group_S[order_S], b.groups)
    ranked_GT = rows.to_rows(total_S[order_S])
    if ranked_GT.shape[1] > 1:
        lead_G = torch.where(rows.length_S > 1, ranked_GT[:, 0] - ranked_GT[:, 1], 0.0)
        statistics = compute_group_statistics(total_S, inputs.keep_S, b.group_S, b.groups)
        if inputs.settings.norm_std_type != "none":
            std_G = statistics.unbiased_std_G if inputs.settings.unbiased_std else statistics.std_G
            lead_G = torch.where(std_G > 0, lead_G / (std_G + STD_EPSILON), lead_G)
        best_M = rows.column_M == 0
        found_S[order_S[rows.position_M[best_M]]] = lead_G[rows.row_M[best_M]]
    return found_S[b.sequence_N]


def gdpo(inputs: EstimatorInputs) -> Tensor:
    """Return the sum of the reward's parts, each normalised by itself, and whiten it over the batch."""
    b, parts = inputs.batch, inputs.settings.gdpo_parts or {"reward": 1.0}
    part_PS = b.reward_S[None] if b.part_PS is None else b.part_PS
    scores = (inputs.normalise(part_S, inputs.keep_S, b.group_S, b.groups, b.domain_S) for part_S in part_PS)
    total_S = sum(weight * score_S for weight, score_S in zip(parts.values(), scores, strict=True))
    rows = inputs.sample_rows()
    advantage_ST = compute_reward_to_go(inputs.token_rewards(torch.as_tensor(total_S), rows), 1.0)
    return whiten_over_actions(rows.to_packed(advantage_ST), inputs.mask_N)


def optimal_token_baseline(inputs: EstimatorInputs) -> Tensor:
    """Return the reward-to-go less its mean over the members at the same place, weighted by Σ ‖onehot − π‖² so far.

    Where one member alone has come so far, nothing is subtracted.
    """
    norm_N = require_input(inputs.batch.gradient_norm_N, "gradient_norm_N", "optimal_token_baseline").double()
    group_S, groups, rows = inputs.batch.group_S, inputs.batch.groups, inputs.sample_rows()
    inside_ST = rows.to_rows(torch.ones_like(norm_N))
    return_ST = compute_reward_to_go(inputs.token_rewards(inputs.normalised_rewards(), rows), 1.0)
    weight_ST = rows.to_rows(norm_N).cumsum(1) * inside_ST

    def add_members(x_ST: Tensor) -> Tensor:
        return x_ST.new_zeros(groups, x_ST.shape[1]).index_add(0, group_S, x_ST)

    mean_GT = add_members(return_ST * weight_ST) / (add_members(weight_ST) + TINY_WEIGHT)
    baseline_GT = torch.where(add_members(inside_ST) > 1, mean_GT, 0.0)
    return rows.to_packed(return_ST - baseline_GT[group_S])


def gae(inputs: EstimatorInputs) -> Estimate:
    """Return generalised advantages and the returns that the critic should predict."""
    value_N = require_input(inputs.batch.value_N, "value_N", "gae").double()
    rows, settings = inputs.sample_rows(), inputs.settings
    reward_ST, value_ST = inputs.token_rewards(inputs.normalised_rewards(), rows), rows.to_rows(value_N)
    advantage_N = rows.to_packed(compute_gae(reward_ST, value_ST, gamma=settings.gamma, lambd=settings.lambd))
    return_N = torch.where(inputs.mask_N, advantage_N + value_N, torch.zeros_like(value_N))
    return Estimate(advantage_N=advantage_N, return_N=return_N)


def step_reinforce(inputs: EstimatorInputs) -> Tensor:
    """Return the discounted return of the action's turn, normalised over turns."""
    steps, batch = _require_steps(inputs), inputs.batch
    return_K = compute_step_returns(steps, inputs.settings.step_reward_gamma)
    keep_K, group_K = inputs.keep_S[steps.sample_K], batch.group_S[steps.sample_K]
    domain_K = None if batch.domain_S is None else batch.domain_S[steps.sample_K]
    return _spread_over_steps(inputs, steps, inputs.normalise(return_K, keep_K, group_K, batch.groups, domain_K))


def gigpo(inputs: EstimatorInputs) -> Tensor:
    """Return the weighted sum of the episode's normalised reward and the turn's return among equal states."""
    steps, settings = _require_steps(inputs), inputs.settings
    if steps.state_K is None:
        raise InvariantBroken("gigpo reads steps.state_K, and the trainer gave none")
    return_K, keep_K = compute_step_returns(steps, settings.step_reward_gamma), inputs.keep_S[steps.sample_K]
    states = int(steps.state_K.max()) + 1 if steps.state_K.numel() else 0
    std_type: NormType = "none" if settings.norm_std_type == "none" else "group"
    norm_K = normalise_rewards(return_K, keep_K, steps.state_K, states, mean_type="group", std_type=std_type)
    episode_K = inputs.normalised_rewards()[steps.sample_K]
    score_K = settings.episode_reward_weight * episode_K + settings.step_reward_weight * inputs.clip(norm_K)
    return _spread_over_steps(inputs, steps, score_K)


def _require_steps(inputs: EstimatorInputs) -> TurnRewards:
    if inputs.batch.steps is None:
        raise InvariantBroken(f"{inputs.settings.adv_estimator} reads steps, and the trainer gave none")
    return inputs.batch.steps


def _spread_over_steps(inputs: EstimatorInputs, steps: TurnRewards, score_K: Tensor) -> Tensor:
    """Return each step's score on its actions; a token penalty counts inside its step."""
    rows = RowLayout.of(inputs.mask_N, steps.step_N, score_K.shape[0])
    return rows.to_packed(compute_reward_to_go(inputs.token_rewards(score_K, rows), 1.0))


for _function in (
    *(grpo, reinforce, rloo, remax, opo, gpg, gae, step_reinforce, gigpo),
    *(grpo_passk, gdpo, codapo, optimal_token_baseline),
):
    ADVANTAGE_ESTIMATORS.register(_function.__name__, _function)
# `reinforce_plus_plus` is `reinforce` whose norms the configuration sets to batch.
ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus", reinforce)


def estimate_advantages(batch: RewardBatch, settings: AdvantageSettings, *, kl_coef: float = 0.0) -> Advantages:
    """Apply every step that the module's docstring lists. `kl_coef` is the KL controller's current coefficient."""
    function: EstimatorFunction = ADVANTAGE_ESTIMATORS.get(settings.adv_estimator, key="adv_estimator")
    inputs, kl = _prepare_inputs(batch, settings, kl_coef)
    try:
        found = function(inputs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise_plugin_error("advantage estimator", settings.adv_estimator, function, error)
    estimate = Estimate(advantage_N=found) if isinstance(found, Tensor) else found
    advantage_N = torch.where(inputs.mask_N, estimate.advantage_N, torch.zeros_like(estimate.advantage_N))
    if settings.whiten_advantages:
        domain_S = batch.domain_S if settings.whiten_by_domain else None
        domain_N = None if domain_S is None else domain_S[batch.sequence_N]
        advantage_N = whiten_over_actions(advantage_N, inputs.mask_N, domain_N)
    if settings.advantage_clip is not None:
        advantage_N = advantage_N.clamp(-settings.advantage_clip, settings.advantage_clip)
    dtype = torch.promote_types(batch.reward_S.dtype, torch.float32)
    return_N = None if estimate.return_N is None else estimate.return_N.to(dtype)
    return Advantages(advantage_N=advantage_N.to(dtype), mask_N=inputs.mask_N, return_N=return_N, kl=kl)


def _prepare_inputs(batch: RewardBatch, settings: AdvantageSettings, kl_coef: float) -> tuple[EstimatorInputs, float]:
    """Return what estimators read, and the mean KL of a sample per action."""
    keep_S = torch.ones_like(batch.group_S, dtype=torch.bool) if batch.keep_S is None else batch.keep_S.bool()
    mask_N = batch.mask_N.bool() & keep_S[batch.sequence_N]
    kl_N, kl = torch.zeros(mask_N.shape, dtype=torch.float64, device=mask_N.device), 0.0
    if settings.kl_penalty is not None:
        logp_N = require_input(batch.logp_N, "logp_N", "add_token_level_kl").detach().double()
        reference_N = require_input(batch.reference_N, "reference_N", "add_token_level_kl").detach().double()
        kl_N = torch.where(mask_N, estimate_kl(settings.kl_penalty, logp_N, reference_N), kl_N)
        samples = batch.reward_S.shape[0]
        trained_S = count_by_sequence(mask_N, batch.sequence_N, samples) > 0
        mean_S = mean_by_sequence(kl_N, mask_N, batch.sequence_N, samples)
        kl = float(mean_S.sum() / trained_S.sum().clamp(min=1))
    inputs = EstimatorInputs(batch=batch, settings=settings, mask_N=mask_N, keep_S=keep_S, penalty_N=kl_coef * kl_N)
    return inputs, kl


def make_advantage_settings(resolved: ResolvedConfig) -> AdvantageSettings:
    """Read the settings from a configuration."""
    config, derived = resolved.config, resolved.derived
    traits = ADVANTAGE_TRAITS.get(config.adv_estimator, key="adv_estimator")
    low, high = config.normalized_reward_low, config.normalized_reward_high
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
        unbiased_std=config.unbiased_std,
        gdpo_parts=config.gdpo_parts,
        codapo_weight_offset=config.codapo_weight_offset,
        accuracy_key=config.codapo_accuracy_key if traits.reads_accuracy else None,
        normalized_bounds=(-inf if low is None else low, inf if high is None else high),
        whiten_advantages=config.whiten_advantages,
        whiten_by_domain=config.whiten_by_domain,
        advantage_clip=config.advantage_clip,
        kl_penalty=config.kl_penalty if config.add_token_level_kl else None,
    )
