"""The wait-for graph: who waits for what, since when, so that a stalled run can say so.

Waits register on entry and leave on exit. Parts with many waiters (the hub) register a reporter instead, asked
only when the graph is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class WaitEdge(NamedTuple):
    """One edge of the graph."""

    owner: str
    """Who waits."""
    what: str
    """For what, in words."""
    on: str
    """Who could end the wait."""
    since_s: float


class WaitGraph:
    """All waits of one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[int, WaitEdge] = {}
        self._next = 0
        self._reporters: list[Callable[[], list[WaitEdge]]] = []

    def report_with(self, reporter: Callable[[], list[WaitEdge]]) -> None:
        """Ask `reporter` for further edges whenever the graph is looked at."""
        self._reporters.append(reporter)

    @contextmanager
    def waiting(self, owner: str, what: str, on: str) -> Iterator[None]:
        """Registers a wait for the length of the block."""
        key = self._next
        self._next += 1
        self._waits[key] = WaitEdge(owner, what, on, self._clock())
        try:
            yield
        finally:
            del self._waits[key]

    def edges(self) -> list[WaitEdge]:
        """Every wait there is now, oldest first."""
        found = list(self._waits.values())
        for reporter in self._reporters:
            found.extend(reporter())
        return sorted(found, key=lambda wait: (wait.since_s, wait.owner, wait.what))

    def cycle(self) -> list[str]:
        """Owners that wait for each other in a ring, or nothing."""
        after: dict[str, list[str]] = {}
        for wait in self.edges():
            after.setdefault(wait.owner, []).append(wait.on)
        free: set[str] = set()  # found to be in no ring

        def follow(path: list[str]) -> list[str]:
            for on in after.get(path[-1], []):
                if on in path:
                    return [*path[path.index(on) :], on]
                if on not in free and (ring := follow([*path, on])):
                    return ring
            free.add(path[-1])
            return []

        return next((ring for start in after if (ring := follow([start]))), [])

    def describe(self) -> str:
        """The graph as text, one line a wait."""
        now = self._clock()
        lines = [
            f"  {wait.owner} waits for {wait.on}: {wait.what} (for {now - wait.since_s:.1f} s)" for wait in self.edges()
        ]
        ring = self.cycle()
        if ring:
            lines.append("  ring: " + " → ".join(ring))
        return "\n".join(lines) or "  nobody waits"
