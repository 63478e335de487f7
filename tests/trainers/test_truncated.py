"""Samples that a length cut off: trained as others are, or without a part in the loss where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.algorithms.sample_weights import SampleSelection
from headway.config import load_config
from headway.errors import ConfigError
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.settings import LocalSettings, OptimizerSettings, make_local_settings
from headway.trainers.local.training_thread import CommitGate
from headway.types import Batch, FinishReason, Sample, SampleGroup

from .factory import batch, exact
from .test_packing import gradients, same

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
FIRST, LAST = 0, 3
"""Members of each group that are cut off."""


def out_of_tokens(sample: Sample) -> Sample:
    """Its last turn ended by its length."""
    *before, last = sample.episode.turns
    ended = replace(last, generation=replace(last.generation, finish=FinishReason.LENGTH))
    return replace(sample, episode=replace(sample.episode, turns=(*before, ended)))


def out_of_turns(sample: Sample) -> Sample:
    """Its episode was truncated."""
    return replace(sample, episode=replace(sample.episode, truncated=True))


def cut(data: Batch) -> Batch:
    """With two members of each group cut off, one in each way."""

    def one(group: SampleGroup) -> SampleGroup:
        samples = list(group.samples)
        samples[FIRST], samples[LAST] = out_of_tokens(samples[FIRST]), out_of_turns(samples[LAST])
        return replace(group, samples=tuple(samples))

    return replace(data, groups=tuple(one(group) for group in data.groups))


def by_hand(data: Batch) -> Batch:
    """Advantages made from the rewards of whole groups; then those that were cut off are taken away."""

    def one(group: SampleGroup) -> SampleGroup:
        rewards = torch.tensor([sample.score.value for sample in group.samples if sample.score], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        samples = [replace(s, advantage=float(a)) for s, a in zip(group.samples, advantages, strict=True)]
        return replace(group, samples=tuple(samples[FIRST + 1 : LAST]))

    return replace(data, groups=tuple(one(group) for group in data.groups))


@pytest.mark.parametrize("entropy", [0.0, 0.01])
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_the_others_with_advantages_of_the_whole_group(mode: Any, entropy: float) -> None:
    """Denominators, too, count only what is trained."""
    clip = LossSettings(clip_low=5.0, clip_high=5.0)
    objective = PolicyObjective(pg_variant="ppo", settings=clip, mode=mode, norm_length=50, entropy_coef=entropy)
    data = cut(batch(0))
    masked = gradients(data, objective=objective, selection=SampleSelection(mask_truncated=True))
    same(gradients(by_hand(data), objective=objective, advantages=None), masked)
    small = gradients(data, objective=objective, selection=SampleSelection(mask_truncated=True), micro_batch_tokens=25)
    same(masked, small)
    with pytest.raises(AssertionError):
        same(gradients(data, objective=objective), masked)


def test_unless_asked_for_it_changes_nothing_that_an_answer_was_cut_off() -> None:
    same(gradients(batch(0)), gradients(cut(batch(0))))


def test_a_turn_that_ran_out_of_tokens_does_not_cut_off_its_episode() -> None:
    single, several = batch(0, groups=1).groups[0].samples[0], batch(0, groups=1, turns=2).groups[0].samples[0]
    assert out_of_tokens(single).episode.cut_off and out_of_turns(several).episode.cut_off
    assert not out_of_tokens(several).episode.cut_off and not single.episode.cut_off


@pytest.mark.parametrize("critic", [None, OptimizerSettings(learning_rate=1e-2)])
def test_a_batch_in_which_everything_was_cut_off_is_a_step_that_moves_nothing(critic: OptimizerSettings | None) -> None:
    data = batch(0, groups=2)
    groups = tuple(replace(g, samples=tuple(out_of_tokens(s) for s in g.samples)) for g in data.groups)
    estimator = AdvantageSettings(adv_estimator="grpo" if critic is None else "gae")
    learner = LocalLearner(
        exact(), LocalSettings(advantages=estimator, critic=critic, selection=SampleSelection(mask_truncated=True))
    )
    before = {name: one.clone() for name, one in learner.policy.weights().items()}
    metrics = learner.learn(replace(data, groups=groups), CommitGate())
    assert learner.version == 1 and metrics["masked_samples"] == metrics["skipped_samples"] == 8
    assert metrics["loss"] == metrics["grad_norm"] == metrics["value_loss"] == 0.0 and metrics["reward"] > 0
    for name, one in learner.policy.weights().items():
        assert torch.equal(one, before[name]), name


@pytest.mark.parametrize("key", ["mask_truncated_samples", "max_len_mask"])
def test_a_configuration_asks_for_it(key: str) -> None:
    assert make_local_settings(load_config(None, [f"{key}=true"])).selection.mask_truncated
    assert not make_local_settings(load_config(None)).selection.mask_truncated
    with pytest.raises(ConfigError, match="mask_truncated_samples"):
        load_config({key: True, "flow": {}})
