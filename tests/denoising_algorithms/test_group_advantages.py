"""Mean per prompt, spread over the batch, clamped; the same by the estimator that language models use."""

from __future__ import annotations

import torch

from headway.algorithms.advantages import AdvantageSettings, RewardBatch, estimate_advantages
from headway.algorithms.returns import normalise_rewards

REWARD = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.2, 0.9, 0.3, 0.6], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])


def group_advantages(
    reward_S: torch.Tensor, group_S: torch.Tensor, groups: int, keep_S: torch.Tensor | None = None
) -> torch.Tensor:
    """(R − mean of the group)/(std of the batch + ε) within ±5, [S] in float64; 0 for samples not kept."""
    keep_S = torch.ones_like(group_S, dtype=torch.bool) if keep_S is None else keep_S
    return normalise_rewards(reward_S, keep_S, group_S, groups, mean_type="group", std_type="batch").clamp(-5, 5)


def test_they_are_centred_by_prompt_and_scaled_by_the_batch() -> None:
    made = group_advantages(REWARD, GROUP, 3)
    means = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(made, (REWARD - means) / (REWARD.std(correction=0) + 1e-6))
    assert made[2] == made[3] == 0


def test_a_prompt_that_is_better_than_the_others_gains_nothing_by_it() -> None:
    raised = REWARD + torch.tensor([10.0, 0.0, 0.0])[GROUP]
    made = group_advantages(raised, GROUP, 3)
    for group in range(3):
        torch.testing.assert_close(made[group == GROUP].sum(), torch.zeros((), dtype=torch.float64))


def test_they_are_clamped_and_dropped_samples_are_in_no_statistic() -> None:
    reward = torch.cat([torch.zeros(99), torch.ones(1)])
    group = torch.zeros(100, dtype=torch.long)
    assert group_advantages(reward, group, 1).max() == 5
    keep = torch.ones(8, dtype=torch.bool)
    keep[5] = False
    poisoned = REWARD.clone()
    poisoned[5] = 1e6
    made = group_advantages(poisoned, GROUP, 3, keep)
    torch.testing.assert_close(made[keep], group_advantages(REWARD[keep], GROUP[keep], 3))
    assert made[5] == 0


def test_the_estimator_of_language_models_gives_the_same() -> None:
    params = AdvantageSettings(adv_estimator="grpo", norm_mean_type="group", norm_std_type="batch", advantage_clip=5.0)
    steps_per_sample = 2
    batch = RewardBatch(
        reward_S=REWARD,
        group_S=GROUP,
        groups=3,
        mask_N=torch.ones(16, dtype=torch.bool),
        sequence_N=torch.arange(8).repeat_interleave(steps_per_sample),
    )
    made = estimate_advantages(batch, params).advantage_N
    expected = group_advantages(REWARD, GROUP, 3).repeat_interleave(steps_per_sample)
    torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=1e-6)
