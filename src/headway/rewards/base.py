"""The reward protocol. A reward that fails raises; it never answers zero for 'I do not know'."""

from __future__ import annotations

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
