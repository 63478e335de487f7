"""Several rewards for one sample, and different ones for different tasks.

Guarantees: the parts of one sample are judged at the same time, so the slowest decides how long it takes and no other
sample waits for it; where one part has no verdict the sample has none, and the others are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.errors import ConfigError, RewardError
from headway.rewards.base import Reward
from headway.types import Episode, Score, Task

FALLBACK_REWARD = "default"
"""The reward of this name also judges tasks that no other claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One of the rewards that a score is made of."""

    name: str
    reward: Reward
    weight: float = 1.0
    domains: frozenset[str] = frozenset()
    """Domains or tags of the tasks that it judges. Empty: the one with its own name."""

    def judges(self, task: Task) -> bool:
        """Whether this reward is for that task: by its domain, or by a `tag` in its data."""
        labels = {task.domain, task.data.get("tag")}
        return not labels.isdisjoint(self.domains or {self.name})


class WeightedSum:
    """Σ weight · reward; `Score.parts` has each summand under the name of its reward."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Iterable[RewardTerm]) -> None:
        self._parts = tuple(parts)
        if not self._parts:
            raise ConfigError("needs at least one reward", key="rewards")

    async def score(self, episode: Episode) -> Score:
        if len(self._parts) == 1:
            return self._sum([await self._judge(self._parts[0], episode)])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._judge(part, episode), name=f"{episode.sample_id}/{part.name}")
                    for part in self._parts
                ]
        except* RewardError as failed:
            problem = failed.exceptions[0]
        else:
            return self._sum([task.result() for task in tasks])
        raise problem

    async def _judge(self, part: RewardTerm, episode: Episode) -> Score:
        try:
            return await part.reward.score(episode)
        except RewardError as error:
            raise RewardError(f"rewards.{part.name}: {error}") from error
        except Exception as error:
            raise RewardError(f"rewards.{part.name}: {type(error).__name__}: {error}") from error

    def _sum(self, scores: list[Score]) -> Score:
        parts: dict[str, float] = {}
        for part, score in zip(self._parts, scores, strict=True):
            parts[part.name] = part.weight * score.value
            parts |= {f"{part.name}/{name}": value for name, value in score.parts.items()}
        return Score(value=sum(parts[part.name] for part in self._parts), parts=parts)


class RoutedReward:
    """Gives each task to the rewards that claim its domain."""

    def __init__(self, parts: Mapping[str, RewardTerm]) -> None:
        self._parts = dict(parts)
        self._sums: dict[tuple[str, ...], WeightedSum] = {}

    def names(self, task: Task) -> tuple[str, ...]:
        """Which rewards judge the task."""
        names = tuple(name for name, part in self._parts.items() if part.judges(task))
        return names or ((FALLBACK_REWARD,) if FALLBACK_REWARD in self._parts else ())

    async def score(self, episode: Episode) -> Score:
        names = self.names(episode.task)
        if not names:
            known = ", ".join(sorted(self._parts))
            raise RewardError(f"no reward for the domain {episode.task.domain!r}, only for: {known}")
        if names not in self._sums:
            self._sums[names] = WeightedSum(self._parts[name] for name in names)
        return await self._sums[names].score(episode)
