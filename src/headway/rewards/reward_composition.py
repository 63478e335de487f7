"""Several rewards for one sample, and different rewards for different tasks.

Guarantees: all terms of one sample are scored at the same time, so the slowest decides how long it takes, and no other
sample waits. If one term has no score, the sample has none, and its other terms are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.errors import ConfigError, RewardError
from headway.rewards.base import Reward
from headway.types import Episode, Score, Task

FALLBACK_REWARD = "default"
"""The reward of this name also scores tasks that no other reward claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One of the rewards that a score is the sum of."""

    name: str
    reward: Reward
    weight: float = 1.0
    domains: frozenset[str] = frozenset()
    """Domains or tags of the tasks that it scores. Empty: the domain with its own name."""

    def claims(self, task: Task) -> bool:
        """Return whether it scores the task, by the task's domain or by a `tag` in its data."""
        labels = {task.domain, task.data.get("tag")}
        return not labels.isdisjoint(self.domains or {self.name})


class WeightedSum:
    """Σ weight · reward; `Score.parts` has each summand under the name of its reward."""

    __slots__ = ("_terms",)

    def __init__(self, terms: Iterable[RewardTerm]) -> None:
        self._terms = tuple(terms)
        if not self._terms:
            raise ConfigError("needs at least one reward", key="rewards")

    async def score(self, episode: Episode) -> Score:
        if len(self._terms) == 1:
            return self._sum([await self._score_term(self._terms[0], episode)])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._score_term(term, episode), name=f"{episode.sample_id}/{term.name}")
                    for term in self._terms
                ]
        except* RewardError as failed:
            problem = failed.exceptions[0]
        else:
            return self._sum([task.result() for task in tasks])
        raise problem

    async def _score_term(self, term: RewardTerm, episode: Episode) -> Score:
        try:
            return await term.reward.score(episode)
        except RewardError as error:
            raise RewardError(f"rewards.{term.name}: {error}") from error
        except Exception as error:
            raise RewardError(f"rewards.{term.name}: {type(error).__name__}: {error}") from error

    def _sum(self, scores: list[Score]) -> Score:
        parts: dict[str, float] = {}
        for term, score in zip(self._terms, scores, strict=True):
            parts[term.name] = term.weight * score.value
            parts |= {f"{term.name}/{name}": value for name, value in score.parts.items()}
        return Score(value=sum(parts[term.name] for term in self._terms), parts=parts)


class RoutedReward:
    """Gives each task to the rewards that claim its domain."""

    def __init__(self, terms: Mapping[str, RewardTerm]) -> None:
        self._terms = dict(terms)
        self._sums: dict[tuple[str, ...], WeightedSum] = {}

    def names(self, task: Task) -> tuple[str, ...]:
        """Return the names of the rewards that score the task."""
        names = tuple(name for name, term in self._terms.items() if term.claims(task))
        return names or ((FALLBACK_REWARD,) if FALLBACK_REWARD in self._terms else ())

    async def score(self, episode: Episode) -> Score:
        names = self.names(episode.task)
        if not names:
            known = ", ".join(sorted(self._terms))
            raise RewardError(f"no reward for the domain {episode.task.domain!r}, only for: {known}")
        if names not in self._sums:
            self._sums[names] = WeightedSum(self._terms[name] for name in names)
        return await self._sums[names].score(episode)
