"""Episodes with one answer, and what a reward says about them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.rewards.base import Reward
from headway.types import Episode, FinishReason, Generation, Score, Task, Turn


def episode(*texts: str, domain: str = "default", data: Mapping[str, Any] | None = None) -> Episode:
    """One turn for each text."""
    turns = tuple(
        Turn(observation=(), generation=Generation(actions=(), logps=(), runs=(), finish=FinishReason.STOP, text=text))
        for text in texts
    )
    return Episode(sample_id="7.0", task=Task(position=0, domain=domain, data=data or {}), turns=turns)


def scored(reward: Reward, text: str, **data: Any) -> Score:
    """The whole verdict."""
    return asyncio.run(reward.score(episode(text, data=data)))


def judged(reward: Reward, text: str, **data: Any) -> float:
    """The value of the verdict."""
    return scored(reward, text, **data).value


def judge_all(reward: Reward, cases: list[tuple[str, Any]]) -> list[float | str]:
    """Verdicts on (text, answer) pairs, side by side; an error is its message."""

    async def one(text: str, answer: Any) -> float | str:
        try:
            return (await reward.score(episode(text, data={"answer": answer}))).value
        except Exception as error:
            return str(error)

    async def scene() -> list[float | str]:
        return await asyncio.gather(*(one(text, answer) for text, answer in cases))

    return asyncio.run(scene())
