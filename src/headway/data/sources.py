"""Tasks from memory and from JSON-lines files, by position.

Guarantees: a position names the same task in every process with the same seed and data, whatever was asked before;
every epoch gives each task once, in an order of its own when shuffled. Does not tokenise: a prompt's text stays in
`Task.data` and the environment makes the first observation of it. Files are read whole when the source is made, so
that a bad line is refused before anything starts and a file that changes later changes nothing.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headway.data.files import json_lines
from headway.data.table import Selection, Tasks, TaskTable
from headway.errors import ConfigError
from headway.seeding import seeded
from headway.types import Task

_ORDERS_KEPT = 2  # positions that are given out again may belong to the epoch before


class ListSource:
    """Tasks of a sequence, repeated for `epochs` (`None`: for ever) and shuffled anew in each."""

    def __init__(self, tasks: Tasks, *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True) -> None:
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
            seeded(self._seed, "data", "epoch", epoch).shuffle(shuffled)
            order = self._orders[epoch] = array("L", shuffled)
            if len(self._orders) > _ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return order


def _digest(tasks: Tasks) -> bytes:
    if isinstance(tasks, TaskTable | Selection):
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
            for number, data in json_lines(path, key="data.path")
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
