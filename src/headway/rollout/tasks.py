"""Task groups that end the same way every time, and starting tasks in one that may be ending."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class InOrder(dict[Any, None]):
    """The part of a set that a task group uses, in the order of adding."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class OrderedTaskGroup(asyncio.TaskGroup):
    """Cancels what is left in the order it was started. asyncio's own keeps a set, ordered by memory address: the
    end of a run would read differently each time."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks = InOrder()  # type: ignore[assignment]


def spawn(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """A task of `group`, or nothing if the group is being torn down: then what it would do is no longer wanted."""
    try:
        return group.create_task(coroutine, name=name)
    except RuntimeError:
        coroutine.close()
        return None
