"""Tasks of reasoning-gym: the same in every process, and judged by its own scoring from what a task carries."""

from __future__ import annotations

import asyncio
import json

import pytest

from headway.config import RewardConfig
from headway.data.reasoning_tasks import make_literal
from headway.errors import ConfigError
from headway.rewards.reward_registry import make_rewards
from headway.types import Episode, FinishReason, Generation, Task, Turn
from tests.data_sources.factory import epoch, sources

pytest.importorskip("reasoning_gym")


def said(task: Task, text: str) -> Episode:
    generation = Generation(actions=(), logps=(), runs=(), finish=FinishReason.STOP, text=text)
    return Episode(sample_id="s", task=task, turns=(Turn(observation=(), generation=generation),))


def test_an_entry_is_judged_by_reasoning_gym_from_what_the_task_carries() -> None:
    args = {"file_name": "reasoning_gym:rearc", "options": {"size": 3}}
    tasks = epoch(sources(args, prompt_length=20_000, rewards={"reasoning_gym": {}}).train)
    assert {(task.domain, task.data["tag"]) for task in tasks} == {("reasoning_gym", "rearc")}
    reward = make_rewards({"reasoning_gym": RewardConfig()}, answer="answer")

    async def judge() -> list[float]:
        copies = [Task(position=0, domain=task.domain, data=json.loads(json.dumps(task.data))) for task in tasks]
        right = [await reward.score(said(task, f" {task.data['answer']}\n")) for task in copies]
        wrong = [await reward.score(said(task, "no idea")) for task in copies]
        return [score.value for score in right + wrong]

    scores = asyncio.run(judge())
    assert scores[:3] == [1.0] * 3
    assert max(scores[3:]) < 0.1


def test_tasks_that_walk_over_sets_are_the_same_in_every_process_and_validation_has_other_ones() -> None:
    args = {"file_name": "reasoning_gym:isomorphic_strings", "options": {"size": 5}}
    first = sources(args, {"file_name": "reasoning_gym:isomorphic_strings"}, prompt_length=2000)
    second = sources(args, prompt_length=2000)
    assert epoch(first.train) == epoch(second.train)
    trained = {task.data["prompt"] for task in epoch(first.train)}
    assert not trained & {task.data["prompt"] for task in epoch(first.validation)}


def test_a_task_that_reasoning_gym_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task 'chain_sums', did you mean 'reasoning_gym:chain_sum'"):
        sources({"file_name": "reasoning_gym:chain_sums"})


def test_numbers_and_texts_of_numpy_become_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    value = {"a": (numpy.int64(3), [numpy.str_("x")]), 1: {2.5, None}}
    assert eval(make_literal(value)) == {"a": (3, ["x"]), 1: {2.5, None}}
