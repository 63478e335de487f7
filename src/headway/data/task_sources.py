"""A source of tasks with random access, so that a cursor is a number and any position can be given out again."""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from headway.data.data_files import read_json_lines
from headway.data.task_table import TaskSelection, TaskSequence, TaskTable
from headway.errors import ConfigError, InvariantBroken
from headway.seeding import make_rng
from headway.types import Task


class TaskSource(Protocol):
    """Tasks by position: the same position gives the same task in every process of a run."""

    def task(self, position: int) -> Task | None:
        """The task at `position`, shuffled and repeated over epochs as configured; `None` past the end."""
        ...


class SizedSource(TaskSource, Protocol):
    """A source that knows how much data it has, and which."""

    def __len__(self) -> int:
        """Tasks in one epoch."""
        ...

    def fingerprint(self) -> str:
        """Differs where the tasks or their order do; the same in every process."""
        ...


class TaskCursor:
    """A place in a source."""

    def __init__(self, source: TaskSource, cursor: int = 0, pending: Iterable[int] = ()) -> None:
        self._source = source
        self._cursor = cursor
        self._heap: list[int] = []
        self._pending: set[int] = set()
        for position in pending:
            self.requeue(position)

    def next(self) -> Task | None:
        """The next task; `None` while there is none, which a `requeue` may change."""
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
        """The first unread position, and those to be given out again: what a new cursor is made from."""
        return self._cursor, tuple(sorted(self._pending))


_ORDERS_KEPT = 2  # positions that are given out again may belong to the epoch before


class ListSource:
    """Tasks of a sequence, repeated for `epochs` (`None`: for ever) and shuffled anew in each."""

    def __init__(self, tasks: TaskSequence, *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True) -> None:
        if not len(tasks):
            raise ConfigError("a source needs at least one task", key="tasks", value=tasks)
        if epochs is not None and epochs < 1:
            raise ConfigError("must be at least 1, or none for no end", key="epochs", value=epochs)
        self._tasks = tasks
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        self._orders: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        """Tasks in one epoch."""
        return len(self._tasks)

    def task(self, position: int) -> Task | None:
        """The task at `position`, counted over all epochs; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        epoch, index = divmod(position, len(self._tasks))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return replace(self._tasks[self._order(epoch)[index]], position=position)

    def fingerprint(self) -> str:
        """Of the tasks and of the order they come in."""
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
            if len(self._orders) > _ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return order


def _digest(tasks: TaskSequence) -> bytes:
    if isinstance(tasks, TaskTable | TaskSelection):
        return tasks.digest()
    found = blake2b(digest_size=16)
    for index in range(len(tasks)):
        task = tasks[index]
        found.update(json.dumps([task.domain, list(task.prompt), dict(task.data)], sort_keys=True).encode())
    return found.digest()


class JsonlSource(ListSource):
    """Tasks of one or several files with one JSON object a line, in the order of the files.

    The whole object becomes `Task.data`, with the prompt's text (or messages) under `prompt_field`; a `domain` of
    its own overrides the default one. Blank lines are skipped.
    """

    def __init__(
        self,
        paths: Path | str | Iterable[Path | str],
        *,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        prompt_field: str = "prompt",
        domain: str = "default",
    ) -> None:
        files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        tasks = [
            _task(data, f"{path}:{number}", prompt_field, domain)
            for path in files
            for number, data in read_json_lines(path, key="data.path")
        ]
        if not tasks:
            raise ConfigError(
                "has no tasks", key="data.path", value=", ".join(map(str, files)), hint="one JSON object a line"
            )
        super().__init__(tasks, seed=seed, epochs=epochs, shuffle=shuffle)


def _task(data: dict[str, Any], where: str, prompt_field: str, domain: str) -> Task:
    if prompt_field not in data:
        raise ConfigError(f"{where}: no field {prompt_field!r} among {sorted(data)}", hint="name the prompt's field")
    own_domain = data.get("domain", domain)
    if not isinstance(own_domain, str):
        raise ConfigError(f"{where}: domain {own_domain!r} is not a text")
    return Task(position=0, domain=own_domain, data=data)


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


class ProportionalSource:
    """Every task of several finite sources once, interleaved in proportion to their sizes."""

    def __init__(self, sources: Sequence[SizedSource]) -> None:
        self._sources = sources
        tasks = [(which, index) for which, source in enumerate(sources) for index in range(len(source))]
        self._order = sorted(tasks, key=lambda task: ((task[1] + 0.5) / len(sources[task[0]]), task[0]))

    def __len__(self) -> int:
        """Return the number of tasks of all sources."""
        return len(self._order)

    def task(self, position: int) -> Task | None:
        """Return the task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if position >= len(self._order):
            return None
        which, index = self._order[position]
        task = self._sources[which].task(index)
        return None if task is None else replace(task, position=position)

    def fingerprint(self) -> str:
        """Return a hash of all sources."""
        return blake2b("\0".join(source.fingerprint() for source in self._sources).encode(), digest_size=16).hexdigest()
