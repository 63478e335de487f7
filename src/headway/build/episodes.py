"""Starting states of an environment as tasks: a position is a seed, and a row where there are rows.

Guarantees: the same seed, tag and position give the same task in every process; those of validation come from another
stream than those of training. A row's own seed goes before the drawn one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from headway.data import SizedSource
from headway.environments.episode import SEED
from headway.seeding import seeded
from headway.types import Task

_STATED = 1000
"""What a source without end says of its length."""


class EpisodeSource:
    """One kind of environment. `identity`: what else decides what an episode is; `size`: `None` for no end."""

    def __init__(
        self,
        tag: str,
        *,
        seed: int,
        identity: Any,
        size: int | None = None,
        data: Mapping[str, Any] | None = None,
        rows: SizedSource | None = None,
    ) -> None:
        self._tag, self._seed, self._identity, self._size = tag, seed, identity, size
        self._data, self._rows = dict(data or {}), rows
        self._stream = "episodes" if size is None else "held-out episodes"

    def __len__(self) -> int:
        return _STATED if self._size is None else self._size

    def task(self, position: int) -> Task | None:
        """The task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if self._size is not None and position >= self._size:
            return None
        number = seeded(self._seed, self._stream, self._tag, position).randrange(0, 2**31)
        row = self._rows.task(position) if self._rows is not None else None
        given = {} if row is None else row.data
        return Task(position=position, domain=self._tag, data={SEED: number, **given, **self._data})

    def fingerprint(self) -> str:
        """Of the environment, its options, the seed and the rows."""
        parts = [self._tag, self._seed, self._stream, self._identity]
        parts += [] if self._rows is None else [self._rows.fingerprint()]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class HeldOutSource:
    """Several sources that end, one after another by the share of each that was given out; every task once."""

    def __init__(self, sources: Sequence[SizedSource]) -> None:
        self._sources = sources
        places = [(which, index) for which, source in enumerate(sources) for index in range(len(source))]
        self._order = sorted(places, key=lambda place: ((place[1] + 0.5) / len(sources[place[0]]), place[0]))

    def __len__(self) -> int:
        return len(self._order)

    def task(self, position: int) -> Task | None:
        """The task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if position >= len(self._order):
            return None
        which, index = self._order[position]
        found = self._sources[which].task(index)
        return None if found is None else replace(found, position=position)

    def fingerprint(self) -> str:
        """Of all of them."""
        return blake2b("\0".join(source.fingerprint() for source in self._sources).encode(), digest_size=16).hexdigest()
