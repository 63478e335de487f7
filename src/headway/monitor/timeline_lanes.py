"""Turns events into lanes: what each stage and engine did when, small enough to draw.

One pass over the events collects spans, occupancy, versions and markers; `thin_lanes` then keeps every lane within a
budget of drawn things. Below the budget a lane is exact. Above it time is cut into equal bins that keep shares and
means, so a busy lane still looks as busy as it was, but single spans can no longer be told apart.

Arrays are flat (`t0, t1, state, t0, t1, state, …`): half the text, and no object for every span in the browser.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.monitor import events
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import Event
from headway.monitor.role_usage import SCORING, STATES, natural_sort_key
from headway.monitor.sample_lag import VersionTracker

MOST_ENGINE_LANES = 32
MOST_MARKERS = 2000
_MOST_MARKER_CHARACTERS = 400

MARKER_EVENTS = (events.FaultEvent, events.CheckpointSave, events.ValidateEnd, events.RunBegin, events.RunEnd)

StateSpan = tuple[float, float, str]
OccupancyPoint = tuple[float, int]


@dataclass(slots=True)
class TimelineLanes:
    """Everything that can be drawn, exact."""

    start_s: float = 0.0
    end_s: float = 0.0
    states: dict[str, list[StateSpan]] = field(default_factory=dict)
    engines: defaultdict[str, list[OccupancyPoint]] = field(default_factory=lambda: defaultdict(list))
    """Requests open from this time on."""
    pools: defaultdict[str, list[OccupancyPoint]] = field(default_factory=lambda: defaultdict(list))
    """Spans open from this time on, by role."""
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    versions: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, trained, served."""
    drops: list[tuple[float, str]] = field(default_factory=list)
    markers: list[tuple[float, str, str, str]] = field(default_factory=list)
    """Time, kind, who, text."""


class LaneCollector:
    """Builds `TimelineLanes` in one pass."""

    def __init__(self) -> None:
        self.lanes = TimelineLanes()
        self._versions = VersionTracker()
        self._state: dict[str, tuple[float, str]] = {}
        self._open: defaultdict[str, set[object]] = defaultdict(set)
        self._begun_s = 0.0
        self._has_begun = False

    def begin_from(self, time_s: float, states: Mapping[str, str], pending: Mapping[str, Iterable[object]]) -> None:
        """Begin in the middle of a log: with the states of the stages, and what is open by `engine/…` or `pool/…`."""
        self._has_begun = True
        self.lanes.start_s = self.lanes.end_s = self._begun_s = time_s
        for who, state in states.items():
            self.lanes.states[who], self._state[who] = [], (time_s, state)
        for lane, keys in pending.items():
            kind, _, who = lane.partition("/")
            open_keys = self._open[who if kind == "engine" else f"span {who}"] = set(keys)
            points = self.lanes.engines[who] if kind == "engine" else self.lanes.pools[who]
            _add_point(points, time_s, len(open_keys))

    def __call__(self, logged: LoggedEvent) -> None:
        (time_s, event), lanes = logged, self.lanes
        if not self._has_begun:
            self._has_begun = True
            lanes.start_s = self._begun_s = time_s
        lanes.end_s = time_s
        match event:
            case events.StateChange():
                self._change_state(time_s, event)
            case events.RequestStart() | events.RequestEnd():
                begins = isinstance(event, events.RequestStart)
                self._count(lanes.engines[event.who], time_s, event.who, event.request, begins)
            case events.SpanBegin() | events.SpanEnd():
                begins = isinstance(event, events.SpanBegin)
                self._count(lanes.pools[event.who], time_s, f"span {event.who}", str(event.span), begins)
            case events.ScoreStart() | events.ScoreEnd():
                begins = isinstance(event, events.ScoreStart)
                self._count(lanes.pools[SCORING], time_s, f"span {SCORING}", event.sample, begins)
            case events.SampleEnd():
                if event.end == "dropped":
                    lanes.drops.append((time_s, event.reason or "unknown"))
            case _:
                self._follow_versions(time_s, event)
                if isinstance(event, events.RunBegin):
                    self._close_all(time_s)
                if isinstance(event, MARKER_EVENTS):
                    self._add_marker(time_s, event)

    def _change_state(self, time_s: float, event: events.StateChange) -> None:
        since_s, state = self._state.get(event.who, (self.lanes.start_s, event.old))
        spans = self.lanes.states.setdefault(event.who, [])
        if time_s > since_s:
            spans.append((since_s, time_s, state))
        self._state[event.who] = (time_s, event.new)

    def _count(self, points: list[OccupancyPoint], time_s: float, who: str, key: object, begins: bool) -> None:
        pending = self._open[who]
        (pending.add if begins else pending.discard)(key)
        _add_point(points, time_s, len(pending))

    def _close_all(self, time_s: float) -> None:
        """Close what an earlier process of the run had open: nobody else will."""
        for pending in self._open.values():
            pending.clear()
        for points in (*self.lanes.engines.values(), *self.lanes.pools.values()):
            _add_point(points, time_s, 0)

    def _follow_versions(self, time_s: float, event: Event) -> None:
        if not self._versions.observe(event):
            return
        if isinstance(event, events.StepBegin):
            self._begun_s = time_s
        elif isinstance(event, events.StepEnd):
            self.lanes.steps.append((self._begun_s, time_s, event.trained))
        row = (time_s, self._versions.trained or 0, self._versions.served or 0)
        versions = self.lanes.versions
        if not versions or versions[-1][1:] != row[1:]:
            versions.append(row)

    def _add_marker(self, time_s: float, event: Event) -> None:
        if isinstance(event, events.BackendDown) and self._open[event.who]:
            self._open[event.who].clear()
            _add_point(self.lanes.engines[event.who], time_s, 0)
        self.lanes.markers.append((time_s, event.kind, event.who, describe_marker(event)))

    def finish(self) -> TimelineLanes:
        """Return the lanes, with what is still open closed at the last event."""
        lanes = self.lanes
        for who, (since_s, state) in self._state.items():
            lanes.states[who].append((since_s, lanes.end_s, state))
        return lanes


def describe_marker(event: Event) -> str:
    """Return what an event says, not too long to be shown beside it."""
    return _make_sentence(event)[:_MOST_MARKER_CHARACTERS]


def _make_sentence(event: Event) -> str:
    match event:
        case events.CheckpointSave():
            return f"after step {event.trained}"
        case events.ValidateEnd():
            reward = "no verdict" if event.reward is None else f"held-out reward {event.reward:.3g}"
            failed = f", {event.failed} without a verdict: {event.fault}" if event.failed else ""
            return f"{reward} after step {event.trained}, {event.samples} samples{failed}"
        case events.RunBegin():
            start = f"resumed from step {event.trained}" if event.resumed else "a new run"
            return f"{start}; {event.machine or 'no machine'}; headway {event.headway or 'unknown'}"
        case events.RunEnd():
            reason = event.reason or ("all steps are done" if event.finished else "ended")
            return f"after step {event.trained}: {reason}"
        case events.ErrorReport():
            return f"{event.error}: {event.message}"
        case _:
            said = ((key, value) for key, value in event.to_data().items() if value not in (None, ""))
            return ", ".join(f"{key.removesuffix('_s')} {value}" for key, value in said)


def _add_point(points: list[OccupancyPoint], time_s: float, count: int) -> None:
    if points and points[-1][0] == time_s:
        points[-1] = (time_s, count)
    else:
        points.append((time_s, count))


def thin_lanes(lanes: TimelineLanes, budget: int) -> list[dict[str, Any]]:
    """Return the lanes to draw, top to bottom, with about `budget` drawn things in all."""
    count = len(lanes.states) + len(lanes.pools) + min(MOST_ENGINE_LANES, len(lanes.engines))
    share = max(200, budget // max(1, count))
    drawn = [make_state_lane(who, spans, lanes, share) for who, spans in lanes.states.items()]
    drawn += [make_area_lane("pool", who, points, lanes, share) for who, points in lanes.pools.items()]
    names = sorted(lanes.engines, key=natural_sort_key)
    if len(names) > MOST_ENGINE_LANES:
        return drawn + make_heat_lanes(names, lanes, share)
    return drawn + [make_area_lane("engine", name, lanes.engines[name], lanes, share) for name in names]


def make_state_lane(who: str, spans: Sequence[StateSpan], lanes: TimelineLanes, budget: int) -> dict[str, Any]:
    """Return the lane of a stage: its spans by state, or the mix of states in each bin."""
    lane: dict[str, Any] = {"kind": "state", "name": who}
    if len(spans) <= budget:
        lane["spans"] = [part for t0, t1, state in spans for part in (_time(t0), _time(t1), _state_index(state))]
        return lane
    bins = [[0.0] * len(STATES) for _ in range(budget)]
    width_s = (lanes.end_s - lanes.start_s) / budget
    for t0, t1, state in spans:
        for place, seconds in _split_into_bins(t0 - lanes.start_s, t1 - lanes.start_s, width_s, budget):
            bins[place][_state_index(state)] += seconds
    lane["mix"] = [[round(100 * seconds / width_s) for seconds in row] for row in bins]
    return lane


def make_area_lane(
    kind: str, who: str, points: Sequence[OccupancyPoint], lanes: TimelineLanes, budget: int
) -> dict[str, Any]:
    """Return the lane of an engine or a pool: how many were open from each time on, or the mean of each bin."""
    lane: dict[str, Any] = {"kind": kind, "name": who, "peak": max((count for _, count in points), default=0)}
    if len(points) <= budget:
        lane["points"] = [part for time_s, count in points for part in (_time(time_s), count)]
        return lane
    width_s = (lanes.end_s - lanes.start_s) / budget
    means = enumerate(compute_binned_mean(points, lanes, budget))
    lane["points"] = [part for n, mean in means for part in (_time(lanes.start_s + n * width_s), round(mean, 2))]
    lane["binned"] = True
    return lane


def make_heat_lanes(names: Sequence[str], lanes: TimelineLanes, budget: int) -> list[dict[str, Any]]:
    """Return lanes for many engines: neighbours share a lane that shows their mean occupancy."""
    size = -(-len(names) // MOST_ENGINE_LANES)
    drawn = []
    for first in range(0, len(names), size):
        members = names[first : first + size]
        sums = [0.0] * budget
        for name in members:
            for place, mean in enumerate(compute_binned_mean(lanes.engines[name], lanes, budget)):
                sums[place] += mean / len(members)
        label = members[0] if size == 1 else f"{members[0]} … {members[-1].rpartition('/')[2]}"
        peak = max(count for name in members for _, count in lanes.engines[name])
        heat = [round(mean, 2) for mean in sums]
        drawn.append({"kind": "heat", "name": label, "peak": peak, "heat": heat, "members": members})
    return drawn


def compute_binned_mean(points: Sequence[OccupancyPoint], lanes: TimelineLanes, bins: int) -> list[float]:
    """Return the time-weighted mean of a step function in equal bins."""
    width_s = (lanes.end_s - lanes.start_s) / bins
    sums = [0.0] * bins
    ends = [time_s for time_s, _ in points[1:]] + [lanes.end_s]
    for (time_s, count), end_s in zip(points, ends, strict=True):
        if count:
            for place, seconds in _split_into_bins(time_s - lanes.start_s, end_s - lanes.start_s, width_s, bins):
                sums[place] += count * seconds
    return [total / width_s if width_s else 0.0 for total in sums]


def bin_drops(lanes: TimelineLanes, bins: int) -> list[tuple[float, int, str]]:
    """Return drops in equal bins: when, how many, and why."""
    width_s = (lanes.end_s - lanes.start_s) / bins
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for time_s, reason in lanes.drops:
        place = min(bins - 1, int((time_s - lanes.start_s) / width_s)) if width_s else 0
        found[place][reason] += 1
    rows = []
    for place, reasons in sorted(found.items()):
        text = ", ".join(f"{reason} × {count}" for reason, count in reasons.most_common())
        rows.append((_time(lanes.start_s + (place + 0.5) * width_s), reasons.total(), text))
    return rows


def _split_into_bins(t0: float, t1: float, width_s: float, bins: int) -> Iterable[tuple[int, float]]:
    """Yield the bins that a stretch of time touches, with its seconds in each."""
    if width_s <= 0:
        return
    first, last = min(bins - 1, int(t0 / width_s)), min(bins - 1, int(t1 / width_s))
    if first == last:
        yield first, t1 - t0
        return
    yield first, (first + 1) * width_s - t0
    for place in range(first + 1, last):
        yield place, width_s
    yield last, t1 - last * width_s


def _state_index(state: str) -> int:
    return STATES.index(state) if state in STATES else 0


def _time(time_s: float) -> float:
    return round(time_s, 6)
