"""Several rewards for one sample, and different rewards for different tasks.

Guarantees: all terms of one sample are scored at the same time, so the slowest decides how long it takes, and no other
sample waits. If one term has no score, the sample has none, and its other terms are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from headway.errors import RewardError
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

    async def score(self, episode: Episode) -> Score:
        """Return the score without its weight. Any failure is a `RewardError` that names the term."""
        try:
            return await self.reward.score(episode)
        except RewardError as error:
            raise RewardError(f"rewards.{self.name}: {error}") from error
        except Exception as error:
            raise RewardError(f"rewards.{self.name}: {type(error).__name__}: {error}") from error


class RoutedReward:
    """Gives Σ weight · reward over the terms that claim the task; `Score.parts` has each summand under its name."""

    def __init__(self, terms: Iterable[RewardTerm]) -> None:
        self._terms = tuple(terms)

    async def score(self, episode: Episode) -> Score:
        terms = [term for term in self._terms if term.claims(episode.task)]
        terms = terms or [term for term in self._terms if term.name == FALLBACK_REWARD]
        if not terms:
            known = ", ".join(sorted(term.name for term in self._terms))
            raise RewardError(f"no reward for the domain {episode.task.domain!r}, only for: {known}")
        parts: dict[str, float] = {}
        for term, score in zip(terms, await _score_together(terms, episode), strict=True):
            parts[term.name] = term.weight * score.value
            parts |= {f"{term.name}/{name}": value for name, value in score.parts.items()}
        return Score(value=sum(parts[term.name] for term in terms), parts=parts)


async def _score_together(terms: list[RewardTerm], episode: Episode) -> list[Score]:
    if len(terms) == 1:
        return [await terms[0].score(episode)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(term.score(episode), name=f"{episode.sample_id}/{term.name}") for term in terms]
    except* RewardError as failed:
        problem = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise problem
