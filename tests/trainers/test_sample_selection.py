"""Groups outside the range of difficulty are not trained; difficulty and length weigh what is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.algorithms.objective import PolicyObjective
from headway.algorithms.sample_weights import SampleSelection
from headway.config import load_config
from headway.errors import ConfigErrors
from headway.trainers.local.settings import make_local_settings
from headway.types import Batch, SampleGroup, Score

from .factory import batch
from .test_packing import gradients, same


def score(group: SampleGroup, *values: float) -> SampleGroup:
    """Return the group with these scores, in turn."""
    samples = [
        replace(sample, score=Score(value=values[number % len(values)])) for number, sample in enumerate(group.samples)
    ]
    return replace(group, samples=tuple(samples))


def scored(*values: tuple[float, ...]) -> Batch:
    """Return a batch whose groups have these scores."""
    data = batch(0)
    groups = [score(group, *values[number % len(values)]) for number, group in enumerate(data.groups)]
    return replace(data, groups=tuple(groups))


def test_groups_outside_the_range_have_no_part_in_the_gradient() -> None:
    selection = SampleSelection(score_range=(0.1, 0.95))
    data = scored((1.0,), (0.0, 1.0))
    masked = gradients(data, selection=selection, advantages=None)
    kept = replace(data, groups=tuple(group for number, group in enumerate(data.groups) if number % 2))
    same(gradients(kept, advantages=None), masked)


def test_a_batch_without_a_fitting_group_moves_nothing() -> None:
    for value in (0.0, 1.0, 0.1, 0.95):
        found = gradients(scored((value,)), selection=SampleSelection(score_range=(0.1, 0.95)), advantages=None)
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_weights_follow_length_and_difficulty_and_have_a_mean_of_one() -> None:
    samples = [sample for group in batch(0).groups for sample in group.samples]
    assert SampleSelection().weigh(samples) is None
    weights = SampleSelection(by_length=True).weigh(samples) or []
    assert sum(weights) == pytest.approx(len(samples))
    shortest, longest = (pick(samples, key=lambda s: s.actions) for pick in (min, max))
    assert weights[samples.index(shortest)] == pytest.approx(3 * weights[samples.index(longest)])
    hard = [
        replace(s, episode=replace(s.episode, task=replace(s.episode.task, data={"difficulty": n % 2})))
        for n, s in enumerate(samples)
    ]
    weights = SampleSelection(by_difficulty=True).weigh(hard) or []
    assert weights[1] == pytest.approx(4 * weights[0]) and sum(weights) == pytest.approx(len(samples))


def test_a_weight_scales_the_gradient_of_its_sample() -> None:
    data = scored((0.0, 1.0))
    plain, weighted = (
        gradients(data, advantages=None),
        gradients(data, selection=SampleSelection(by_length=True), advantages=None),
    )
    with pytest.raises(AssertionError):
        same(plain, weighted)


def test_the_keys_of_roll_are_read() -> None:
    keys = [
        "difficulty_mask=true",
        "difficulty_low_threshold=0.2",
        "difficulty_loss_weight=true",
        "length_loss_weight=true",
    ]
    selection = make_local_settings(load_config(None, keys)).selection
    assert selection == SampleSelection(score_range=(0.2, 0.95), by_difficulty=True, by_length=True)
    with pytest.raises(ConfigErrors, match="difficulty_mask"):
        load_config(None, ["denoising={}", "difficulty_mask=true"])


def test_single_turns_are_trained_as_samples_of_their_own() -> None:
    """An episode whose turns see nothing of each other, and its turns as episodes: the same gradient."""
    objective = PolicyObjective(pg_variant="gspo", mode="seq-mean-token-mean")
    data = batch(0, turns=3)
    data = replace(data, groups=tuple(map(forget_earlier_turns, data.groups)))
    apart = replace(data, groups=tuple(map(split_turns, data.groups)))
    by_turn = gradients(data, selection=SampleSelection(by_turn=True), objective=objective, advantages=None)
    same(gradients(apart, objective=objective, advantages=None), by_turn)
    with pytest.raises(AssertionError):
        same(gradients(data, objective=objective, advantages=None), by_turn)


def forget_earlier_turns(group: SampleGroup) -> SampleGroup:
    samples = []
    for sample in group.samples:
        turns = tuple(replace(turn, starts_new_context=True) for turn in sample.episode.turns)
        samples.append(replace(sample, episode=replace(sample.episode, turns=turns)))
    return replace(group, samples=tuple(samples))


def split_turns(group: SampleGroup) -> SampleGroup:
    samples = [
        replace(
            sample,
            sample_id=f"{sample.sample_id}/{number}",
            episode=replace(sample.episode, turns=(turn,)),
            actions=len(turn.generation.actions),
        )
        for sample in group.samples
        for number, turn in enumerate(sample.episode.turns)
    ]
    return replace(group, samples=tuple(samples))
