"""The reward protocol, and group-relative advantages without a tensor library.

A reward that fails raises an error; it never returns zero for an unknown score.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

from headway.types import Episode, Score


class Reward(Protocol):
    """Scores episodes concurrently. Blocking work belongs on a thread or in a process."""

    async def score(self, episode: Episode) -> Score:
        """Score one episode. Raises `RewardError` if there is no score."""
        ...


class EpisodeReturn:
    """The sum of the environment's own rewards, for agentic tasks that need no other reward."""

    __slots__ = ()

    async def score(self, episode: Episode) -> Score:
        return Score(value=sum(turn.reward for turn in episode.turns))


def group_relative_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (R − mean) / (std + 1e-6) over the members of one group."""
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all members of a group have the same reward, so that the group teaches nothing."""
    return all(reward == rewards[0] for reward in rewards)
