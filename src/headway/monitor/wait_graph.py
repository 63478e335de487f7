"""The wait-for graph: who waits for what and since when, so that a stalled run can name its culprit.

A wait is registered for the length of a block. A wait inside the block of another one, in the same task or in a task
that was started there, hides the outer one: the innermost says most. Components with many waiters, such as the hub,
register a reporter instead, which is called only when somebody looks at the graph.

Whoever is waited for and waits for nobody is a culprit: a reward function, an environment, a request on a replica, the
trainer. A ring is a deadlock only if none of its members also waits for somebody outside who still works.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple, Protocol, runtime_checkable

MOST_CULPRITS = 3
"""Culprits that the text names first; all of them are among the waits below."""


Text = str | Callable[[], str]
"""Words, or a function that returns them when somebody looks at the graph."""


class WaitEdge(NamedTuple):
    """One edge of the graph."""

    owner: str
    """Who waits."""
    what: str
    """What it waits for, in words."""
    on: str
    """Who could end the wait."""
    since_s: float

    def describe(self, now_s: float) -> str:
        return f"{self.owner} waits for {self.on}: {self.what} (for {max(0.0, now_s - self.since_s):.1f} s)"


WaitReporter = Callable[[], Iterable[WaitEdge]]
"""Returns the waits of a component at this moment."""


@runtime_checkable
class WaitingBackend(Protocol):
    """A back end that knows what it waits for."""

    def waits(self) -> Iterable[WaitEdge]:
        """Return its waits at this moment."""


class RegisteredWait:
    """A context manager that keeps one wait in its graph."""

    __slots__ = ("_graph", "_inner", "_on", "_outer", "_owner", "_since_s", "_token", "_what")

    def __init__(self, graph: "WaitGraph", owner: str, what: Text, on: Text) -> None:
        self._graph, self._inner = graph, 0
        self._owner, self._what, self._on, self._since_s = owner, what, on, graph.clock()
        self._outer: RegisteredWait | None = None
        self._token: Token[RegisteredWait | None] | None = None

    def __enter__(self) -> None:
        self._outer = _ENCLOSING.get()
        if self._outer is not None:
            self._outer._inner += 1
        self._token = _ENCLOSING.set(self)
        self._graph._waits[self] = None

    def __exit__(self, *exception: object) -> None:
        del self._graph._waits[self]
        assert self._token is not None
        _ENCLOSING.reset(self._token)
        if self._outer is not None:
            self._outer._inner -= 1

    @property
    def is_innermost(self) -> bool:
        return not self._inner

    def make_edge(self) -> WaitEdge:
        what, on = (text if isinstance(text, str) else text() for text in (self._what, self._on))
        return WaitEdge(self._owner, what, on, self._since_s)


_ENCLOSING: ContextVar[RegisteredWait | None] = ContextVar("enclosing wait", default=None)


class WaitGraph:
    """All waits of one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._waits: dict[RegisteredWait, None] = {}
        self._reporters: list[WaitReporter] = []

    def add_reporter(self, reporter: WaitReporter) -> None:
        """Ask `reporter` for further edges whenever somebody looks at the graph."""
        self._reporters.append(reporter)

    @contextmanager
    def reporting(self, reporter: WaitReporter) -> Iterator[None]:
        """Ask `reporter` for further edges for the length of the block."""
        self._reporters.append(reporter)
        try:
            yield
        finally:
            self._reporters.remove(reporter)

    def waiting(self, owner: str, what: Text, on: Text) -> RegisteredWait:
        """Return a context manager that registers a wait for the length of its block."""
        return RegisteredWait(self, owner, what, on)

    def edges(self) -> list[WaitEdge]:
        """Return every wait of this moment, oldest first."""
        found = [wait.make_edge() for wait in list(self._waits) if wait.is_innermost]
        found += [edge for reporter in self._reporters for edge in reporter()]
        return sorted(found, key=lambda wait: (wait.since_s, wait.owner, wait.what))

    def find_culprits(self) -> list[WaitEdge]:
        """Return the waits for those who wait for nobody themselves, oldest first."""
        edges = self.edges()
        owners = {edge.owner for edge in edges}
        return [edge for edge in edges if edge.on not in owners]

    def find_cycle(self) -> list[str]:
        """Return owners that wait for each other in a ring and for nobody who works, or an empty list."""
        edges = self.edges()
        after: dict[str, list[str]] = {}
        for wait in edges:
            after.setdefault(wait.owner, []).append(wait.on)
        moving = {edge.on for edge in edges} - after.keys()
        while more := {edge.owner for edge in edges if edge.on in moving} - moving:
            moving |= more
        without_ring = set(moving)

        def follow(path: list[str]) -> list[str]:
            for on in after.get(path[-1], []):
                if on in path:
                    return [*path[path.index(on) :], on]
                if on not in without_ring and (ring := follow([*path, on])):
                    return ring
            without_ring.add(path[-1])
            return []

        starts = [owner for owner in after if owner not in moving]
        return next((ring for start in starts if (ring := follow([start]))), [])

    def describe(self) -> str:
        """Return the graph as text: the culprits, or the ring if there is one; then one line per wait."""
        now_s, edges = self.clock(), self.edges()
        if not edges:
            return "  nobody waits"
        ring = self.find_cycle()
        lines = [f"  ring: {' → '.join(ring)}"] if ring else []
        lines += [f"  culprit: {edge.describe(now_s)}" for edge in self.find_culprits()[:MOST_CULPRITS]]
        return "\n".join([*lines, *(f"  {edge.describe(now_s)}" for edge in edges)])
