"""The wait-for graph: who waits for what and since when, so that a stalled run can explain itself.

A wait is registered for the length of a block. Components with many waiters, such as the hub, register a reporter
instead, which is called only when somebody looks at the graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class WaitEdge(NamedTuple):
    """One edge of the graph."""

    owner: str
    """Who waits."""
    what: str
    """What it waits for, in words."""
    on: str
    """Who could end the wait."""
    since_s: float


class WaitGraph:
    """All waits of one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[int, WaitEdge] = {}
        self._next_key = 0
        self._reporters: list[Callable[[], list[WaitEdge]]] = []

    def add_reporter(self, reporter: Callable[[], list[WaitEdge]]) -> None:
        """Ask `reporter` for further edges whenever somebody looks at the graph."""
        self._reporters.append(reporter)

    @contextmanager
    def waiting(self, owner: str, what: str, on: str) -> Iterator[None]:
        """Register a wait for the length of the block."""
        key = self._next_key
        self._next_key += 1
        self._waits[key] = WaitEdge(owner, what, on, self._clock())
        try:
            yield
        finally:
            del self._waits[key]

    def edges(self) -> list[WaitEdge]:
        """Return every wait of this moment, oldest first."""
        found = [*self._waits.values(), *(edge for reporter in self._reporters for edge in reporter())]
        return sorted(found, key=lambda wait: (wait.since_s, wait.owner, wait.what))

    def find_cycle(self) -> list[str]:
        """Return owners that wait for each other in a ring, or an empty list."""
        after: dict[str, list[str]] = {}
        for wait in self.edges():
            after.setdefault(wait.owner, []).append(wait.on)
        without_ring: set[str] = set()

        def follow(path: list[str]) -> list[str]:
            for on in after.get(path[-1], []):
                if on in path:
                    return [*path[path.index(on) :], on]
                if on not in without_ring and (ring := follow([*path, on])):
                    return ring
            without_ring.add(path[-1])
            return []

        return next((ring for start in after if (ring := follow([start]))), [])

    def describe(self) -> str:
        """Return the graph as text, one line per wait."""
        now = self._clock()
        edges = self.edges()
        lines = [f"  {edge.owner} waits for {edge.on}: {edge.what} (for {now - edge.since_s:.1f} s)" for edge in edges]
        if ring := self.find_cycle():
            lines.append("  ring: " + " → ".join(ring))
        return "\n".join(lines) or "  nobody waits"
