"""What the trainer adds to a batch for estimators: gradient norms of all actions, and parts of rewards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.errors import TrainerError
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import make_token_batch, make_token_rows
from headway.trainers.local.tree_packing import pack_rows
from headway.types import Batch, Score
from headway.weights.weight_store import WeightStore

from .factory import VOCABULARY, batch, exact

OTB = LocalSettings(
    advantages=AdvantageSettings(adv_estimator="optimal_token_baseline", norm_mean_type="none", norm_std_type="none"),
    optimizer=OptimizerSettings(learning_rate=1e-2),
    temperature=0.7,
    gradient_norms=True,
    precision="fp64",
)


def test_gradient_norms_are_those_of_the_softmax_written_out() -> None:
    trainer, data = LocalTrainer(exact, OTB, WeightStore()), batch(0)
    policy, rows = trainer.learner.policy, make_token_rows(data.groups, VOCABULARY)
    with torch.no_grad():
        for pack in pack_rows(rows, budget=64, device="cpu"):
            found = policy.gradient_norms(pack)
            for number, norm in zip(pack.action_N.tolist(), found.tolist(), strict=True):
                row = next(row for row in rows if row.first <= number < row.first + len(row.actions))
                place = row.actions[number - row.first]
                chances = (policy.causal(torch.tensor([row.tokens])).logits[0, place - 1] / 0.7).softmax(-1)
                onehot = torch.nn.functional.one_hot(torch.tensor(row.tokens[place]), VOCABULARY)
                assert norm == pytest.approx(float((onehot - chances).square().sum()), rel=1e-9)
    metrics = asyncio.run(trainer.train(data))
    assert metrics["loss"] == metrics["loss"]
    assert trainer.version == 1


def with_parts(data: Batch, **parts: float) -> Batch:
    groups = []
    for group in data.groups:
        named = {f"default/{name}": value for name, value in parts.items()}
        samples = (replace(one, score=Score(value=1.0, parts={"default": 1.0, **named})) for one in group.samples)
        groups.append(replace(group, samples=tuple(samples)))
    return replace(data, groups=tuple(groups))


def test_parts_of_rewards_are_found_by_name_and_a_missing_one_is_an_error() -> None:
    data = with_parts(batch(0), right=0.5, short=2.0)
    options = {"trained": 0, "vocabulary": VOCABULARY, "dtype": torch.float64, "device": "cpu"}
    found = make_token_batch(data.groups, parts=("short", "default/right"), **options)  # type: ignore[arg-type]
    assert found.part_PS is not None
    assert found.part_PS[:, 0].tolist() == [2.0, 0.5]
    with pytest.raises(TrainerError, match="names 'format', its reward has default, default/right, default/short"):
        make_token_batch(data.groups, parts=("format",), **options)  # type: ignore[arg-type]


def test_an_answer_is_right_where_its_part_is_one_and_without_it_where_its_reward_is() -> None:
    options = {"trained": 0, "vocabulary": VOCABULARY, "dtype": torch.float64, "device": "cpu", "accuracy": "acc"}
    for parts, right in (({"acc": 0.0}, False), ({"acc": 1.0}, True), ({"format": 0.0}, True)):
        found = make_token_batch(with_parts(batch(0), **parts).groups, **options)  # type: ignore[arg-type]
        assert found.correct_S is not None
        assert set(found.correct_S.tolist()) == {right}


def test_a_step_of_codapo_reads_the_probabilities_of_the_engine() -> None:
    advantages = AdvantageSettings(adv_estimator="codapo", accuracy_key="acc")
    trainer = LocalTrainer(exact, replace(OTB, advantages=advantages, gradient_norms=False), WeightStore())
    metrics = asyncio.run(trainer.train(batch(0)))
    assert trainer.version == 1 and metrics["grad_norm"] > 0
