"""The reward protocol. A reward that fails raises; it never answers zero for 'I do not know'."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

from headway.types import Episode, Score


class Reward(Protocol):
    """Scores one episode, concurrently with others. Blocking work sits behind a thread or process."""

    async def score(self, episode: Episode) -> Score:
        """Raises `RewardError` when there is no verdict."""
        ...


class EpisodeReturn:
    """The sum of what the environment gave: the reward of agentic tasks that need no other judge."""

    __slots__ = ()

    async def score(self, episode: Episode) -> Score:
        return Score(value=sum(turn.reward for turn in episode.turns))


def group_relative_advantages(rewards: Sequence[float]) -> list[float]:
    """(R − mean) / (std + 1e-6) over the members of one group."""
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """All members got the same reward."""
    return all(reward == rewards[0] for reward in rewards)
