"""DAPO's penalty for long answers, beside the reward of each task."""

import asyncio
from dataclasses import replace

import pytest

from headway.config import RewardConfig
from headway.errors import ConfigError, RewardError
from headway.rewards.reward_registry import make_rewards
from headway.rewards.text_rewards import OverlongPenalty
from headway.types import Episode
from tests.rewards.factory import episode

ARGUMENTS = {"longest": 100, "buffer": 40, "penalty": 0.5}


def answer_of_length(length: int, domain: str = "default") -> Episode:
    whole = episode("42", domain=domain, data={"answer": 42})
    turn = whole.turns[0]
    generation = replace(turn.generation, actions=(0,) * length)
    return replace(whole, turns=(replace(turn, generation=generation),))


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (60, 0.0), (80, -0.25), (100, -0.5)])
def test_the_penalty_begins_a_buffer_before_the_longest_answer(length: int, value: float) -> None:
    penalty = OverlongPenalty(longest=100, buffer=40, penalty=0.5)
    assert asyncio.run(penalty.score(answer_of_length(length))).value == value


def test_a_buffer_longer_than_the_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most `longest`"):
        OverlongPenalty(longest=10, buffer=11)


@pytest.mark.parametrize("domain", ["default", "sums", "other"])
def test_a_reward_with_a_star_is_added_to_the_reward_of_every_task(domain: str) -> None:
    penalty = RewardConfig(reward_fn="overlong", tag_included=("*",), reward_args=ARGUMENTS)
    numeric = RewardConfig(reward_fn="numeric")
    reward = make_rewards({"default": numeric, "sums": numeric, "overlong": penalty})
    assert asyncio.run(reward.score(answer_of_length(100, domain))).value == 0.5


def test_a_reward_with_a_star_is_no_reward_of_a_task_that_others_do_not_claim() -> None:
    penalty = RewardConfig(reward_fn="overlong", tag_included=("*",), reward_args=ARGUMENTS)
    math = RewardConfig(reward_fn="numeric", tag_included=("math",))
    with pytest.raises(RewardError, match="no reward for the domain"):
        asyncio.run(make_rewards({"overlong": penalty, "math": math}).score(answer_of_length(100, "geography")))
