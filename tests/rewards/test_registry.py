"""Rewards by name and by path, users' functions that go wrong, and several rewards for one sample."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway.config import RewardConfig
from headway.errors import ConfigError, RewardError
from headway.registry import REWARDS
from headway.rewards.reward_registry import BUILT_IN_REWARDS, RewardTerm, RoutedReward, make_reward, make_rewards
from headway.rewards.user_function import FunctionReward, load_function
from headway.rewards.user_reward_workers import WorkerReward
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import Episode, Score
from tests.rewards.factory import episode, judge_all, judged, scored

USER = "tests.rewards.user_rewards"
ALL = frozenset({"default"})
"""The domain of every episode here."""


class Fixed:
    """Gives a value after a while, or fails."""

    def __init__(self, value: float | Exception, seconds: float = 0.0) -> None:
        self.value, self.seconds, self.cancelled = value, seconds, False

    async def score(self, episode: Episode) -> Score:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.value, Exception):
            raise self.value
        return Score(value=self.value)


# -- names and paths


def test_rewards_are_found_by_name() -> None:
    assert set(BUILT_IN_REWARDS) == set(REWARDS.built_in)
    assert judged(make_reward("numeric", {"tolerance": 1}), "42", answer=43) == 1
    assert judged(make_reward("numeric", answer="solution"), "42", solution=42) == 1
    assert judged(make_reward("numeric", {"answer": "gold"}, answer="solution"), "42", gold=42) == 1
    assert judged(make_reward("format", answer="solution"), "x") == 0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("numerc", {}, "did you mean numeric"),
        ("numeric", {"tolerence": 1}, "arguments of numeric: answer, part, take, tolerance"),
        ("regex", {}, "pattern"),
        (f"{USER}:absent", {}, "has no 'absent'"),
        (f"{USER}:NUMBER", {}, "is a int, not a function"),
        (f"{USER}:only_text", {}, "called with a text and the row"),
        (f"{USER}:by_length", {"pre": 1}, "arguments of .*: per"),
        (f"{USER}:Own", {"x": 1}, "arguments of .*: value"),
        ("no.such.module:f", {}, "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", {}, "no such file"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(name, args)


def test_users_functions_are_called_with_text_data_and_arguments() -> None:
    assert judged(make_reward(f"{USER}:by_length", {"per": 2}), "four") == 2
    assert scored(make_reward(f"{USER}:slowly"), "a b c") == Score(value=1.0, parts={"words": 3.0})
    assert judged(make_reward(f"{USER}:Own", {"value": 3}), "x") == 3


def test_a_file_of_the_users_own_will_do(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(text, task_data, bonus=0):\n    return (text == task_data['answer']) + bonus\n")
    assert judged(make_reward(f"{file}:reward", {"bonus": 1}), "x", answer="x") == 2
    file.write_text("raise RuntimeError('half written')")
    with pytest.raises(ConfigError, match="half written"):
        make_reward(f"{file}:reward")


NO_NUMBERS = {
    "none": "returned None (NoneType), not a number",
    "nan": "returned nan",
    "inf": "returned -inf",
    "text": "returned '1.0' (str)",
    "list": "returned [1] (list)",
    "dict": "a dict without 'score': {'x': 1}",
    "part": "['x'] returned None",
    "huge": "(int)",
    "complex": "1j (complex)",
}


def test_what_is_no_number_is_no_verdict() -> None:
    said = judge_all(make_reward(f"{USER}:returning"), [(text, None) for text in NO_NUMBERS])
    for message, complaint in zip(NO_NUMBERS.values(), said, strict=True):
        assert message in str(complaint) and f"{USER}:returning" in str(complaint)


def test_a_function_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(RewardError, match=r"raising raised KeyError: 'absent' at .*user_rewards\.py:\d+ \(7\.0\)"):
        judged(make_reward(f"{USER}:raising"), "x")
    with pytest.raises(RewardError, match="SystemExit"):
        judged(make_reward(f"{USER}:leaving"), "x")


def test_blocking_functions_run_side_by_side_and_hold_up_nobody() -> None:
    async def scene() -> float:
        reward, ticks = make_reward(f"{USER}:blocking"), 0
        assert isinstance(reward, WorkerReward)
        await reward.start()
        started = time.perf_counter()
        running = asyncio.gather(*(reward.score(episode("x")) for _ in range(8)))
        while not running.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert [score.value for score in await running] == [1.0] * 8
        assert ticks >= 5, "the loop went on"
        return time.perf_counter() - started

    assert asyncio.run(scene()) < 8 * 0.5, "one after the other they take longer"


def test_a_call_that_hangs_costs_one_slot_only() -> None:
    end = threading.Event()

    def judge(text: str, data: dict[str, Any]) -> float:
        if text == "hang":
            end.wait(60)
        return 1.0

    async def scene() -> None:
        reward = FunctionReward(load_function(judge, "f", {}, "answer"), concurrency=2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reward.score(episode("hang"))
        assert (await reward.score(episode("x"))).value == 1.0 and not end.is_set()
        end.set()

    asyncio.run(scene())


def test_registered_functions_and_classes_are_rewards_by_name() -> None:
    def count(text: str, task_data: dict[str, Any], *, each: float = 1.0) -> float:
        return each * len(text)

    try:
        REWARDS.register("test_count", count)
        REWARDS.register("test_fixed", Fixed)
        assert judged(make_reward("test_count", {"each": 2}), "xyz") == 6
        assert judged(make_reward("test_fixed", {"value": 4}), "x") == 4
        with pytest.raises(ConfigError, match="arguments of test_count: each"):
            make_reward("test_count", {"many": 2})
    finally:
        REWARDS.unregister("test_count")
        REWARDS.unregister("test_fixed")
    with pytest.raises(ConfigError, match="built-in"):
        REWARDS.register("numeric", count)


# -- composition


def parts(**rewards: Fixed) -> list[RewardTerm]:
    return [RewardTerm(name=name, reward=reward, domains=ALL) for name, reward in rewards.items()]


def test_weights_add_up_and_parts_are_kept() -> None:
    rewards = [
        RewardTerm(name="right", reward=make_reward("numeric"), weight=0.8, domains=ALL),
        RewardTerm(name="form", reward=make_reward(f"{USER}:slowly"), weight=0.2, domains=ALL),
    ]
    score = scored(RoutedReward(rewards), "42", answer=42)
    assert score.value == pytest.approx(1.0)
    assert score.parts == {"right": 0.8, "form": 0.2, "form/words": 1.0}


@pytest.mark.parametrize("error", [RewardError("down"), ValueError("down")])
def test_one_part_without_a_verdict_leaves_the_sample_without(error: Exception) -> None:
    slow = Fixed(1.0, seconds=30)
    with pytest.raises(RewardError, match=r"rewards\.judge: .*down"):
        scored(RoutedReward(parts(form=slow, judge=Fixed(error, seconds=0.01))), "x")
    assert slow.cancelled, "nobody waits for the rest"


def test_parts_are_judged_at_the_same_time() -> None:
    async def scene() -> float:
        await RoutedReward(parts(a=Fixed(1, 40), b=Fixed(1, 40), c=Fixed(1, 40))).score(episode("x"))
        return asyncio.get_running_loop().time()

    assert run_on_virtual_clock(scene()) == 40


def test_cancelling_a_sum_cancels_its_parts() -> None:
    async def scene() -> None:
        slow = Fixed(1.0, seconds=30)
        running = asyncio.create_task(RoutedReward(parts(a=slow, b=Fixed(1))).score(episode("x")))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert slow.cancelled

    asyncio.run(scene())


# -- routing


def value(reward: Any, domain: str, **data: Any) -> Score:
    score: Score = asyncio.run(reward.score(episode("x", domain=domain, data=data)))
    return score


def test_domains_and_tags_find_their_rewards() -> None:
    rewards = RoutedReward(
        [
            RewardTerm(name="math", reward=Fixed(1), domains=frozenset({"gsm8k", "aime"})),
            RewardTerm(name="code", reward=Fixed(2)),
            RewardTerm(name="form", reward=Fixed(10), weight=0.5, domains=frozenset({"gsm8k", "code"})),
        ]
    )
    assert value(rewards, "gsm8k") == Score(value=6, parts={"math": 1, "form": 5})
    assert value(rewards, "aime").parts == {"math": 1}
    assert value(rewards, "code").parts == {"code": 2, "form": 5}
    assert value(rewards, "default", tag="aime").parts == {"math": 1}
    with pytest.raises(RewardError, match="no reward for the domain 'poetry', only for: code, form, math"):
        value(rewards, "poetry")


def test_the_default_reward_takes_what_no_other_claims() -> None:
    rewards = RoutedReward(RewardTerm(name=name, reward=Fixed(n)) for n, name in enumerate(("default", "math")))
    assert value(rewards, "math").parts == {"math": 1}
    assert value(rewards, "poetry").parts == {"default": 0}


def test_rewards_of_every_task_are_added_once_and_may_stand_alone() -> None:
    everywhere = [RewardTerm(name=name, reward=Fixed(n), domains=frozenset({"*"})) for n, name in ((1, "a"), (2, "b"))]
    for domain in ("*", "poetry"):
        assert value(RoutedReward(everywhere), domain) == Score(value=3, parts={"a": 1, "b": 2})
    beside = RoutedReward([*everywhere, RewardTerm(name="math", reward=Fixed(4))])
    assert value(beside, "math") == Score(value=7, parts={"math": 4, "a": 1, "b": 2})
    with pytest.raises(RewardError, match="no reward for the domain 'poetry'"):
        value(beside, "poetry")


def test_a_whole_configuration() -> None:
    rewards = make_rewards(
        {
            "numeric": RewardConfig(tag_included=("sums",), weight=2),
            "style": RewardConfig(reward_fn=f"{USER}:by_length", reward_args={"per": 4}, tag_included=("sums",)),
        },
        answer="solution",
    )
    score = asyncio.run(rewards.score(episode("42", domain="sums", data={"solution": "42"})))
    assert score == Score(value=2.5, parts={"numeric": 2.0, "style": 0.5})


def test_without_rewards_the_environment_decides() -> None:
    assert asyncio.run(make_rewards({}).score(episode("x"))).value == 0


def test_a_mistake_in_a_configuration_names_its_reward() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.math2.*is no reward .did you mean math"):
        make_rewards({"math2": RewardConfig()})
