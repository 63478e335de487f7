"""Measures where the time of every role went: seconds by state, and how full the engines were.

Three kinds of roles are told apart by the events they emit:

* a stage (`StateChange`) is in one state at a time; its seconds by state add up to the window exactly;
* an engine (`RequestStart`, `RequestEnd`) serves several requests at once and is busy while it has one;
* a worker pool (`SpanBegin`, `SpanEnd`) is busy while a span is open. A stage that also has spans is measured by them:
  its state says what its loop does, the spans say what its workers do. Scores being computed (`ScoreStart`, `ScoreEnd`)
  are a pool of their own, `scoring`, because they run beside the reward stage.

The *bubble* of a role is the share of the window in which it was not busy. A bubble is no verdict: a stage that waits
may be healthy, and a busy engine may compute what will be dropped.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.monitor import events
from headway.monitor.event_record import Event
from headway.monitor.measured_window import EventHandler, MeasuredWindow, WindowClock

STATES = ("idle", "waiting", "running", "emitting", "recovering", "degraded", "stopped", "failed")
BUSY_STATES = ("running", "degraded")
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
    """Share of the window with an open span, or in state running if the role has no spans."""
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
    """Actions generated for them, in the whole run."""
    actions_per_s: float
    """Actions of requests that ended in the window, divided by its length."""

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


class _OccupancyTotals(NamedTuple):
    """Sums of an `_Occupancy` at some moment."""

    busy_s: float = 0.0
    area_s: float = 0.0
    actions: int = 0


class _Occupancy:
    """Number of things that are open at once, integrated over time."""

    __slots__ = ("_area_s", "_busy_s", "_since_s", "actions", "done", "open", "peak")

    def __init__(self) -> None:
        self.open: set[object] = set()
        self._since_s = self._busy_s = self._area_s = 0.0
        self.done = self.actions = self.peak = 0

    def begin(self, time_s: float, key: object) -> None:
        self._integrate_until(time_s)
        self.open.add(key)
        if len(self.open) > self.peak:
            self.peak = len(self.open)

    def end(self, time_s: float, key: object, actions: int = 0) -> None:
        self._integrate_until(time_s)
        self.open.discard(key)
        self.done += 1
        self.actions += actions

    def clear(self, time_s: float) -> None:
        """Close everything because its owner went down: nobody else will."""
        self._integrate_until(time_s)
        self.open.clear()

    def _integrate_until(self, time_s: float) -> None:
        count = len(self.open)
        if count:
            passed_s = time_s - self._since_s
            self._busy_s += passed_s
            self._area_s += count * passed_s
        self._since_s = time_s

    def totals(self, time_s: float) -> _OccupancyTotals:
        self._integrate_until(time_s)
        return _OccupancyTotals(self._busy_s, self._area_s, self.actions)


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

    def totals(self, time_s: float) -> dict[str, float]:
        self.change(time_s, self.state)
        return dict(self._seconds)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals of every role at one edge of the window."""

    states: dict[str, dict[str, float]] = field(default_factory=dict)
    engines: dict[str, _OccupancyTotals] = field(default_factory=dict)
    spans: dict[str, _OccupancyTotals] = field(default_factory=dict)


class UsageRecorder:
    """Accumulates usage from states, requests, spans and scores."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self._stages: dict[str, _StateClock] = {}
        self._engines: defaultdict[str, _Occupancy] = defaultdict(_Occupancy)
        self._spans: defaultdict[str, _Occupancy] = defaultdict(_Occupancy)
        self._start, self._end = _Totals(), _Totals()
        self.handlers: Mapping[type[Event], EventHandler] = {
            events.StateChange: self._change_state,
            events.RequestStart: lambda time_s, event: self._engines[event.who].begin(time_s, event.request),
            events.RequestEnd: lambda time_s, event: self._engines[event.who].end(time_s, event.request, event.actions),
            events.SpanBegin: lambda time_s, event: self._spans[event.who].begin(time_s, event.span),
            events.SpanEnd: lambda time_s, event: self._spans[event.who].end(time_s, event.span),
            events.ScoreStart: lambda time_s, event: self._spans[SCORING].begin(time_s, event.sample),
            events.ScoreEnd: lambda time_s, event: self._spans[SCORING].end(time_s, event.sample),
            events.BackendDown: self._close_all_of_backend,
            events.RunBegin: self._close_all,
            events.StepEnd: self._end_step,
        }

    @property
    def states(self) -> dict[str, str]:
        """State of every stage now."""
        return {who: stage.state for who, stage in self._stages.items()}

    @property
    def engines_busy(self) -> tuple[int, int]:
        """Number of engines that have a request now, and of all engines."""
        return sum(1 for engine in self._engines.values() if engine.open), len(self._engines)

    @property
    def open_requests(self) -> int:
        return sum(len(engine.open) for engine in self._engines.values())

    def _change_state(self, time_s: float, event: events.StateChange) -> None:
        stage = self._stages.get(event.who)
        if stage is None:
            stage = self._stages[event.who] = self._add_stage(event.who, event.old)
        stage.change(time_s, event.new)

    def _add_stage(self, who: str, state: str) -> _StateClock:
        """Return the clock of a stage that emits its first event.

        It counts as having been in its old state from the start of the run, so that its seconds add up. If the window
        is open already, the part before the window is noted at the window's edge.
        """
        first_s = self._clock.first_s or 0.0
        if self._clock.steps >= self._clock.warmup_steps > 0:
            self._start.states[who] = {state: self._clock.opened_s - first_s}
        return _StateClock(state, first_s)

    def _close_all_of_backend(self, time_s: float, event: events.BackendDown) -> None:
        for pool in (self._engines, self._spans):
            if event.who in pool:
                pool[event.who].clear(time_s)

    def _close_all(self, time_s: float, event: events.RunBegin) -> None:
        """Close what an earlier process of the run had open: nobody else will."""
        for occupancy in (*self._engines.values(), *self._spans.values()):
            occupancy.clear(time_s)

    def _end_step(self, time_s: float, event: events.StepEnd) -> None:
        if self._clock.is_opening:
            self._start = self._totals(time_s)
        elif self._clock.warmed_up:
            self._end = self._totals(time_s)

    def _totals(self, time_s: float) -> _Totals:
        return _Totals(
            {who: stage.totals(time_s) for who, stage in self._stages.items()},
            {who: engine.totals(time_s) for who, engine in self._engines.items()},
            {who: span.totals(time_s) for who, span in self._spans.items()},
        )

    def usage(self) -> UsageSummary:
        """Return what the window shows so far."""
        window = self._clock.window()
        start, end = (self._start, self._end) if window.warmed_up else (_Totals(), self._totals(window.end_s))
        names = dict.fromkeys([*end.states, *end.spans])
        roles = tuple(self._summarize_role(name, start, end, window) for name in names)
        in_order = sorted(end.engines, key=natural_sort_key)
        engines = tuple(self._summarize_engine(name, start, end, window) for name in in_order)
        return UsageSummary(roles=roles, engines=engines, pool=_summarize_pool(engines))

    def _summarize_role(self, name: str, start: _Totals, end: _Totals, window: MeasuredWindow) -> RoleUsage:
        length_s = window.seconds or 1.0
        before_s = start.states.get(name, {})
        states = {state: total_s - before_s.get(state, 0.0) for state, total_s in end.states.get(name, {}).items()}
        share = {state: seconds / length_s for state, seconds in states.items()}
        spans, busy = self._spans.get(name), sum(share.get(state, 0.0) for state in BUSY_STATES)
        before, after = start.spans.get(name, _OccupancyTotals()), end.spans.get(name, _OccupancyTotals())
        return RoleUsage(
            role=name,
            states=states,
            spans=spans.done if spans else 0,
            concurrency=(after.area_s - before.area_s) / length_s,
            busy=(after.busy_s - before.busy_s) / length_s if spans else busy,
            waiting=share.get("waiting", 0.0) + share.get("idle", 0.0),
            blocked=share.get("emitting", 0.0),
        )

    def _summarize_engine(self, name: str, start: _Totals, end: _Totals, window: MeasuredWindow) -> EngineUsage:
        length_s = window.seconds or 1.0
        before, after = start.engines.get(name, _OccupancyTotals()), end.engines[name]
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


def _summarize_pool(engines: Sequence[EngineUsage]) -> EngineUsage | None:
    if not engines:
        return None
    return EngineUsage(
        engine="engines",
        busy=sum(engine.busy for engine in engines) / len(engines),
        concurrency=sum(engine.concurrency for engine in engines),
        peak=max(engine.peak for engine in engines),
        requests=sum(engine.requests for engine in engines),
        actions=sum(engine.actions for engine in engines),
        actions_per_s=sum(engine.actions_per_s for engine in engines),
    )


def natural_sort_key(name: str) -> tuple[str, int]:
    """Return a key that sorts `engine/2` before `engine/10`."""
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdecimal() else (name, -1)
