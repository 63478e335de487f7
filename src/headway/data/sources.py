"""Tasks from memory and from JSON-lines files, by position.

Guarantees: a position names the same task in every process with the same seed and data, whatever was asked before;
every epoch gives each task once, in an order of its own when shuffled. Does not tokenise: a prompt's text stays in
`Task.data` and the environment makes the first observation of it. Files are read whole when the source is made, so
that a bad line is refused before anything starts and a file that changes later changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from headway.errors import ConfigError
from headway.seeding import seeded
from headway.types import Task

_ORDERS_KEPT = 2  # positions that are given out again may belong to the epoch before


class ListSource:
    """Tasks of a sequence, repeated for `epochs` (`None`: for ever) and shuffled anew in each."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True) -> None:
        if not tasks:
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

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._tasks))
        order = self._orders.get(epoch)
        if order is None:
            shuffled = list(range(len(self._tasks)))
            seeded(self._seed, "data", "epoch", epoch).shuffle(shuffled)
            order = self._orders[epoch] = shuffled
            if len(self._orders) > _ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return order


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
        tasks = [task for path in files for task in _read(path, prompt_field, domain)]
        if not tasks:
            raise ConfigError(
                "has no tasks", key="data.path", value=", ".join(map(str, files)), hint="one JSON object a line"
            )
        super().__init__(tasks, seed=seed, epochs=epochs, shuffle=shuffle)


def _read(path: Path, prompt_field: str, domain: str) -> list[Task]:
    tasks: list[Task] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    tasks.append(_task(line, f"{path}:{number}", prompt_field, domain))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key="data.path", value=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", key="data.path", value=str(path)) from error
    return tasks


def _task(line: str, where: str, prompt_field: str, domain: str) -> Task:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}", hint="one JSON object a line") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {type(data).__name__} instead of an object", hint="one JSON object a line")
    if prompt_field not in data:
        raise ConfigError(f"{where}: no field {prompt_field!r} among {sorted(data)}", hint="name the prompt's field")
    own_domain = data.get("domain", domain)
    if not isinstance(own_domain, str):
        raise ConfigError(f"{where}: domain {own_domain!r} is not a text")
    return Task(position=0, domain=own_domain, data=data)
