"""The index of an event log: a summary of each part of it, so that a long log is opened without reading it again.

A part is a stretch of the log, or a piece of a large one that ends with a training step. Its summary holds what every
stage, engine and pool did in at most `MOST_BINS` equal bins of time, the curves of its steps, versions, faults, and the
state at its end, from which the next part goes on. So the size of an index grows with steps and parts, not with events.

`LogIndexer` makes summaries from events as they happen: about a microsecond for each.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.monitor import events
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import Event
from headway.monitor.role_usage import SCORING
from headway.monitor.scalar_series import ScalarMeter, ScalarPoint
from headway.monitor.timeline_lanes import MARKER_EVENTS, describe_marker

INDEX_VERSION = 1
MOST_BINS = 256
MOST_ENGINES = 64
OTHER_ENGINES = "engine/other engines"
_FIRST_WIDTH_S = 1 / 64
_MOST_MARKERS = 300
"""Markers of a part that are kept; all are counted."""


@dataclass(slots=True, kw_only=True)
class PartSummary:
    """What happened in one part of the log."""

    stretch: int
    """Number of the stretch that the part belongs to."""
    begin: int
    end: int
    """Bytes of the stretch, without compression, that the part begins and ends at."""
    head: int = 0
    """Checksum of the first bytes, which shows that the index belongs to the log."""
    is_last: bool = False
    """Whether the stretch ends with this part."""
    events: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    width_s: float = _FIRST_WIDTH_S
    first_bin: int = 0
    """Place of the first bin: it begins at `first_bin · width_s`."""
    series: dict[str, array[float]] = field(default_factory=dict)
    """Amount × seconds in each bin, by lane: `state/train/running`, `engine/engine/0`. Lanes `drop/…` are counts."""
    peaks: dict[str, float] = field(default_factory=dict)
    points: list[ScalarPoint] = field(default_factory=list)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin, end and version of each training step."""
    versions: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, trained, served."""
    markers: list[tuple[float, str, str, str]] = field(default_factory=list)
    """Time, kind, who, text."""
    faults: dict[str, int] = field(default_factory=dict)
    """Faults by kind, and restarts by `restart <who>`."""
    segments: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    """`begin` or `end` of a process of the run, its time, and what it said."""
    state: dict[str, Any] = field(default_factory=dict)
    """State at the end."""

    def to_json(self) -> dict[str, Any]:
        names = list(dict.fromkeys(name for point in self.points for name in point.values))
        rows = [[p.step, p.time_s, p.rewind, *(_shorten(p.values.get(name)) for name in names)] for p in self.points]
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("series", "points")}
        series = {key: b64encode(values.tobytes()).decode() for key, values in self.series.items()}
        return {"index": INDEX_VERSION, **plain, "series": series, "names": names, "rows": rows}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PartSummary:
        """Return the summary that `to_json` was called on. Raises `ValueError`, `KeyError` or `TypeError`."""
        data = dict(data)
        if data.pop("index") != INDEX_VERSION:
            raise ValueError("an index of another version")
        names, series = data.pop("names"), {}
        for key, text in data.pop("series").items():
            series[key] = array("f")
            series[key].frombytes(b64decode(text))
        points = [
            ScalarPoint(step, time_s, {n: v for n, v in zip(names, values, strict=True) if v is not None}, rewind)
            for step, time_s, rewind, *values in data.pop("rows")
        ]
        return PartSummary(**data, series=series, points=points)


def _shorten(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


class OccupancyBins:
    """Adds up amount × time in equal bins, whose width doubles whenever there would be too many."""

    __slots__ = ("end_s", "first", "peaks", "series", "width_s")

    def __init__(self, start_s: float) -> None:
        self.width_s, self.first = _FIRST_WIDTH_S, math.floor(start_s / _FIRST_WIDTH_S)
        self.end_s = (self.first + MOST_BINS) * self.width_s
        self.series: dict[str, array[float]] = {}
        self.peaks: dict[str, float] = {}

    def add(self, key: str, from_s: float, to_s: float, amount: float) -> None:
        """Add `amount` for a stretch of time, which does not begin before the first bin."""
        if to_s <= from_s:
            return
        values = self._find(key, to_s)
        width_s, first = self.width_s, self.first
        place, last = int(from_s / width_s) - first, int(to_s / width_s) - first
        if place == last:
            values[place] += amount * (to_s - from_s)
            return
        values[place] += amount * ((place + first + 1) * width_s - from_s)
        for between in range(place + 1, last):
            values[between] += amount * width_s
        values[last] += amount * (to_s - (last + first) * width_s)

    def count(self, key: str, time_s: float) -> None:
        """Count one happening."""
        values = self._find(key, time_s)
        values[int(time_s / self.width_s) - self.first] += 1

    def _find(self, key: str, time_s: float) -> array[float]:
        while time_s >= self.end_s:
            self._double_width()
        values = self.series.get(key)
        if values is None:
            values = self.series[key] = array("f", bytes(4 * MOST_BINS))
        return values

    def _double_width(self) -> None:
        shift = self.first & 1  # pairs begin at even places
        for key, values in self.series.items():
            padded = [0.0] * shift + list(values) + [0.0] * shift
            pairs = [padded[place] + padded[place + 1] for place in range(0, MOST_BINS + shift, 2)]
            self.series[key] = array("f", pairs + [0.0] * (MOST_BINS - len(pairs)))
        self.width_s, self.first = 2 * self.width_s, self.first >> 1
        self.end_s = (self.first + MOST_BINS) * self.width_s


class LogIndexer:
    """Makes the summary of a part from its events, one call for each."""

    def __init__(self) -> None:
        self._meter = ScalarMeter()
        self._levels: dict[str, tuple[float, float]] = {}
        """Amount of each lane, and since when."""
        self._open: dict[str, set[str]] = {}
        """Requests, spans and scores under way, by lane."""
        self._engine_lanes: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._groups: dict[int, str] = {}
        """Lane of each group that was started and neither trained nor dropped."""
        self._lags: Counter[int] = Counter()
        self._step_begun_s: float | None = None
        self._has_begun = False
        self._begin_part(0.0)
        count = (events.RequestStart, events.RequestEnd, events.SpanBegin, events.SpanEnd)
        self._handlers: dict[type[Event], Callable[[float, Any], None]] = {
            events.StateChange: self._change_state,
            **dict.fromkeys((*count, events.ScoreStart, events.ScoreEnd), self._count),
            events.SampleEnd: self._end_sample,
            events.SampleReopen: self._reopen_sample,
            events.GroupStart: lambda time_s, event: self._move_group(time_s, event.group, "groups/in flight"),
            events.GroupReady: lambda time_s, event: self._move_group(time_s, event.group, "groups/ready"),
            events.GroupDrop: lambda time_s, event: self._move_group(time_s, event.group, ""),
            events.GroupTrain: self._train_group,
            events.StepBegin: self._begin_step,
            events.StepEnd: self._end_step,
            events.WeightsServed: self._follow_versions,
            events.ResourceUsage: self._note_usage,
        }

    def _begin_part(self, start_s: float) -> None:
        self._bins = OccupancyBins(start_s)
        self.part = PartSummary(stretch=0, begin=0, end=0, first_s=start_s, last_s=start_s)

    def __call__(self, logged: LoggedEvent) -> None:
        time_s, event = logged
        if not self._has_begun:
            self._has_begun = True
            self._begin_part(time_s)
        part = self.part
        part.events += 1
        part.last_s = time_s = max(time_s, part.last_s)
        point = self._meter(logged)
        kind = type(event)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(time_s, event)
        elif isinstance(event, MARKER_EVENTS):
            self._mark(time_s, event)
        if point is not None:
            if kind is events.StepEnd:
                point.values.update({f"lag_samples/{lag}": count for lag, count in self._lags.items()})
                self._lags.clear()
            part.points.append(point)

    def _set(self, key: str, time_s: float, amount: float) -> None:
        since_s, old = self._levels.get(key, (time_s, 0.0))
        if old:
            self._bins.add(key, since_s, time_s, old)
        self._levels[key] = (time_s, amount)
        if amount > self._bins.peaks.get(key, 0.0):
            self._bins.peaks[key] = amount

    def _change_state(self, time_s: float, event: events.StateChange) -> None:
        who, old = event.who, self._states.get(event.who)
        if old is None:
            self._bins.add(f"state/{who}/{event.old}", self.part.first_s, time_s, 1.0)
        else:
            self._set(f"state/{who}/{old}", time_s, 0.0)
        self._states[who] = event.new
        self._set(f"state/{who}/{event.new}", time_s, 1.0)

    def _count(self, time_s: float, event: Any) -> None:
        kind = type(event)
        if kind is events.RequestStart or kind is events.RequestEnd:
            lane, key = self._engine_lanes.get(event.who) or self._add_engine(event.who), event.request
        elif kind is events.ScoreStart or kind is events.ScoreEnd:
            lane, key = f"pool/{SCORING}", event.sample
        else:
            lane, key = f"pool/{event.who}", str(event.span)
        pending = self._open.get(lane)
        if pending is None:
            pending = self._open[lane] = set()
        if kind is events.RequestStart or kind is events.SpanBegin or kind is events.ScoreStart:
            pending.add(key)
        else:
            pending.discard(key)
        self._set(lane, time_s, len(pending))
        if len(pending) < 2 and lane.startswith("engine/"):  # it may have begun or stopped to work
            self._set(f"busy/{lane[7:]}", time_s, min(1.0, len(pending)))

    def _add_engine(self, who: str) -> str:
        """Return the lane of an engine. Those beyond the first ones share a lane."""
        own = f"engine/{who}"
        is_known = own in self._open or len(self._engine_lanes) < MOST_ENGINES
        lane = self._engine_lanes[who] = own if is_known else OTHER_ENGINES
        return lane

    def _end_sample(self, time_s: float, event: events.SampleEnd) -> None:
        if event.end == "dropped":
            self._bins.count(f"drop/{event.reason or 'unknown'}", time_s)

    def _reopen_sample(self, time_s: float, event: events.SampleReopen) -> None:
        group = event.sample.partition(".")[0]
        if group.isdigit() and int(group) not in self._groups:
            self._move_group(time_s, int(group), "groups/in flight")

    def _move_group(self, time_s: float, group: int, lane: str) -> None:
        """Move a group to a lane, or out of all lanes."""
        old = self._groups.pop(group, "")
        if lane:
            self._groups[group] = lane
        for changed, by in ((old, -1), (lane, 1)):
            if changed and old != lane:
                self._set(changed, time_s, self._levels.get(changed, (0.0, 0.0))[1] + by)

    def _train_group(self, time_s: float, event: events.GroupTrain) -> None:
        self._lags[event.trained - event.oldest] += event.samples
        self._move_group(time_s, event.group, "")

    def _begin_step(self, time_s: float, event: events.StepBegin) -> None:
        self._step_begun_s = time_s
        self._lags.clear()
        self._follow_versions(time_s, event)

    def _end_step(self, time_s: float, event: events.StepEnd) -> None:
        begun_s, self._step_begun_s = self._step_begun_s, None
        self.part.steps.append((time_s if begun_s is None else begun_s, time_s, event.trained))
        self._follow_versions(time_s, event)

    def _follow_versions(self, time_s: float, event: Event) -> None:
        """Note trained and served, which the meter follows."""
        found, rows = self._meter.versions, self.part.versions
        row = (time_s, found.trained or 0, found.served or 0)
        if rows and rows[-1][1:] == row[1:]:
            return
        if rows and time_s - rows[-1][0] < self._bins.width_s:
            rows.pop()  # closer than anything that is drawn
        rows.append(row)

    def _note_usage(self, time_s: float, event: events.ResourceUsage) -> None:
        for name, value in event.values.items():
            if name.startswith("gpu_utilization/"):
                self._set(f"gpu/GPU {name.partition('/')[2]}", time_s, value)

    def _mark(self, time_s: float, event: Event) -> None:
        part = self.part
        self._follow_versions(time_s, event)
        if isinstance(event, events.FaultEvent):
            part.faults[event.kind] = part.faults.get(event.kind, 0) + 1
            if isinstance(event, events.BackendRestart):
                part.faults[f"restart {event.who}"] = part.faults.get(f"restart {event.who}", 0) + 1
        if len(part.markers) < _MOST_MARKERS:
            part.markers.append((time_s, event.kind, event.who, describe_marker(event)))
        if isinstance(event, events.BackendDown):
            self._clear(time_s, f"engine/{event.who}")
        elif isinstance(event, events.RunBegin):  # what an earlier process had under way ended without an event
            for lane in list(self._open):
                self._clear(time_s, lane)
            for who, state in self._states.items():
                self._set(f"state/{who}/{state}", time_s, 0.0)
            self._states.clear()
            for group in list(self._groups):
                self._move_group(time_s, group, "")
            part.segments.append(("begin", time_s, event.to_data()))
        elif isinstance(event, events.RunEnd):
            part.segments.append(("end", time_s, event.to_data()))

    def _clear(self, time_s: float, lane: str) -> None:
        if self._open.get(lane):
            self._open[lane].clear()
            self._set(lane, time_s, 0.0)
            self._set(f"busy/{lane[7:]}", time_s, 0.0)

    def settle(self) -> PartSummary:
        """Return the summary of the part so far, which later events change."""
        part, bins = self.part, self._bins
        for key, (_, amount) in list(self._levels.items()):
            self._set(key, part.last_s, amount)
        part.width_s, part.first_bin = bins.width_s, bins.first
        part.series, part.peaks = bins.series, bins.peaks
        return part

    def finish(self, *, stretch: int, begin: int, end: int, is_last: bool) -> PartSummary:
        """Return the summary of a whole part, and begin the next one."""
        part = self.settle()
        part.stretch, part.begin, part.end, part.is_last = stretch, begin, end, is_last
        used = math.floor(part.last_s / part.width_s) - part.first_bin + 1
        part.series = {key: values[:used] for key, values in part.series.items() if any(values)}
        part.peaks = {key: peak for key, peak in part.peaks.items() if peak}
        part.state = self.save_state()
        self._begin_part(part.last_s)
        return part

    def save_state(self) -> dict[str, Any]:
        """Return what is under way, as JSON values."""
        return {
            "time_s": self.part.last_s,
            "meter": self._meter.save_state(),
            "levels": {key: amount for key, (_, amount) in self._levels.items() if amount},
            "open": {lane: sorted(pending) for lane, pending in self._open.items()},
            "states": dict(self._states),
            "groups": [[group, lane] for group, lane in self._groups.items()],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> LogIndexer:
        """Make an indexer that goes on from a state that `save_state` returned."""
        indexer, time_s = LogIndexer(), float(state["time_s"])
        indexer._meter = ScalarMeter.from_state(state["meter"])
        indexer._levels = {key: (time_s, amount) for key, amount in state["levels"].items()}
        indexer._open = {lane: set(pending) for lane, pending in state["open"].items()}
        indexer._states = dict(state["states"])
        indexer._groups = {int(group): str(lane) for group, lane in state["groups"]}
        indexer._has_begun = True
        indexer._begin_part(time_s)
        return indexer
