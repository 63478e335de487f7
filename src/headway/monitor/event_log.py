"""The event log: one append-only stream that every metric, timeline and report is computed from.

`EventLog` stamps each record of `events` with the event loop's time, so the same code logs virtual and wall-clock
runs, and hands it to every sink. On disk an event is one line, `[microseconds, kind, who, data]`; equal events give
equal bytes on every platform.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import IO, Any, NamedTuple

from headway.monitor.event_record import EVENT_TYPES, Event, GenericEvent
from headway.monitor.events import ErrorReport, StepEnd


class LoggedEvent(NamedTuple):
    """An event and when it happened."""

    time_s: float
    event: Event

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def who(self) -> str:
        return self.event.who

    @property
    def data(self) -> dict[str, Any]:
        return self.event.to_data()


EventSink = Callable[[LoggedEvent], None]
"""Sees every event, in order, as it happens. Must not block or raise."""


class EventLog:
    """Hands every event to every sink, stamped with the clock's time since the start of the run."""

    def __init__(self, clock: Callable[[], float], *sinks: EventSink) -> None:
        self._clock = clock
        self._sinks = list(sinks)

    def attach(self, sink: EventSink) -> None:
        """Add a sink; it sees what happens from now on."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        logged = _make_tuple(LoggedEvent, (self._clock(), event))
        for sink in self._sinks:
            sink(logged)


_make_tuple = tuple.__new__
"""Makes a named tuple without the Python function that calling its class goes through."""
_ENCODE = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_LINES_PER_CHUNK = 512
_NOT_AN_EVENT = (ValueError, TypeError, OverflowError, RecursionError)
"""What decoding raises for a line that is damaged."""
DAMAGED_LOG = "DamagedLog"
"""Names the error that stands in place of damaged lines."""
_FLUSHED_EVENTS = frozenset({"step.end", "validate.end", "checkpoint", "run.begin", "run.end"})


class JsonlSink:
    """Writes one JSON line per event.

    The file is flushed with every step: a killed process loses at most the events of the step under way.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: LoggedEvent) -> None:
        self._stream.write(encode_event(event) + "\n")
        if event.kind in _FLUSHED_EVENTS:
            self._stream.flush()


def encode_event(logged: LoggedEvent) -> str:
    """Return the line of an event, equal for equal events on every platform."""
    time_s, event = logged
    return _ENCODE([round(time_s * 1e6), event.kind, event.who, event.to_data()])


def decode_event(line: str) -> LoggedEvent:
    """Return the event that `encode_event` wrote."""
    micros, kind, who, data = json.loads(line)
    return LoggedEvent(micros / 1e6, parse_event(kind, who, data))


def parse_event(kind: str, who: str, data: Mapping[str, Any]) -> Event:
    """Return the record of an event as it is on disk. Raises `TypeError` if `data` is not a mapping.

    A kind that is not known, or an event without a field that its kind requires, becomes a `GenericEvent`. Keys that
    a kind does not have are ignored.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"the data of an event is an object, not {data!r}")
    record = EVENT_TYPES.get(kind)
    if record is None:
        return GenericEvent(kind=kind, who=who, data={**data})
    if record is StepEnd:
        metrics = {name: value for name, value in data.items() if name not in StepEnd.field_names}
        if metrics:
            data = {**{name: value for name, value in data.items() if name not in metrics}, "metrics": metrics}
    try:
        return record(who=who, **data)
    except TypeError:
        known = {name: value for name, value in data.items() if name in record.field_names}
        if record.required_names <= known.keys():
            return record(who=who, **known)
        return GenericEvent(kind=kind, who=who, data={**data})


def read_events(lines: Iterable[str]) -> Iterator[LoggedEvent]:
    """Yield the events of a log. Lines that are no events are left out, and an `ErrorReport` stands in their place.

    A torn last line, which a killed process leaves behind, ends the log.
    """
    rest, number = iter(lines), 0
    while chunk := list(islice(rest, _LINES_PER_CHUNK)):
        events = _decode_chunk(chunk)
        if events is None:
            yield from _decode_line_by_line(chain(chunk, rest), number)
            return
        yield from events
        number += len(chunk)


def _decode_chunk(lines: Sequence[str]) -> list[LoggedEvent] | None:
    """Decode many lines at once, which halves the cost; return None if one of them is not an event."""
    try:
        rows = json.loads(f"[{','.join(lines)}]")
        events = [LoggedEvent(micros / 1e6, parse_event(kind, who, data)) for micros, kind, who, data in rows]
    except _NOT_AN_EVENT:
        return None
    return events if len(events) == len(lines) else None


def _decode_line_by_line(lines: Iterable[str], lines_before: int) -> Iterator[LoggedEvent]:
    first = damaged = 0
    time_s = 0.0
    for number, line in enumerate(lines, start=lines_before + 1):
        try:
            event = decode_event(line)
        except _NOT_AN_EVENT:
            if line.strip():
                first, damaged = first or number, damaged + 1
            continue
        if damaged:
            yield _report_damage(event.time_s, first, damaged)
            first = damaged = 0
        yield event
        time_s = event.time_s
    if damaged > 1:
        yield _report_damage(time_s, first, damaged)


def _report_damage(time_s: float, first: int, lines: int) -> LoggedEvent:
    message = f"line {first} is damaged" if lines == 1 else f"{lines} lines from line {first} on are damaged"
    return LoggedEvent(time_s, ErrorReport(who="log", error=DAMAGED_LOG, message=f"{message} and left out"))
