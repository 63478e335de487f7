"""Estimators against their rules written out, the order of the steps, and the edges: groups of one, equal rewards."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import (
    AdvantageSettings,
    RewardBatch,
    estimate_advantages,
    make_advantage_settings,
)
from headway.algorithms.returns import TurnRewards
from headway.config import load_config
from headway.errors import ConfigError, InvariantBroken
from headway.registry import ADVANTAGE_ESTIMATORS
from headway.rewards.base import group_relative_advantages
from tests.algorithms.factory import bits, generator, reals, whole

REWARDS = (1.0, 0.0, 0.5, 3.0, 3.0, 7.0)
GROUPS = (0, 0, 0, 1, 1, 1)
LENGTHS = (2, 3, 1, 2, 2, 4)
CUTS = (2, 5, 6, 8, 10)


def batch(**changes: Any) -> RewardBatch:
    """Six samples of two groups, every action trained."""
    sequence = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    usual: dict[str, Any] = {
        "reward_S": reals(*REWARDS),
        "group_S": whole(*GROUPS),
        "groups": 2,
        "mask_N": torch.ones(14, dtype=torch.bool),
        "sequence_N": sequence,
    }
    return RewardBatch(**{**usual, **changes})


def made(name: str, given: RewardBatch | None = None, *, kl_coef: float = 0.0, **options: Any) -> Tensor:
    """Advantages with the norms the configuration derives."""
    return estimate_advantages(given or batch(), params(name, **options), kl_coef=kl_coef).advantage_N


def params(name: str, **options: Any) -> AdvantageSettings:
    usual = make_advantage_settings(load_config({"adv_estimator": name, "num_return_sequences_in_group": 3}))
    return AdvantageSettings(**{**{key: getattr(usual, key) for key in usual.__slots__}, **options})


def spread(values: list[float]) -> Tensor:
    """One number per sample, on each of its actions."""
    return reals(*values).repeat_interleave(torch.tensor(LENGTHS))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_grpo_is_the_group_relative_reward_on_every_action() -> None:
    close(made("grpo"), spread(group_relative_advantages(REWARDS[:3]) + group_relative_advantages(REWARDS[3:])))


def test_grpo_without_the_spread_is_only_centred() -> None:
    close(made("grpo", norm_std_type="none"), spread([0.5, -0.5, 0.0, -4 / 3, -4 / 3, 8 / 3]))


def test_mean_of_the_group_and_spread_of_the_batch() -> None:
    std = float(reals(*REWARDS).std(correction=0)) + 1e-6
    expected = [x / std for x in (0.5, -0.5, 0.0, -4 / 3, -4 / 3, 8 / 3)]
    close(made("grpo", norm_std_type="batch"), spread(expected))


def test_reinforce_discounts_the_reward_back_from_the_last_action() -> None:
    expected = [
        reward * 0.5**back
        for reward, length in zip(REWARDS, LENGTHS, strict=True)
        for back in range(length - 1, -1, -1)
    ]
    close(made("reinforce", gamma=0.5), reals(*expected))


def test_reinforce_plus_plus_normalises_over_the_batch() -> None:
    close(made("reinforce_plus_plus"), spread(group_relative_advantages(REWARDS)))


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = []
    for start in (0, 3):
        for index in range(start, start + 3):
            others = [REWARDS[other] for other in range(start, start + 3) if other != index]
            expected.append(REWARDS[index] - sum(others) / 2)
    close(made("rloo"), spread(expected))


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.8, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lambd: float) -> None:
    value = torch.randn(14, generator=generator(2), dtype=torch.float64)
    result = estimate_advantages(batch(value_N=value), params("gae", gamma=gamma, lambd=lambd))
    expected, start = [], 0
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        own = value[start : start + length].tolist()
        rewards = [0.0] * (length - 1) + [reward]
        delta = [rewards[t] + gamma * (own[t + 1] if t + 1 < length else 0.0) - own[t] for t in range(length)]
        expected += [sum((gamma * lambd) ** k * delta[t + k] for k in range(length - t)) for t in range(length)]
        start += length
    close(result.advantage_N, reals(*expected))
    assert result.return_N is not None
    close(result.return_N, reals(*expected) + value)


def test_gae_with_lambda_one_is_the_return_less_the_value() -> None:
    value = torch.randn(14, generator=generator(3), dtype=torch.float64)
    close(made("gae", batch(value_N=value), lambd=1.0), spread(list(REWARDS)) - value)


def agentic(**changes: Any) -> RewardBatch:
    """Two groups of two episodes: 3, 2, 1 and 1 turns of two actions each."""
    steps = TurnRewards(
        step_N=torch.arange(7).repeat_interleave(2),
        sample_K=whole(0, 0, 0, 1, 1, 2, 3),
        reward_K=reals(0.0, 1.0, 2.0, 0.0, 4.0, 1.0, 0.0),
        state_K=whole(0, 1, 2, 0, 1, 3, 3),
    )
    usual: dict[str, Any] = {
        "reward_S": reals(3.0, 4.0, 1.0, 0.0),
        "group_S": whole(0, 0, 1, 1),
        "groups": 2,
        "mask_N": torch.ones(14, dtype=torch.bool),
        "sequence_N": whole(0, 0, 0, 1, 1, 2, 3).repeat_interleave(2),
        "steps": steps,
        "greedy_S": bits("0101"),
        "gradient_norm_N": torch.ones(14, dtype=torch.float64),
        "behaviour_N": torch.full((14,), -0.5, dtype=torch.float64),
        "correct_S": bits("0110"),
    }
    return RewardBatch(**{**usual, **changes})


RETURNS = [0.5 + 0.5, 1 + 1, 2.0, 2.0, 4.0, 1.0, 0.0]
"""With a discount of one half."""


def test_step_reinforce_normalises_discounted_returns_of_steps_within_the_group() -> None:
    found = made("step_reinforce", agentic(), step_reward_gamma=0.5)
    expected = group_relative_advantages(RETURNS[:5]) + group_relative_advantages(RETURNS[5:])
    close(found, reals(*expected).repeat_interleave(2))


def test_gigpo_adds_the_episode_in_its_group_and_the_step_among_equal_states() -> None:
    found = made("gigpo", agentic(), step_reward_gamma=0.5, episode_reward_weight=2.0, step_reward_weight=0.5)
    episode = group_relative_advantages([3.0, 4.0]) + group_relative_advantages([1.0, 0.0])
    first, second, last = (
        group_relative_advantages([1.0, 2.0]),
        group_relative_advantages([2.0, 4.0]),
        group_relative_advantages([1.0, 0.0]),
    )
    step = [first[0], second[0], 0.0, first[1], second[1], last[0], last[1]]
    owner = [0, 0, 0, 1, 1, 2, 3]
    expected = [2.0 * episode[sample] + 0.5 * own for sample, own in zip(owner, step, strict=True)]
    close(found, reals(*expected).repeat_interleave(2))


def test_gigpo_without_the_spread_only_centres_both_parts() -> None:
    found = made("gigpo", agentic(), step_reward_gamma=0.5, norm_std_type="none")
    expected = [-0.5 - 0.5, -0.5 - 1.0, -0.5, 0.5 + 0.5, 0.5 + 1.0, 0.5 + 0.5, -0.5 - 0.5]
    close(found, reals(*expected).repeat_interleave(2))


def test_rewards_are_clipped_after_they_are_normalised() -> None:
    norm = group_relative_advantages(REWARDS[:3]) + group_relative_advantages(REWARDS[3:])
    close(made("grpo", reward_clip=0.8), spread([min(max(x, -0.8), 0.8) for x in norm]))


def test_gigpo_clips_both_normalised_parts() -> None:
    found = made("gigpo", agentic(), step_reward_gamma=0.5, reward_clip=0.7)
    close(found, reals(-1.4, -1.4, -0.7, 1.4, 1.4, 1.4, -1.4).repeat_interleave(2))


def test_inside_an_episode_the_token_penalty_stays_in_its_step() -> None:
    logp = torch.randn(14, generator=generator(6), dtype=torch.float64)
    given = agentic(logp_N=logp, reference_N=torch.zeros_like(logp))
    found = made("step_reinforce", given, kl_coef=0.1, kl_penalty="k1")
    pairs = logp.view(7, 2)
    to_go = torch.stack([pairs.sum(1), pairs[:, 1]], dim=1).flatten()
    close(found, made("step_reinforce", agentic()) - 0.1 * to_go)


def kl_batch() -> tuple[RewardBatch, Tensor]:
    random = generator(4)
    logp, reference = (torch.randn(14, generator=random, dtype=torch.float64) for _ in range(2))
    return batch(logp_N=logp, reference_N=reference), logp - reference


def test_the_token_penalty_counts_for_the_actions_before_it_and_is_not_clipped_with_the_reward() -> None:
    given, kl = kl_batch()
    found = made("grpo", given, kl_coef=0.3, kl_penalty="k1", reward_clip=0.8)
    plain = made("grpo", reward_clip=0.8)
    parts = [part.flip(0).cumsum(0).flip(0) for part in kl.tensor_split(CUTS)]
    close(found, plain - 0.3 * torch.cat(parts))


def test_rloo_compares_rewards_less_the_penalty_of_the_whole_sample() -> None:
    given, kl = kl_batch()
    penalised = [reward - 0.3 * float(part.sum()) for reward, part in zip(REWARDS, kl.tensor_split(CUTS), strict=True)]
    found = made("rloo", given, kl_coef=0.3, kl_penalty="k1")
    close(found, made("rloo", batch(reward_S=reals(*penalised))))


def test_the_kl_for_the_controller_is_per_action_and_averaged_over_samples() -> None:
    given, kl = kl_batch()
    result = estimate_advantages(given, params("grpo", kl_penalty="k1"), kl_coef=0.1)
    assert result.kl == pytest.approx(sum(float(part.mean()) for part in kl.tensor_split(CUTS)) / 6)


def test_a_penalty_needs_the_reference() -> None:
    with pytest.raises(InvariantBroken, match="add_token_level_kl reads logp_N"):
        made("grpo", kl_penalty="k1", kl_coef=0.1)


def test_domains_are_normalised_and_whitened_by_themselves() -> None:
    domain = whole(0, 0, 1, 1, 1, 0)
    given = batch(domain_S=domain)
    found = made("reinforce", given, norm_mean_type="domain", norm_std_type="domain")
    expected = torch.zeros(6, dtype=torch.float64)
    for number in (0, 1):
        inside = reals(*REWARDS)[domain == number]
        expected[domain == number] = (inside - inside.mean()) / (inside.std(correction=0) + 1e-6)
    close(found, spread(expected.tolist()))
    white = made("reinforce", given, whiten_advantages=True, whiten_by_domain=True)
    for number in (0, 1):
        inside = white[domain[given.sequence_N] == number]
        assert abs(float(inside.mean())) < 1e-9 and float(inside.var(correction=0)) == pytest.approx(1.0, rel=1e-4)


def test_whitening_is_over_trained_actions_and_before_the_clip() -> None:
    mask = bits("11011111110111")
    plain = made("grpo", batch(mask_N=mask))
    white = made("grpo", batch(mask_N=mask), whiten_advantages=True)
    kept = plain[mask]
    close(white[mask], (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt())
    assert (white[~mask] == 0).all()
    clipped = made("grpo", batch(mask_N=mask), whiten_advantages=True, advantage_clip=0.5)
    close(clipped, white.clamp(-0.5, 0.5))


def test_the_reward_sits_on_the_last_trained_action() -> None:
    """Sample 5 has four actions, the last two masked out."""
    mask = bits("1111111111" + "1100")
    found = made("reinforce", batch(mask_N=mask), gamma=0.5)
    close(found[10:], reals(3.5, 7.0, 0.0, 0.0))


def test_samples_that_are_masked_are_in_no_statistic_and_train_nothing() -> None:
    keep = torch.tensor([True, False, True, True, True, True])
    for name in ("grpo", "rloo", "reinforce_plus_plus"):
        one = estimate_advantages(batch(keep_S=keep), params(name))
        other = estimate_advantages(batch(keep_S=keep, reward_S=reals(1.0, 99.0, 0.5, 3.0, 3.0, 7.0)), params(name))
        close(one.advantage_N, other.advantage_N)
        assert (one.advantage_N[2:5] == 0).all()
        assert one.mask_N.tolist() == [not 2 <= index < 5 for index in range(14)]
    pair = made("grpo", batch(keep_S=keep))
    close(pair[:2], reals(*group_relative_advantages([1.0, 0.5]))[:1].expand(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e6 + 0.1])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(value: float, dtype: torch.dtype) -> None:
    rewards = torch.tensor([value, value, value, 0.0, 1.0, 0.5], dtype=dtype)
    for name in ("grpo", "rloo"):
        found = made(name, batch(reward_S=rewards))
        assert found.dtype == dtype
        assert (found[:6] == 0).all()
        assert (found[6:] != 0).any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce"])
def test_groups_of_one_give_numbers(name: str) -> None:
    given = batch(group_S=torch.arange(6), groups=6)
    found = made(name, given)
    assert torch.isfinite(found).all()
    if name in ("grpo", "rloo"):
        assert (found == 0).all()


def test_a_spread_of_nothing_is_not_divided_by() -> None:
    """Centred on the batch, scaled by a group without spread: the centred reward, not a million times it."""
    rewards = reals(1.0, 1.0, 1.0, 0.0, 1.0, 2.0)
    found = made("grpo", batch(reward_S=rewards + 0.0, group_S=whole(*GROUPS)), norm_mean_type="none")
    close(found[:6], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.built_in)
def test_nothing_trained_gives_zeros(name: str) -> None:
    nothing = torch.zeros(14, dtype=torch.bool)
    given = agentic(mask_N=nothing, value_N=torch.zeros(14, dtype=torch.float64))
    for whitened in (False, True):
        assert (made(name, given, whiten_advantages=whitened) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.built_in)
def test_the_order_of_packing_changes_no_advantage(name: str) -> None:
    """Sequences interleaved, each still in the order of time."""
    given = agentic(value_N=torch.randn(14, generator=generator(5), dtype=torch.float64))
    assert given.steps is not None
    assert given.value_N is not None
    order = whole(10, 0, 12, 6, 1, 2, 7, 11, 3, 13, 8, 4, 9, 5)
    steps = TurnRewards(
        step_N=given.steps.step_N[order],
        sample_K=given.steps.sample_K,
        reward_K=given.steps.reward_K,
        state_K=given.steps.state_K,
    )
    mixed = agentic(sequence_N=given.sequence_N[order], value_N=given.value_N[order], steps=steps)
    close(made(name, mixed, gamma=0.9), made(name, given, gamma=0.9)[order])


def test_remax_compares_with_the_reward_of_the_greedy_answer() -> None:
    given = batch(reward_S=reals(1.0, 0.0, 0.5, 2.0, 1.0, 0.0), greedy_S=bits("001010"))
    expected = reals(0.5, -0.5, 0.0, 1.0, 0.0, -1.0)
    close(made("remax", given, norm_mean_type="none", norm_std_type="none"), expected[given.sequence_N])


def test_opo_weighs_the_baseline_by_length() -> None:
    given = batch(reward_S=reals(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    lengths = torch.bincount(given.sequence_N[given.mask_N], minlength=6)[:3]
    found = made("opo", given, norm_mean_type="none", norm_std_type="none")
    assert found[given.mask_N][0] == pytest.approx(1 - lengths[0].item() / lengths.sum().item())


def test_gpg_scales_by_the_share_of_samples_with_a_reward() -> None:
    given = batch(reward_S=reals(1.0, 0.0, 0.5, 0.0, 0.0, 0.0))
    found = made("gpg", given, norm_mean_type="none", norm_std_type="none")
    expected = 3 * reals(0.5, -0.5, 0.0, 0.0, 0.0, 0.0)
    close(found, torch.where(given.mask_N, expected[given.sequence_N], torch.zeros_like(found)))


def test_the_spread_of_a_group_may_be_unbiased() -> None:
    def norm(values: tuple[float, ...]) -> list[float]:
        x = reals(*values)
        return ((x - x.mean()) / (x.std() + 1e-6)).tolist()

    close(made("grpo", unbiased_std=True), spread(norm(REWARDS[:3]) + norm(REWARDS[3:])))


@pytest.mark.parametrize("scaled", [True, False])
def test_grpo_passk_rewards_the_lead_of_the_best_member_alone(scaled: bool) -> None:
    options: dict[str, Any] = {"unbiased_std": True} if scaled else {"norm_std_type": "none"}
    stds = [float(reals(*REWARDS[:3]).std()) + 1e-6, float(reals(*REWARDS[3:]).std()) + 1e-6] if scaled else [1, 1]
    close(made("grpo_passk", **options), spread([0.5 / stds[0], 0, 0, 0, 0, 4 / stds[1]]))
    kept = batch(keep_S=bits("111110"))
    assert made("grpo_passk", kept, **options)[6:].abs().max() == 0, "the best two of the others are equal"


def test_gdpo_normalises_every_part_by_itself_and_whitens_the_sum() -> None:
    parts = torch.stack([reals(1, 0, 1, 0, 1, 1), reals(10, 30, 20, 5, 5, 8)])
    found = made("gdpo", batch(part_PS=parts), gdpo_parts={"right": 1.0, "short": 0.5}, unbiased_std=True)

    def norm(part: Tensor) -> Tensor:
        halves = [part[:3], part[3:]]
        return torch.cat([(x - x.mean()) / (x.std() + 1e-6) for x in halves])

    total = spread((norm(parts[0]) + 0.5 * norm(parts[1])).tolist())
    close(found, (total - total.mean()) / (total.var(correction=0) + 1e-8).sqrt())
    alone = made("gdpo")
    whole_reward = made("grpo")
    close(alone, (whole_reward - whole_reward.mean()) / (whole_reward.var(correction=0) + 1e-8).sqrt())


def test_codapo_weighs_a_question_by_confidence_and_by_how_many_answers_are_right() -> None:
    logp = -torch.rand(14, generator=generator(4), dtype=torch.float64)
    given = batch(behaviour_N=logp, correct_S=bits("100111"), reward_S=reals(1.0, 0.0, 0.5, 1.0, 1.2, 1.0))
    means = [float(part.mean()) for part in torch.tensor_split(logp, CUTS)]
    values = [
        exp(sum(means[first : first + 3]) / 3) * (1 - 4 * (wrong - 0.5) ** 2) for first, wrong in ((0, 2 / 3), (3, 0))
    ]
    assert values[1] == 0, "nothing is left to learn where all answers are right"
    factor = spread([values[0] + 0.3] * 3 + [0.3] * 3)
    close(made("codapo", given, codapo_weight_offset=0.3), made("grpo", given) * factor)


def test_normalised_rewards_have_bounds_that_need_not_be_symmetric() -> None:
    rewards = reals(0, 0, 9, 5, 1, 4)
    expected = [(one - one.mean()) / (one.std() + 1e-6) for one in (rewards[:3], rewards[3:])]
    assert float(torch.cat(expected).min()) < -1
    given, bounds = batch(reward_S=rewards), (-1.0, 1.1)
    found = made("grpo", given, unbiased_std=True, normalized_bounds=bounds)
    close(found, spread(torch.cat(expected).clamp(*bounds).tolist()))


def test_the_optimal_token_baseline_weighs_returns_by_gradients_so_far() -> None:
    norm = torch.rand(14, generator=generator(3), dtype=torch.float64) + 0.1
    rewards, starts = REWARDS, (0, *CUTS)
    expected = []
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            members = [j for j in range(6) if GROUPS[j] == GROUPS[i] and LENGTHS[j] > t]
            weights = {j: float(norm[starts[j] : starts[j] + t + 1].sum()) for j in members}
            mean = sum(weights[j] * rewards[j] for j in members) / (sum(weights.values()) + 1e-8)
            expected.append(rewards[i] - (mean if len(members) > 1 else 0.0))
    close(made("optimal_token_baseline", batch(gradient_norm_N=norm)), reals(*expected))


def test_an_estimator_says_what_it_was_not_given() -> None:
    with pytest.raises(InvariantBroken, match="remax reads greedy_S"):
        made("remax")
    with pytest.raises(InvariantBroken, match="gae reads value_N"):
        made("gae")
    with pytest.raises(InvariantBroken, match="step_reinforce reads steps"):
        made("step_reinforce")
    with pytest.raises(ConfigError, match=r"adv_estimator = 'gropo'.*one of grpo"):
        estimate_advantages(batch(), AdvantageSettings(adv_estimator="gropo"))


def test_a_configuration_makes_parameters_with_the_same_names() -> None:
    text = {
        "adv_estimator": "reinforce",
        "norm_mean_type": "batch",
        "gamma": 0.9,
        "reward_clip": 5.0,
        "whiten_advantages": True,
        "advantage_clip": 2.0,
        "add_token_level_kl": True,
        "kl_penalty": "k3",
    }
    assert make_advantage_settings(load_config(text)) == AdvantageSettings(
        adv_estimator="reinforce",
        norm_mean_type="batch",
        norm_std_type="none",
        gamma=0.9,
        reward_clip=5.0,
        whiten_advantages=True,
        advantage_clip=2.0,
        kl_penalty="k3",
    )
