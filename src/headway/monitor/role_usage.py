"""Where the time of every role went: seconds by state, and how full the engines were.

Three kinds of roles, told apart by the events they send:

* a stage (`state`) is in one state at a time; its seconds by state add up to the window exactly;
* an engine (`request.start`, `request.end`) serves several requests at once: it is busy while it has one;
* a worker pool (`span.begin`, `span.end`) is busy while a span is open. A stage that also has spans is judged by
  them: its state says what its loop does, the spans say what its workers do. Scores being computed
  (`score.start`, `score.end`) are such a pool of their own, `scoring`: they run beside the reward stage.

The *bubble* of a role is the share of the window in which it was not busy.

It does not judge: a stage that waits may be healthy, and a busy engine may be computing what will be dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headway.monitor.event_log import LoggedEvent
from headway.monitor.measured_window import EventHandler, MeasuredWindow, WindowClock

STATES = ("idle", "waiting", "running", "emitting", "recovering", "degraded", "stopped", "failed")
BUSY_STATE = "running"
SCORING = "scoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUsage:
    """One stage or worker pool in the window."""

    role: str
    states: Mapping[str, float]
    """Seconds by state, in the order of `STATES`; empty for a role that only has spans."""
    spans: int
    """Spans ended, in the whole run."""
    concurrency: float
    """Spans open at once, time-weighted."""
    busy: float
    """Share of the window with an open span, or in state running where the role has no spans."""
    waiting: float
    """Share of the window in state waiting or idle: nothing to do."""
    blocked: float
    """Share of the window in state emitting: done, but the next stage does not take it."""

    @property
    def bubble(self) -> float:
        """Share of the window in which it was not busy."""
        return 1.0 - self.busy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """One engine, or all of them together, in the window."""

    engine: str
    busy: float
    """Share of the window with at least one request."""
    concurrency: float
    """Requests served at once, time-weighted."""
    peak: int
    """Most requests at once, in the whole run."""
    requests: int
    """Requests ended, in the whole run."""
    actions: int
    """Actions made by them, in the whole run."""
    actions_per_s: float
    """Actions of requests that ended in the window, by its length."""

    @property
    def bubble(self) -> float:
        """Share of the window in which it had no request."""
        return 1.0 - self.busy


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSummary:
    """All roles of a run."""

    roles: tuple[RoleUsage, ...]
    engines: tuple[EngineUsage, ...]
    pool: EngineUsage | None
    """Mean share and summed counts of all engines; None without engines."""


class _Reading(NamedTuple):
    """What an `_Occupancy` had counted up to some moment."""

    busy_s: float = 0.0
    area_s: float = 0.0
    actions: int = 0


class _Occupancy:
    """How many things are open at once, integrated over time."""

    __slots__ = ("_area_s", "_busy_s", "_open", "_since_s", "actions", "done", "peak")

    def __init__(self) -> None:
        self._open: set[object] = set()
        self._since_s = 0.0
        self._busy_s = 0.0
        self._area_s = 0.0
        self.done = 0
        self.actions = 0
        self.peak = 0

    @property
    def open(self) -> int:
        return len(self._open)

    def begin(self, time_s: float, key: object) -> None:
        self._settle(time_s)
        self._open.add(key)
        if len(self._open) > self.peak:
            self.peak = len(self._open)

    def end(self, time_s: float, key: object, actions: int) -> None:
        self._settle(time_s)
        self._open.discard(key)
        self.done += 1
        self.actions += actions

    def lose_all(self, time_s: float) -> None:
        """Its owner went down: what was open will not be ended by anybody."""
        self._settle(time_s)
        self._open.clear()

    def _settle(self, time_s: float) -> None:
        count = len(self._open)
        if count:
            passed_s = time_s - self._since_s
            self._busy_s += passed_s
            self._area_s += count * passed_s
        self._since_s = time_s

    def read(self, time_s: float) -> _Reading:
        self._settle(time_s)
        return _Reading(self._busy_s, self._area_s, self.actions)


class _StateClock:
    """Seconds a stage has spent in each state."""

    __slots__ = ("_seconds", "_since_s", "state")

    def __init__(self, state: str, since_s: float) -> None:
        self.state = state
        self._since_s = since_s
        self._seconds = dict.fromkeys(STATES, 0.0)

    def change(self, time_s: float, state: str) -> None:
        seconds = self._seconds
        seconds[self.state] = seconds.get(self.state, 0.0) + time_s - self._since_s
        self.state = state
        self._since_s = time_s

    def read(self, time_s: float) -> dict[str, float]:
        self.change(time_s, self.state)
        return dict(self._seconds)


class _Edge(NamedTuple):
    """Everything at one edge of the window."""

    states: dict[str, dict[str, float]]
    engines: dict[str, _Reading]
    spans: dict[str, _Reading]


class UsageRecorder:
    """Accumulates usage from `state`, `request.*`, `span.*` and `down` events."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self._stages: dict[str, _StateClock] = {}
        self._engines: defaultdict[str, _Occupancy] = defaultdict(_Occupancy)
        self._spans: defaultdict[str, _Occupancy] = defaultdict(_Occupancy)
        self._start = self._end = _Edge({}, {}, {})
        self.handlers: Mapping[str, EventHandler] = {
            "state": self._state,
            "request.start": self._request_start,
            "request.end": self._request_end,
            "span.begin": self._span_begin,
            "span.end": self._span_end,
            "score.start": self._score_start,
            "score.end": self._score_end,
            "down": self._down,
            "run.begin": self._run_begin,
            "step.end": self._step_end,
        }

    @property
    def states(self) -> dict[str, str]:
        """What every stage is doing now."""
        return {who: stage.state for who, stage in self._stages.items()}

    @property
    def engines_busy(self) -> tuple[int, int]:
        """How many engines have a request now, and how many there are."""
        return sum(1 for engine in self._engines.values() if engine.open), len(self._engines)

    @property
    def open_requests(self) -> int:
        """Requests being served now."""
        return sum(engine.open for engine in self._engines.values())

    def _state(self, event: LoggedEvent) -> None:
        time_s, who, data = event.time_s, event.who, event.data
        stage = self._stages.get(who)
        if stage is None:
            stage = self._stages[who] = self._first_heard(who, data["old"])
        stage.change(time_s, data["new"])

    def _first_heard(self, who: str, state: str) -> _StateClock:
        """A stage that speaks for the first time was in its old state from the start of the run, so that its
        seconds add up; where the window is open already, the part before it is noted at the window's edge."""
        first_s = self._clock.first_s or 0.0
        if self._clock.steps >= self._clock.warmup_steps > 0:
            self._start.states[who] = {state: self._clock.opened_s - first_s}
        return _StateClock(state, first_s)

    def _request_start(self, event: LoggedEvent) -> None:
        self._engines[event.who].begin(event.time_s, event.data["request"])

    def _request_end(self, event: LoggedEvent) -> None:
        time_s, who, data = event.time_s, event.who, event.data
        self._engines[who].end(time_s, data["request"], data.get("actions", 0))

    def _span_begin(self, event: LoggedEvent) -> None:
        self._spans[event.who].begin(event.time_s, event.data["span"])

    def _span_end(self, event: LoggedEvent) -> None:
        self._spans[event.who].end(event.time_s, event.data["span"], 0)

    def _score_start(self, event: LoggedEvent) -> None:
        self._spans[SCORING].begin(event.time_s, event.data["sample"])

    def _score_end(self, event: LoggedEvent) -> None:
        self._spans[SCORING].end(event.time_s, event.data["sample"], 0)

    def _down(self, event: LoggedEvent) -> None:
        for pool in (self._engines, self._spans):
            if event.who in pool:
                pool[event.who].lose_all(event.time_s)

    def _run_begin(self, event: LoggedEvent) -> None:
        """A new process: nobody ends what the one before it had open."""
        for pool in (self._engines, self._spans):
            for occupancy in pool.values():
                occupancy.lose_all(event.time_s)

    def _step_end(self, event: LoggedEvent) -> None:
        if self._clock.opens:
            self._start = self._read(event.time_s)
        elif self._clock.warmed_up:
            self._end = self._read(event.time_s)

    def _read(self, time_s: float) -> _Edge:
        return _Edge(
            {who: stage.read(time_s) for who, stage in self._stages.items()},
            {who: engine.read(time_s) for who, engine in self._engines.items()},
            {who: span.read(time_s) for who, span in self._spans.items()},
        )

    def usage(self) -> UsageSummary:
        """What the window shows so far."""
        window = self._clock.window()
        if window.warmed_up:
            start, end = self._start, self._end
        else:
            start, end = _Edge({}, {}, {}), self._read(window.end_s)
        names = dict.fromkeys([*end.states, *end.spans])
        roles = tuple(self._role(name, start, end, window) for name in names)
        engines = tuple(self._engine(name, start, end, window) for name in sorted(end.engines, key=natural_sort_key))
        return UsageSummary(roles=roles, engines=engines, pool=_pool(engines))

    def _role(self, name: str, start: _Edge, end: _Edge, window: MeasuredWindow) -> RoleUsage:
        length_s = window.seconds or 1.0
        states = _state_seconds(name, start, end)
        share = {state: seconds / length_s for state, seconds in states.items()}
        spans = self._spans.get(name)
        before, after = start.spans.get(name, _Reading()), end.spans.get(name, _Reading())
        span_busy = (after.busy_s - before.busy_s) / length_s
        return RoleUsage(
            role=name,
            states=states,
            spans=spans.done if spans else 0,
            concurrency=(after.area_s - before.area_s) / length_s,
            busy=span_busy if spans else share.get(BUSY_STATE, 0.0),
            waiting=share.get("waiting", 0.0) + share.get("idle", 0.0),
            blocked=share.get("emitting", 0.0),
        )

    def _engine(self, name: str, start: _Edge, end: _Edge, window: MeasuredWindow) -> EngineUsage:
        length_s = window.seconds or 1.0
        before, after = start.engines.get(name, _Reading()), end.engines[name]
        engine = self._engines[name]
        return EngineUsage(
            engine=name,
            busy=(after.busy_s - before.busy_s) / length_s,
            concurrency=(after.area_s - before.area_s) / length_s,
            peak=engine.peak,
            requests=engine.done,
            actions=engine.actions,
            actions_per_s=(after.actions - before.actions) / length_s,
        )


def _state_seconds(name: str, start: _Edge, end: _Edge) -> dict[str, float]:
    before = start.states.get(name, {})
    return {state: seconds - before.get(state, 0.0) for state, seconds in end.states.get(name, {}).items()}


def _pool(engines: Iterable[EngineUsage]) -> EngineUsage | None:
    every = tuple(engines)
    if not every:
        return None
    return EngineUsage(
        engine="engines",
        busy=sum(engine.busy for engine in every) / len(every),
        concurrency=sum(engine.concurrency for engine in every),
        peak=max(engine.peak for engine in every),
        requests=sum(engine.requests for engine in every),
        actions=sum(engine.actions for engine in every),
        actions_per_s=sum(engine.actions_per_s for engine in every),
    )


def natural_sort_key(name: str) -> tuple[str, int]:
    """Sorts `engine/2` before `engine/10`."""
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdecimal() else (name, -1)
