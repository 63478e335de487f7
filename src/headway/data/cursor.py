"""Which task comes next: what is to be given out again, then what was never given out.

Guarantees: a position is waiting, given out, or unread, never two of these at once. Positions to be given out again
come first, lowest first, so that the same state gives the same order in every process. Does not know which groups
were trained: after a crash the ledger says where to begin.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from headway.data.base import TaskSource
from headway.errors import InvariantBroken
from headway.types import Task


class Cursor:
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
