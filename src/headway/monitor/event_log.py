"""The event log: one append-only stream that every metric, timeline and report is computed from.

An event is (time, kind, who, data). Time is the event loop's, so the same code logs virtual and wall-clock runs;
data holds JSON scalars only, in the order given, so that a log is reproducible byte for byte.

| kind | who | data |
|---|---|---|
| `state` | stage | `old`, `new` |
| `group.start` | `generate` | `group`, `position`, `served` |
| `sample.start` | `generate` | `sample` |
| `sample.finish` | `generate` | `sample`, `actions`, `oldest`, `newest`; of an episode `success`, `turns`, `invalid` |
| `sample.end` | who ended it | `sample`, `end` (`trained`, `dropped`, `saved`), `reason` for a drop |
| `sample.reopen` | `restore` | `sample`: goes on in a new line; an end it had is undone |
| `group.ready` | `reward` | `group`, `reward` (mean); `equal` where all are and it is kept to fill a batch |
| `group.drop` | who dropped it | `group`, `reason` |
| `group.train` | `train` | `group`, `trained`, `oldest`, `in_flight`, `in_queue` (lag split), `samples`, `actions` |
| `step.begin` / `step.end` | `train` | `trained` (before / after), `groups`, and metrics at the end; of groups with \
equal rewards, `replaced` for it and `filled` in |
| `served` | engine | `version`, `trained` |
| `request.start` / `request.end` | engine | `request`, and `actions`, `finish` at the end |
| `span.begin` / `span.end` | role such as `param_update`, `ref_logp` | `span` (unique), `name` |
| `score.start` / `score.end` | `reward` | `sample` |
| `error` | who failed | `error`, `message` |
| `retry` / `restart` / `down` / `up` | who | `attempt` or `reason`; `version` for an engine that is up again |
| `join` / `leave` | engine | `engines` (of the run, with or without it); a newcomer serves when it is `up` |
| `degrade` / `restore` | `recovery` | `level` |
| `checkpoint` / `checkpoint.remove` | `flow` | `trained` |
| `validate.begin` / `validate.end` | `validate` | `trained`; at the end `reward`, `samples`, the outcomes of episodes |
| `stall` | `flow` | `graph` |
| `run.begin` | `run` | `resumed`, `trained`, and what is known about the run, such as `steps` and `machine` |
| `run.end` | `run` | `trained`, `finished`, `reason` where it did not finish |

A log is appended to when a run is resumed, with times that go on; every process begins its part with `run.begin`.
What a killed process had under way has no end in the log: `run.begin` is the end of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, Any, NamedTuple, Protocol

from headway.errors import HeadwayError


class LoggedEvent(NamedTuple):
    """One thing that happened."""

    time_s: float
    kind: str
    who: str
    data: dict[str, Any]


class EventSink(Protocol):
    """Anything that wants to see events, in order, as they happen. Must not block or raise."""

    def __call__(self, event: LoggedEvent) -> None: ...


class EventLog:
    """Hands every event to every sink, stamped with the clock's time since the start of the run."""

    def __init__(self, clock: Callable[[], float], *sinks: EventSink) -> None:
        self._clock = clock
        self._sinks = list(sinks)

    def attach(self, sink: EventSink) -> None:
        """Add a sink; it sees what happens from now on."""
        self._sinks.append(sink)

    def emit(self, kind: str, who: str, **data: Any) -> None:
        """Record one event."""
        event = LoggedEvent(self._clock(), kind, who, data)
        for sink in self._sinks:
            sink(event)


_ENCODE = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_AT_ONCE = 512
_FLUSHED = frozenset({"step.end", "validate.end", "checkpoint", "run.begin", "run.end"})


class JsonlSink:
    """Writes one JSON line an event. `[time, kind, who, data]`, time in whole microseconds.

    Flushed with every step: a killed process loses the events of the step under way at most.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: LoggedEvent) -> None:
        self._stream.write(encode_event(event) + "\n")
        if event.kind in _FLUSHED:
            self._stream.flush()


def encode_event(event: LoggedEvent) -> str:
    """The canonical text of an event, equal for equal events on every platform."""
    row = [round(event.time_s * 1e6), event.kind, event.who, event.data]
    return _ENCODE(row)


def decode_event(line: str) -> LoggedEvent:
    """The event that `encode_event` wrote."""
    micros, kind, who, data = json.loads(line)
    return LoggedEvent(micros / 1e6, kind, who, data)


def read_events(lines: Iterable[str]) -> Iterator[LoggedEvent]:
    """The events of a log. A torn last line, which a killed process leaves behind, is the end of the log."""
    rest, number = iter(lines), 0
    while chunk := list(islice(rest, _AT_ONCE)):
        events = _decoded(chunk)
        if events is None:
            yield from _line_by_line(chain(chunk, rest), number)
            return
        yield from events
        number += len(chunk)


def _decoded(lines: Sequence[str]) -> list[LoggedEvent] | None:
    """Many lines at once, which costs half; nothing where one of them is not an event."""
    try:
        rows = json.loads(f"[{','.join(lines)}]")
        events = [LoggedEvent(micros / 1e6, kind, who, data) for micros, kind, who, data in rows]
    except (ValueError, TypeError):
        return None
    return events if len(events) == len(lines) else None


def _line_by_line(lines: Iterable[str], before: int) -> Iterator[LoggedEvent]:
    torn: HeadwayError | None = None
    for number, line in enumerate(lines, start=before + 1):
        if torn:
            raise torn
        if not line.strip():
            continue
        try:
            event = decode_event(line)
        except (ValueError, TypeError) as error:
            torn = HeadwayError(f"event log, line {number}: not an event ({error}): {line[:80]!r}")
            continue
        yield event
