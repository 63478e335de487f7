"""Reward models in processes of their own: one answer to each request, whatever happens to the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess
from headway.rewards.judge_rewards import JudgeReward, ServedJudgeReward, make_llm_judge
from headway.rewards.model_reward import ModelReward, make_conversation
from headway.rewards.reward_model_client import RewardModelClient
from headway.rewards.reward_registry import make_reward

from .factory import episode


def make_client(notes: Path, copies: int = 1, target: str = "serve", **options: Any) -> RewardModelClient:
    specs = [
        ChildSpec(name=f"reward/a/{number}", target=f"tests.rewards.model_targets:{target}", args={"notes": str(notes)})
        for number in range(copies)
    ]
    settings = {"width": 8, "timeout_s": 60.0, "backoff_s": 0.0, **options}
    return RewardModelClient(specs=specs, start_child=ChildProcess.start, **settings)


def run(client: Callable[[], RewardModelClient], scenario: Callable[[ModelReward], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        reward = ModelReward()
        reward.client = client()
        async with asyncio.timeout(120):
            await reward.client.start()
            try:
                await scenario(reward)
            finally:
                await reward.client.close()

    asyncio.run(bounded())


async def score(reward: ModelReward, text: str) -> float:
    return (await reward.score(episode(text, data={"prompt": "2+2="}))).value


def test_requests_of_a_process_that_dies_are_asked_again_and_answered_once(tmp_path: Path) -> None:
    changes: list[tuple[str, bool]] = []

    def note(name: str, reason: str) -> None:
        changes.append((name, bool(reason)))

    async def scenario(reward: ModelReward) -> None:
        texts = ["die once", "a", "bb", "ccc"]
        assert await asyncio.gather(*(score(reward, text) for text in texts)) == [8.0, 1.0, 2.0, 3.0]

    run(lambda: make_client(tmp_path / "notes", report=note), scenario)
    assert changes == [("reward/a/0", True), ("reward/a/0", False)]


def test_a_request_that_ends_every_process_has_no_score_and_the_others_have(tmp_path: Path) -> None:
    async def scenario(reward: ModelReward) -> None:
        found = await asyncio.gather(score(reward, "die"), score(reward, "a"), return_exceptions=True)
        assert isinstance(found[0], RewardError) and "processes ended while they worked on it" in str(found[0])
        assert found[1] == 1.0
        assert await score(reward, "bb") == 2.0
        with pytest.raises(RewardError, match="too long"):
            await score(reward, "refuse")

    run(lambda: make_client(tmp_path / "notes"), scenario)


def test_a_process_that_does_not_answer_in_time_is_replaced(tmp_path: Path) -> None:
    async def scenario(reward: ModelReward) -> None:
        with pytest.raises(RewardError, match="no answer after 1 s"):
            await score(reward, "hang")
        assert await score(reward, "bb") == 2.0

    run(lambda: make_client(tmp_path / "notes", timeout_s=1.0), scenario)


def test_a_model_that_cannot_be_loaded_is_refused_before_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="is no model"):
            await make_client(tmp_path, target="refuse").start()

    asyncio.run(scenario())


def test_a_conversation_may_be_a_list_of_messages_and_needs_a_prompt() -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    found = make_conversation(episode("4", data={"prompt": messages}), "prompt")
    assert [one["role"] for one in found] == ["system", "user", "assistant"] and found[-1]["content"] == "4"
    with pytest.raises(RewardError, match="no prompt in 'question'"):
        make_conversation(episode("4", data={"prompt": messages}), "question")


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Yes", 1.0), ("no.", 0.0), ("It is wrong.\nNo", 0.0), ("no doubt:\nYes", 1.0), ("Score: 5", 0.5)],
)
def test_a_verdict_is_a_yes_or_no_or_a_score(reply: str, score: float) -> None:
    judge = make_llm_judge()
    assert isinstance(judge, ServedJudgeReward) and judge._parser.parse(reply) == score


def test_an_undecided_verdict_is_none() -> None:
    with pytest.raises(ValueError, match="yes and no"):
        make_llm_judge()._parser.parse("yes or no, who knows")


def test_the_options_of_llm_judge_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    judge = make_reward(
        "llm_judge",
        {"judge_model_type": "api", "judge_api_url": "https://judge/v1", "judge_api_key": "KEY", "temperature": 0.3},
    )
    assert isinstance(judge, JudgeReward) and not isinstance(judge, ServedJudgeReward)
    assert judge.base_url == "https://judge/v1" and judge.temperature == 0.3
    for options, problem in (
        ({"judge_prompt": "unknown-prompt"}, "a place for the answer"),
        ({"judge_model_type": "local"}, "inference or api"),
        ({"judge_model_type": "api"}, "where is the judge"),
        ({"judge_model_type": "api", "judge_api_url": "https://judge/v1", "judge_api_key": "MISSING"}, "is not set"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_reward("llm_judge", options)
    with pytest.raises(ConfigError, match="served here"):
        make_reward("judge", {"base_url": "https://judge/v1"}, served_here=True)
