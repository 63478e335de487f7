"""Group-relative advantages in plain Python: what the line needs to close a group without a tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


def group_relative(rewards: Sequence[float]) -> list[float]:
    """(R − mean) / (std + 1e-6) over the members of one group."""
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def teaches_nothing(rewards: Sequence[float]) -> bool:
    """All members got the same reward."""
    return all(reward == rewards[0] for reward in rewards)
