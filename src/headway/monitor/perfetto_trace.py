"""Writes a run in the trace format of Chrome and Perfetto, for ui.perfetto.dev or chrome://tracing.

The flow is one process, with a thread for each stage and one for the training steps. Each engine is a process, with
its requests as asynchronous slices, because they overlap; the worker pools share one process. Counters show the
outstanding groups, the two versions and the requests of each engine. Drops and faults are instants.

Rows come out in the order of the events, so a trace can be written while a log is read. Times are microseconds.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from headway.monitor import events
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import Event
from headway.monitor.run_report import to_plain_json
from headway.monitor.sample_lag import VersionTracker
from headway.monitor.timeline_lanes import MARKER_EVENTS

TraceRow = dict[str, Any]

FLOW_PID = 1
POOLS_PID = 2
FIRST_ENGINE_PID = 100
STEPS_TID = 1


class PerfettoTraceBuilder:
    """Turns events into rows of a trace, one call per event."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[str, int] = {}
        self._states: dict[str, tuple[float, str]] = {}
        self._requests: dict[str, set[str]] = {}
        self._spans: dict[str, str] = {}
        self._first_s: float | None = None
        self._last_s = 0.0
        self._step_begun_s: float | None = None
        self._outstanding = OutstandingGroups()

    def rows(self, logged: LoggedEvent) -> Iterator[TraceRow]:
        """Yield what one event adds to the trace."""
        time_s, event = logged
        if self._first_s is None:
            self._first_s = time_s
            yield _make_name_row("process_name", FLOW_PID, 0, "flow")
            yield _make_name_row("process_name", POOLS_PID, 0, "worker pools")
            yield _make_name_row("thread_name", FLOW_PID, STEPS_TID, "training steps")
        self._last_s = time_s
        match event:
            case events.StateChange():
                yield from self._change_state(time_s, event)
            case events.RequestStart() | events.RequestEnd():
                yield from self._count_request(time_s, event)
            case events.SpanBegin() | events.SpanEnd():
                yield from self._add_span(time_s, event)
            case events.StepBegin():
                self._step_begun_s = time_s
            case events.StepEnd():
                if self._step_begun_s is not None:
                    row = _make_slice(self._step_begun_s, time_s, f"step {event.trained}", STEPS_TID)
                    yield {**row, "args": event.to_data()}
                    self._step_begun_s = None
            case events.SampleEnd(end="dropped"):
                yield self._make_instant(time_s, event, f"drop: {event.reason or 'unknown'}")
            case _ if isinstance(event, MARKER_EVENTS):
                yield self._make_instant(time_s, event, event.kind)
                yield from self._clear_requests(time_s, event)
        if self._outstanding.observe(event):
            yield from self._count_groups_and_versions(time_s)

    def finish(self) -> Iterator[TraceRow]:
        """Yield what was still open at the last event."""
        for who, (since_s, state) in self._states.items():
            yield _make_slice(since_s, self._last_s, state, self._tids[who])

    def _change_state(self, time_s: float, event: events.StateChange) -> Iterator[TraceRow]:
        who = event.who
        if who not in self._tids:
            self._tids[who] = STEPS_TID + 1 + len(self._tids)
            yield _make_name_row("thread_name", FLOW_PID, self._tids[who], who)
        since_s, state = self._states.get(who, (self._first_s or 0.0, event.old))
        if time_s > since_s:
            yield _make_slice(since_s, time_s, state, self._tids[who])
        self._states[who] = (time_s, event.new)

    def _count_request(self, time_s: float, event: events.RequestStart | events.RequestEnd) -> Iterator[TraceRow]:
        who = event.who
        if who not in self._pids:
            self._pids[who] = FIRST_ENGINE_PID + len(self._pids)
            self._requests[who] = set()
            yield _make_name_row("process_name", self._pids[who], 0, who)
        pid, pending = self._pids[who], self._requests[who]
        is_start = isinstance(event, events.RequestStart)
        phase, change = ("b", pending.add) if is_start else ("e", pending.discard)
        change(event.request)
        yield _make_async_row(phase, time_s, "request", "request", f"{who}:{event.request}", pid, event.to_data())
        yield _make_counter(time_s, "requests", pid, {"open": len(pending)})

    def _clear_requests(self, time_s: float, event: Event) -> Iterator[TraceRow]:
        """Set the counters of engines to 0 that are down or belong to an earlier process of the run."""
        if isinstance(event, events.BackendDown | events.RunBegin):
            for engine in [event.who] if isinstance(event, events.BackendDown) else self._requests:
                if self._requests.get(engine):
                    self._requests[engine].clear()
                    yield _make_counter(time_s, "requests", self._pids[engine], {"open": 0})

    def _add_span(self, time_s: float, event: events.SpanBegin | events.SpanEnd) -> Iterator[TraceRow]:
        key = f"{event.who}:{event.span}"
        if isinstance(event, events.SpanBegin):
            name = self._spans[key] = f"{event.who}: {event.name}"
            yield _make_async_row("b", time_s, name, event.who, key, POOLS_PID, event.to_data())
        elif key in self._spans:
            yield _make_async_row("e", time_s, self._spans.pop(key), event.who, key, POOLS_PID, event.to_data())

    def _count_groups_and_versions(self, time_s: float) -> Iterator[TraceRow]:
        yield _make_counter(time_s, "outstanding", FLOW_PID, {"groups": self._outstanding.groups})
        versions = self._outstanding.versions
        if versions.trained is not None:
            yield _make_counter(time_s, "trained", FLOW_PID, {"version": versions.trained})
        if versions.served is not None:
            yield _make_counter(time_s, "served", FLOW_PID, {"version": versions.served})

    def _make_instant(self, time_s: float, event: Event, name: str) -> TraceRow:
        pid, tid = self._pids.get(event.who, FLOW_PID), self._tids.get(event.who, 0)
        args = {"who": event.who, **event.to_data()}
        return {"ph": "i", "ts": _to_us(time_s), "name": name, "pid": pid, "tid": tid, "s": "p", "args": args}


class OutstandingGroups:
    """Counts groups that hold a slot: started, and neither dropped nor both trained and served."""

    def __init__(self) -> None:
        self.versions = VersionTracker()
        self.groups = 0
        self._unserved: Counter[int] = Counter()
        """Trained groups by the version that they went into."""

    def observe(self, event: Event) -> bool:
        """Follow an event; return whether it changed anything."""
        match event:
            case events.GroupStart():
                self.groups += 1
            case events.GroupDrop():
                self.groups -= 1
            case events.GroupTrain():
                self._unserved[event.trained + 1] += 1
                return False
            case _:
                if not self.versions.observe(event):
                    return False
                served = self.versions.served
                for version in [version for version in self._unserved if served is not None and version <= served]:
                    self.groups -= self._unserved.pop(version)
        return True


def make_trace_rows(logged_events: Iterable[LoggedEvent]) -> Iterator[TraceRow]:
    builder = PerfettoTraceBuilder()
    for logged in logged_events:
        yield from builder.rows(logged)
    yield from builder.finish()


def write_perfetto_trace(logged_events: Iterable[LoggedEvent], stream: IO[str]) -> int:
    """Write the trace as JSON, one row per line; return the number of rows."""
    stream.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for row in make_trace_rows(logged_events):
        stream.write(",\n" if count else "\n")
        stream.write(_encode(row))
        count += 1
    stream.write("\n]}\n")
    return count


def _encode(row: TraceRow) -> str:
    try:
        return json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:  # a metric that is not finite, which JSON cannot express
        return json.dumps(to_plain_json(row), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _to_us(time_s: float) -> int:
    return round(time_s * 1e6)


def _make_name_row(what: str, pid: int, tid: int, name: str) -> TraceRow:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _make_slice(begin_s: float, end_s: float, name: str, tid: int) -> TraceRow:
    ts = _to_us(begin_s)
    return {"ph": "X", "ts": ts, "dur": _to_us(end_s) - ts, "name": name, "pid": FLOW_PID, "tid": tid}


def _make_counter(time_s: float, name: str, pid: int, args: Mapping[str, int]) -> TraceRow:
    return {"ph": "C", "ts": _to_us(time_s), "name": name, "pid": pid, "args": args}


def _make_async_row(
    phase: str, time_s: float, name: str, category: str, key: str, pid: int, args: Mapping[str, Any]
) -> TraceRow:
    ts = _to_us(time_s)
    return {"ph": phase, "ts": ts, "name": name, "cat": category, "id": key, "pid": pid, "tid": 0, "args": args}
