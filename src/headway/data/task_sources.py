"""Sources of tasks with random access, so that a cursor is a number and any position can be given out again.

Guarantees: a position names the same task in every process with the same seed and data, whatever was asked before.
Every epoch gives each task once, in a new order if shuffled. `InterleavedSource` gives each domain its share in any
range of positions, to within about one task; a domain that is used up begins again without the others waiting for it.
"""

import heapq
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from headway.data.task_table import TaskSelection, TaskSequence, TaskTable
from headway.errors import ConfigError, InvariantBroken
from headway.seeding import make_rng
from headway.types import Task

_CACHED_ORDERS = 2
"""Epochs whose order is kept; positions that are given out again may belong to the previous epoch."""
_PERIOD = 1000
"""Positions after which the pattern of domains repeats, so that shares count to a tenth of a percent."""


class TaskSource(Protocol):
    """Tasks by position: the same position gives the same task in every process of a run."""

    def task(self, position: int) -> Task | None:
        """Return the task at `position`, shuffled and repeated over epochs as configured; `None` past the end."""


class SizedSource(TaskSource, Protocol):
    """A source that knows how much data it has, and which."""

    def __len__(self) -> int:
        """Return the number of tasks in one epoch."""

    def fingerprint(self) -> str:
        """Return a hash of the tasks and their order, so that a resumed run notices other data."""


class TaskCursor:
    """A position in a source, and positions to be given out again.

    A position is waiting, given out, or unread, never two of these at once. Waiting positions come first, lowest first,
    so that the same state gives the same order in every process. The cursor does not know which groups were trained:
    after a crash the ledger says where to begin.
    """

    def __init__(self, source: TaskSource, cursor: int = 0, pending: Iterable[int] = ()) -> None:
        self._source = source
        self._cursor = cursor
        self._heap: list[int] = []
        self._pending: set[int] = set()
        for position in pending:
            self.requeue(position)

    def next(self) -> Task | None:
        """Return the next task; `None` while there is none, which a `requeue` may change."""
        if self._heap:
            position = heapq.heappop(self._heap)
            self._pending.remove(position)
            return self._source.task(position)
        task = self._source.task(self._cursor)
        if task is not None:
            self._cursor += 1
        return task

    def requeue(self, position: int) -> None:
        """Give `position` out again, before anything unread."""
        if not 0 <= position < self._cursor:
            raise InvariantBroken(f"position {position} was never given out: the cursor is at {self._cursor}")
        if position in self._pending:
            raise InvariantBroken(f"position {position} waits already to be given out again")
        self._pending.add(position)
        heapq.heappush(self._heap, position)

    def state(self) -> tuple[int, tuple[int, ...]]:
        """Return the first unread position and the waiting ones, from which a new cursor can be made."""
        return self._cursor, tuple(sorted(self._pending))


class ListSource:
    """Tasks of a sequence, repeated for `epochs` (`None`: without end) and shuffled anew in each."""

    def __init__(self, tasks: TaskSequence, *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True) -> None:
        if not len(tasks):
            raise ConfigError("a source needs at least one task", key="tasks", value=tasks)
        if epochs is not None and epochs < 1:
            raise ConfigError("must be at least 1, or none for no end", key="epochs", value=epochs)
        self._tasks, self._seed, self._epochs, self._shuffle = tasks, seed, epochs, shuffle
        self._orders: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, position: int) -> Task | None:
        _check_position(position)
        epoch, index = divmod(position, len(self._tasks))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return replace(self._tasks[self._order(epoch)[index]], position=position)

    def fingerprint(self) -> str:
        order = f"{self._seed} {self._epochs} {self._shuffle}".encode() if self._shuffle else str(self._epochs).encode()
        return blake2b(_digest(self._tasks) + order, digest_size=16).hexdigest()

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._tasks))
        order = self._orders.get(epoch)
        if order is None:
            shuffled = list(range(len(self._tasks)))
            make_rng(self._seed, "data", "epoch", epoch).shuffle(shuffled)
            order = self._orders[epoch] = array("L", shuffled)
            if len(self._orders) > _CACHED_ORDERS:
                del self._orders[next(iter(self._orders))]
        return order


def _check_position(position: int) -> None:
    if position < 0:
        raise IndexError(f"position {position} is before the first task")


def _digest(tasks: TaskSequence) -> bytes:
    if isinstance(tasks, TaskTable | TaskSelection):
        return tasks.digest()
    found = blake2b(digest_size=16)
    for task in (tasks[index] for index in range(len(tasks))):
        found.update(json.dumps([task.domain, list(task.prompt), dict(task.data)], sort_keys=True).encode())
    return found.digest()


class InterleavedSource:
    """Tasks of several endless sources, each with its share."""

    def __init__(self, sources: Mapping[str, SizedSource], shares: Mapping[str, float]) -> None:
        self._names = sorted(name for name, share in shares.items() if share > 0)
        self._sources = [sources[name] for name in self._names]
        total = sum(shares[name] for name in self._names)
        self._pattern = _make_pattern([shares[name] / total for name in self._names])
        self._per_period = [self._pattern.count(which) for which in range(len(self._names))]
        self._rank = [self._pattern[:place].count(which) for place, which in enumerate(self._pattern)]

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def task(self, position: int) -> Task | None:
        _check_position(position)
        period, place = divmod(position, _PERIOD)
        which = self._pattern[place]
        found = self._sources[which].task(period * self._per_period[which] + self._rank[place])
        return None if found is None else replace(found, position=position)

    def fingerprint(self) -> str:
        return _hash_texts([*self._names, *(source.fingerprint() for source in self._sources), str(self._pattern)])


def _make_pattern(shares: list[float]) -> list[int]:
    """Return the source of each position of a period: always the one that is furthest behind its share."""
    taken = [0] * len(shares)
    pattern = []
    for place in range(1, _PERIOD + 1):
        behind = [share * place - count for share, count in zip(shares, taken, strict=True)]
        which = behind.index(max(behind))
        taken[which] += 1
        pattern.append(which)
    return pattern


def _hash_texts(texts: Iterable[str]) -> str:
    return blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


class ProportionalSource:
    """Every task of several finite sources once, interleaved in proportion to their sizes."""

    def __init__(self, sources: Sequence[SizedSource]) -> None:
        self._sources = sources
        tasks = [(which, index) for which, source in enumerate(sources) for index in range(len(source))]
        self._order = sorted(tasks, key=lambda task: ((task[1] + 0.5) / len(sources[task[0]]), task[0]))

    def __len__(self) -> int:
        return len(self._order)

    def task(self, position: int) -> Task | None:
        _check_position(position)
        if position >= len(self._order):
            return None
        which, index = self._order[position]
        task = self._sources[which].task(index)
        return None if task is None else replace(task, position=position)

    def fingerprint(self) -> str:
        return _hash_texts(source.fingerprint() for source in self._sources)
