"""Starting states of an environment as tasks: a position is a seed.

Guarantees: the same seed, tag and position give the same task in every process; those of validation come from another
stream than those of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from headway.environments.episode import SEED
from headway.seeding import seeded
from headway.types import Task

_STATED = 1000
"""What a source without end says of its length."""


class EpisodeSource:
    """One kind of environment. `identity`: what else decides what an episode is; `size`: `None` for no end."""

    def __init__(
        self, tag: str, *, seed: int, identity: Any, size: int | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        self._tag, self._seed, self._identity, self._size = tag, seed, identity, size
        self._data = dict(data or {})
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
        return Task(position=position, domain=self._tag, data={SEED: number, **self._data})

    def fingerprint(self) -> str:
        """Of the environment, its options and the seed."""
        parts = [self._tag, self._seed, self._stream, self._identity]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
