"""A run in the trace format of Chrome and Perfetto, for ui.perfetto.dev or chrome://tracing.

One process for the flow, with a thread for each stage and one for the training steps; one process for each engine,
with its requests as asynchronous slices, because they overlap; one process for the worker pools; counters for the
outstanding groups, the two versions and the requests of each engine. Drops and faults are instants.

Rows come out in the order of the events, so a trace can be written while it is read. Times are microseconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any

from headway.monitor.event_log import LoggedEvent
from headway.monitor.run_report import to_plain_json
from headway.monitor.sample_lag import VersionTracker
from headway.monitor.timeline_lanes import MARKER_KINDS

TraceRow = dict[str, Any]

FLOW_PID = 1
POOLS_PID = 2
FIRST_ENGINE_PID = 100
STEPS_TID = 1


class PerfettoTraceBuilder:
    """Turns events into rows of a trace, one call an event."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[str, int] = {}
        self._states: dict[str, tuple[float, str]] = {}
        self._requests: dict[str, set[object]] = {}
        self._spans: dict[str, str] = {}
        self._first_s: float | None = None
        self._last_s = 0.0
        self._step: tuple[float, int] | None = None
        self._outstanding = OutstandingGroups()

    def rows(self, event: LoggedEvent) -> Iterator[TraceRow]:
        """What one event adds to the trace."""
        if self._first_s is None:
            self._first_s = event.time_s
            yield from self._open()
        self._last_s = event.time_s
        kind = event.kind
        if kind == "state":
            yield from self._state(event)
        elif kind.startswith("request."):
            yield from self._request(event)
        elif kind.startswith("span."):
            yield from self._span(event)
        elif kind.startswith("step."):
            yield from self._train(event)
        elif kind == "sample.end" and event.data["end"] == "dropped":
            yield self._instant(event, f"drop: {event.data.get('reason', 'unknown')}")
        elif kind in MARKER_KINDS:
            yield self._instant(event, kind)
            yield from self._lose(event)
        if self._outstanding.take(event):
            yield from self._counters(event.time_s)

    def finish(self) -> Iterator[TraceRow]:
        """What was still open at the last event."""
        for who, (since_s, state) in self._states.items():
            yield self._slice(since_s, self._last_s, state, FLOW_PID, self._tids[who])

    def _open(self) -> Iterator[TraceRow]:
        yield _name("process_name", FLOW_PID, 0, "flow")
        yield _name("process_name", POOLS_PID, 0, "worker pools")
        yield _name("thread_name", FLOW_PID, STEPS_TID, "training steps")

    def _thread(self, who: str) -> Iterator[TraceRow]:
        if who not in self._tids:
            self._tids[who] = STEPS_TID + 1 + len(self._tids)
            yield _name("thread_name", FLOW_PID, self._tids[who], who)

    def _process(self, engine: str) -> Iterator[TraceRow]:
        if engine not in self._pids:
            self._pids[engine] = FIRST_ENGINE_PID + len(self._pids)
            self._requests[engine] = set()
            yield _name("process_name", self._pids[engine], 0, engine)

    def _state(self, event: LoggedEvent) -> Iterator[TraceRow]:
        time_s, who, data = event.time_s, event.who, event.data
        yield from self._thread(who)
        since_s, state = self._states.get(who, (self._first_s or 0.0, data["old"]))
        if time_s > since_s:
            yield self._slice(since_s, time_s, state, FLOW_PID, self._tids[who])
        self._states[who] = (time_s, data["new"])

    def _request(self, event: LoggedEvent) -> Iterator[TraceRow]:
        time_s, kind, who, data = event.time_s, event.kind, event.who, event.data
        yield from self._process(who)
        pid, pending = self._pids[who], self._requests[who]
        phase = "b" if kind == "request.start" else "e"
        if phase == "b":
            pending.add(data["request"])
        else:
            pending.discard(data["request"])
        yield _async(phase, time_s, "request", "request", f"{who}:{data['request']}", pid, data)
        yield _counter(time_s, "requests", pid, {"open": len(pending)})

    def _lose(self, event: LoggedEvent) -> Iterator[TraceRow]:
        """An engine that is down, or of a process that is gone, holds no requests; they have no end in the trace."""
        lost = {"down": [event.who], "run.begin": list(self._requests)}.get(event.kind, [])
        for engine in lost:
            if self._requests.get(engine):
                self._requests[engine].clear()
                yield _counter(event.time_s, "requests", self._pids[engine], {"open": 0})

    def _span(self, event: LoggedEvent) -> Iterator[TraceRow]:
        time_s, kind, who, data = event.time_s, event.kind, event.who, event.data
        key = f"{who}:{data['span']}"
        if kind == "span.begin":
            name = self._spans[key] = f"{who}: {data.get('name', '')}"
            yield _async("b", time_s, name, who, key, POOLS_PID, data)
        elif key in self._spans:
            yield _async("e", time_s, self._spans.pop(key), who, key, POOLS_PID, data)

    def _train(self, event: LoggedEvent) -> Iterator[TraceRow]:
        if event.kind == "step.begin":
            self._step = (event.time_s, event.data["trained"])
        elif self._step is not None:
            row = self._slice(self._step[0], event.time_s, f"step {event.data['trained']}", FLOW_PID, STEPS_TID)
            yield {**row, "args": event.data}
            self._step = None

    def _counters(self, time_s: float) -> Iterator[TraceRow]:
        held = self._outstanding
        yield _counter(time_s, "outstanding", FLOW_PID, {"groups": held.groups})
        if held.versions.trained is not None:
            yield _counter(time_s, "trained", FLOW_PID, {"version": held.versions.trained})
        if held.versions.served is not None:
            yield _counter(time_s, "served", FLOW_PID, {"version": held.versions.served})

    def _instant(self, event: LoggedEvent, name: str) -> TraceRow:
        pid = self._pids.get(event.who, FLOW_PID)
        tid = self._tids.get(event.who, 0)
        args = {"who": event.who, **event.data}
        return {"ph": "i", "ts": _us(event.time_s), "name": name, "pid": pid, "tid": tid, "s": "p", "args": args}

    def _slice(self, begin_s: float, end_s: float, name: str, pid: int, tid: int) -> TraceRow:
        return {
            "ph": "X", "ts": _us(begin_s), "dur": _us(end_s) - _us(begin_s), "name": name, "pid": pid, "tid": tid,
        }  # fmt: skip


class OutstandingGroups:
    """Groups that hold a slot: started, and neither dropped nor both trained and served."""

    def __init__(self) -> None:
        self.versions = VersionTracker()
        self.groups = 0
        self._unserved: Counter[int] = Counter()
        """Trained groups by the version that holds what they taught."""

    def take(self, event: LoggedEvent) -> bool:
        """Whether this event changed anything."""
        kind, data = event.kind, event.data
        if kind == "group.start":
            self.groups += 1
        elif kind == "group.drop":
            self.groups -= 1
        elif kind == "group.train":
            self._unserved[data["trained"] + 1] += 1
            return False
        elif self.versions.take(event):
            self._release()
        else:
            return False
        return True

    def _release(self) -> None:
        served = self.versions.served
        for version in [version for version in self._unserved if served is not None and version <= served]:
            self.groups -= self._unserved.pop(version)


def make_trace_rows(events: Iterable[LoggedEvent]) -> Iterator[TraceRow]:
    """Every row of the trace of a run."""
    writer = PerfettoTraceBuilder()
    for event in events:
        yield from writer.rows(event)
    yield from writer.finish()


def write_perfetto_trace(events: Iterable[LoggedEvent], stream: IO[str]) -> int:
    """Write the trace as JSON, one row a line; returns how many rows."""
    stream.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for row in make_trace_rows(events):
        stream.write(",\n" if count else "\n")
        stream.write(_encode(row))
        count += 1
    stream.write("\n]}\n")
    return count


def _encode(row: TraceRow) -> str:
    try:
        return json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        # A metric that is not a number: rare, and JSON has no word for it.
        return json.dumps(to_plain_json(row), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _us(time_s: float) -> int:
    return round(time_s * 1e6)


def _name(what: str, pid: int, tid: int, name: str) -> TraceRow:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(time_s: float, name: str, pid: int, args: dict[str, int]) -> TraceRow:
    return {"ph": "C", "ts": _us(time_s), "name": name, "pid": pid, "args": args}


def _async(phase: str, time_s: float, name: str, category: str, key: str, pid: int, args: dict[str, Any]) -> TraceRow:
    return {
        "ph": phase, "ts": _us(time_s), "name": name, "cat": category, "id": key, "pid": pid, "tid": 0, "args": args,
    }  # fmt: skip
