"""Rewards of users that go wrong in every way: the run survives, and one line names the function and the sample."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.registry import REWARDS
from headway.rewards.base import Reward
from headway.rewards.reward_registry import (
    RewardTerm,
    RoutedReward,
    UserRewardLimits,
    make_reward,
    open_reward_workers,
)
from headway.rewards.user_function import FunctionReward
from headway.rewards.user_reward_workers import WorkerReward
from headway.types import Score
from tests import misbehaviour
from tests.rewards.factory import episode

HERE = "tests.misbehaviour"
KINDS = ("misbehave", "misbehave_async", "MisbehavingClass")
COMPLAINTS = {
    "raise": "raised ValueError: a bad day at .*misbehaviour.py:\\d+",
    "nan": "returned nan, which is no reward",
    "none": "returned None \\(NoneType\\), not a number",
    "str": "returned '1.0' \\(str\\), not a number",
    "sleep": "no verdict after 1 s.* in do_sleep at .*misbehaviour.py:\\d+",
    "spin": "no verdict after 1 s.* in do_spin at .*misbehaviour.py:\\d+",
    "exit": "its worker .* ended with exit code 3: last words",
    "system_exit": "raised SystemExit: 1 at .*misbehaviour.py:\\d+",
    "keyboard_interrupt": "raised KeyboardInterrupt at .*misbehaviour.py:\\d+",
    "stop_iteration": "raised .*StopIteration",
    "segfault": "its worker .* was killed by SIGSEGV in do_segfault at .*misbehaviour.py:\\d+",
    "memory": "its worker .* was killed because it used more than 300 MB of memory",
    "orphans": "its worker .* was killed because it used more than 300 MB of memory",
    "print": "its worker .* was killed because it printed more than 16 MB",
    "close_files": "its worker .* ended because its files were closed|its worker .* ended with exit code 1",
    "kill_group": "its worker .* was killed",
}
"""What is said of each; a class and a coroutine that are blocked are said to block their process."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(timed())


def make(kind: str, tmp_path: Path | None = None, timeout_s: float = 1.0, memory_mb: int = 300) -> WorkerReward:
    limits = UserRewardLimits(timeout_s=timeout_s, memory_mb=memory_mb, logs=tmp_path)
    reward = make_reward(f"{HERE}:{kind}", limits=limits)
    assert isinstance(reward, WorkerReward)
    return reward


async def complain(reward: Reward, what: str) -> str:
    with pytest.raises(RewardError) as caught:
        await reward.score(episode(what))
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_reward_does_is_said_in_one_line_and_the_others_are_judged(kind: str) -> None:
    async def scenario() -> None:
        hasty, patient = make(kind), make(kind, timeout_s=40.0)
        await asyncio.gather(hasty.start(), patient.start())
        for what, complaint in COMPLAINTS.items():
            if kind == "MisbehavingClass" and what not in ("raise", "none", "system_exit", "spin", "exit"):
                continue  # it runs as a coroutine does
            reward = hasty if what in ("sleep", "spin") else patient
            good = asyncio.ensure_future(reward.score(episode("good")))
            said = await complain(reward, what)
            assert re.search(complaint, said), f"{what}: {said}"
            assert said.startswith(f"{HERE}:{kind}") and said.endswith("(7.0)") and "\n" not in said
            assert (await good).value == 1.0, what
        hasty.close()
        patient.close()

    run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_that_forks_or_leaves_its_directory_is_judged_as_ever(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.txt").write_text("5")
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        reward = make(kind, tmp_path / "logs")
        for what, value in (("fork", 1.0), ("good", 1.0), ("chdir", 1.0), ("relative", 5.0), ("fork", 1.0)):
            assert (await reward.score(episode(what))).value == value, what
        assert len(list((tmp_path / "logs").iterdir())) == 1
        reward.close()

    run(scenario)
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().count("changed the working directory; it is") == 1


def test_samples_beside_a_crash_are_judged_again_and_only_the_culprit_fails() -> None:
    async def scenario() -> None:
        reward = make("misbehave_async", timeout_s=2.0)
        await reward.start()
        told = ["good", "sleep", "good", "exit", "good", "segfault"]
        found = await asyncio.gather(*(reward.score(episode(what)) for what in told), return_exceptions=True)
        assert [isinstance(one, Score) for one in found] == [what == "good" for what in told]
        reward.close()

    run(scenario)


def test_a_sample_that_waits_for_its_turn_is_not_late() -> None:
    async def scenario() -> None:
        reward = make_reward(f"{HERE}:misbehave", {"concurrency": 1}, limits=UserRewardLimits(timeout_s=1.0))
        assert isinstance(reward, WorkerReward)
        late, good = reward.score(episode("sleep")), reward.score(episode("good"))
        found = await asyncio.gather(late, good, return_exceptions=True)
        assert "no verdict after 1 s in do_sleep" in str(found[0]) and found[1] == Score(value=1.0)
        reward.close()

    run(scenario)


def test_what_cannot_be_loaded_is_refused_when_the_worker_starts(tmp_path: Path) -> None:
    class_file = tmp_path / "mine.py"
    class_file.write_text(
        "class Mine:\n    def __init__(self): raise SystemExit('no model here')\n    def score(self): ...\n"
    )

    async def scenario() -> None:
        reward = RoutedReward([RewardTerm(name="mine", reward=make_reward(f"{class_file}:Mine"))])
        with pytest.raises(ConfigError, match=r"rewards\.mine: .*mine.py:Mine: SystemExit: no model here"):
            async with open_reward_workers(reward):
                pass

    run(scenario)


# -- functions that no other process can import


def local_rewards() -> dict[str, Any]:
    def function(text: str, data: dict[str, Any]) -> Any:
        return misbehaviour.act(text)

    async def coroutine(text: str, data: dict[str, Any]) -> Any:
        return misbehaviour.act(text)

    return {"function": function, "coroutine": coroutine}


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_closure_runs_here_on_a_thread_and_is_said_to(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(misbehaviour, "do_sleep", lambda: threading.Event().wait(6))

    async def scenario() -> None:
        with REWARDS.isolate():
            REWARDS.register("test_local", local_rewards()[kind])
            reward = make_reward("test_local", limits=UserRewardLimits(timeout_s=0.5))
        assert isinstance(reward, FunctionReward)
        (note,) = RoutedReward([RewardTerm(name="mine", reward=reward)]).notes
        assert note.startswith("rewards.mine: no other process can import it, so it runs in the process of the run")
        for what in ("raise", "nan", "system_exit", "keyboard_interrupt", "stop_iteration"):
            said = await complain(reward, what)
            assert re.search(COMPLAINTS[what], said) and said.endswith("(7.0)"), said
        said = await complain(reward, "sleep")
        assert "no verdict after 0.5 s" in said and "in <lambda> at " in said and said.endswith("(7.0)")
        assert (await reward.score(episode("chdir"))).value == 1.0
        assert Path.cwd() == tmp_path
        assert (await reward.score(episode("good"))).value == 1.0

    run(scenario)
