"""Domains mixed in given shares, whatever their sizes.

Guarantees: any stretch of positions has each domain's share to within one task or so, and a position is the same task
in every process. A domain that runs out begins its next pass; the others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

from headway.data.base import SizedSource
from headway.types import Task

_PERIOD = 1000
"""Positions after which the pattern repeats: shares count to a tenth of a percent."""


class InterleavedSource:
    """Tasks of several endless sources, each with its share."""

    def __init__(self, sources: Mapping[str, SizedSource], shares: Mapping[str, float]) -> None:
        self._names = sorted(name for name, share in shares.items() if share > 0)
        self._sources = [sources[name] for name in self._names]
        total = sum(shares[name] for name in self._names)
        self._pattern = _pattern([shares[name] / total for name in self._names])
        self._per_period = [self._pattern.count(which) for which in range(len(self._names))]
        self._rank = [self._pattern[:place].count(which) for place, which in enumerate(self._pattern)]

    def __len__(self) -> int:
        """Tasks of all domains."""
        return sum(map(len, self._sources))

    def task(self, position: int) -> Task | None:
        """The task at `position`."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        period, place = divmod(position, _PERIOD)
        which = self._pattern[place]
        found = self._sources[which].task(period * self._per_period[which] + self._rank[place])
        return None if found is None else replace(found, position=position)

    def fingerprint(self) -> str:
        """Of the domains and of the pattern they come in."""
        parts = [*self._names, *(source.fingerprint() for source in self._sources), str(self._pattern)]
        return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _pattern(shares: list[float]) -> list[int]:
    """Which source each position of a period belongs to: always the one that is furthest behind its share."""
    taken = [0] * len(shares)
    pattern = []
    for place in range(1, _PERIOD + 1):
        behind = [share * place - count for share, count in zip(shares, taken, strict=True)]
        which = behind.index(max(behind))
        taken[which] += 1
        pattern.append(which)
    return pattern
