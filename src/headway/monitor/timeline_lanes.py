"""Events turned into lanes: what each stage and engine did when, small enough to draw.

One pass over the events collects spans, occupancy, versions and markers; `thin_lanes` then keeps every lane within a
budget of drawn things. Below the budget a lane is exact. Above it time is cut into equal bins that keep shares
and means, so that a busy lane still looks as busy as it was; single spans are no longer told apart.

Arrays are flat (`t0, t1, state, t0, t1, state, …`): half the text, and no object for every span in the browser.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.monitor.event_log import LoggedEvent
from headway.monitor.role_usage import SCORING, STATES, natural_sort_key
from headway.monitor.sample_lag import VersionTracker

MOST_ENGINE_LANES = 32
MOST_MARKERS = 2000
_TEXT_LIMIT = 400

MARKER_KINDS = (
    "error", "retry", "restart", "down", "up", "join", "leave", "degrade", "restore", "stall", "checkpoint",
    "validate.end", "run.begin", "run.end",
)  # fmt: skip

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
        self._seen = False

    def __call__(self, event: LoggedEvent) -> None:
        time_s, kind, who, data = event.time_s, event.kind, event.who, event.data
        if not self._seen:
            self._seen = True
            self.lanes.start_s = self._begun_s = time_s
        self.lanes.end_s = time_s
        if kind == "state":
            self._change(time_s, who, data["old"], data["new"])
        elif kind in ("request.start", "request.end"):
            self._count(self.lanes.engines[who], time_s, who, data["request"], kind == "request.start")
        elif kind in ("span.begin", "span.end"):
            self._count(self.lanes.pools[who], time_s, "span " + who, data["span"], kind == "span.begin")
        elif kind in ("score.start", "score.end"):
            self._count(self.lanes.pools[SCORING], time_s, "span " + SCORING, data["sample"], kind == "score.start")
        elif kind == "sample.end":
            if data["end"] == "dropped":
                self.lanes.drops.append((time_s, str(data.get("reason", "unknown"))))
        else:
            self._follow_versions(event)
            if kind == "run.begin":
                self._close_all(time_s)
            if kind in MARKER_KINDS:
                self._mark(event)

    def _change(self, time_s: float, who: str, old: str, new: str) -> None:
        since_s, state = self._state.get(who, (self.lanes.start_s, old))
        spans = self.lanes.states.setdefault(who, [])
        if time_s > since_s:
            spans.append((since_s, time_s, state))
        self._state[who] = (time_s, new)

    def _count(self, points: list[OccupancyPoint], time_s: float, who: str, key: object, begins: bool) -> None:
        pending = self._open[who]
        if begins:
            pending.add(key)
        else:
            pending.discard(key)
        _add_point(points, time_s, len(pending))

    def _close_all(self, time_s: float) -> None:
        """A new process: nobody ends what the one before it had open."""
        for pending in self._open.values():
            pending.clear()
        for points in (*self.lanes.engines.values(), *self.lanes.pools.values()):
            _add_point(points, time_s, 0)

    def _follow_versions(self, event: LoggedEvent) -> None:
        time_s, kind, data = event.time_s, event.kind, event.data
        if not self._versions.take(event):
            return
        if kind == "step.begin":
            self._begun_s = time_s
        elif kind == "step.end":
            self.lanes.steps.append((self._begun_s, time_s, data["trained"]))
        row = (time_s, self._versions.trained or 0, self._versions.served or 0)
        versions = self.lanes.versions
        if not versions or versions[-1][1:] != row[1:]:
            versions.append(row)

    def _mark(self, event: LoggedEvent) -> None:
        time_s, kind, who, data = event.time_s, event.kind, event.who, event.data
        if kind == "down" and self._open[who]:
            self._open[who].clear()
            _add_point(self.lanes.engines[who], time_s, 0)
        text = ", ".join(f"{key}: {value}" for key, value in data.items())
        self.lanes.markers.append((time_s, kind, who, text[:_TEXT_LIMIT]))

    def finish(self) -> TimelineLanes:
        """The lanes, with what is still open closed at the last event."""
        lanes = self.lanes
        for who, (since_s, state) in self._state.items():
            lanes.states[who].append((since_s, lanes.end_s, state))
        return lanes


def _add_point(points: list[OccupancyPoint], time_s: float, count: int) -> None:
    if points and points[-1][0] == time_s:
        points[-1] = (time_s, count)
    else:
        points.append((time_s, count))


def collect_lanes(events: Iterable[LoggedEvent]) -> TimelineLanes:
    """The lanes of a recorded run."""
    collector = LaneCollector()
    for event in events:
        collector(event)
    return collector.finish()


def thin_lanes(lanes: TimelineLanes, budget: int) -> list[dict[str, Any]]:
    """Lanes to draw, top to bottom, with about `budget` drawn things in all."""
    many = len(lanes.engines) > MOST_ENGINE_LANES
    count = len(lanes.states) + len(lanes.pools) + (MOST_ENGINE_LANES if many else len(lanes.engines))
    share = max(200, budget // max(1, count))
    drawn = [make_state_lane(who, spans, lanes, share) for who, spans in lanes.states.items()]
    drawn += [make_area_lane("pool", who, points, lanes, share) for who, points in lanes.pools.items()]
    names = sorted(lanes.engines, key=natural_sort_key)
    if many:
        return drawn + make_heat_lanes(names, lanes, share)
    return drawn + [make_area_lane("engine", name, lanes.engines[name], lanes, share) for name in names]


def make_state_lane(who: str, spans: Sequence[StateSpan], lanes: TimelineLanes, budget: int) -> dict[str, Any]:
    """A stage: its spans by state, or the mix of states in each bin."""
    lane: dict[str, Any] = {"kind": "state", "name": who}
    if len(spans) <= budget:
        lane["spans"] = [part for t0, t1, state in spans for part in (_time(t0), _time(t1), _state_index(state))]
        return lane
    bins = [[0.0] * len(STATES) for _ in range(budget)]
    width_s = (lanes.end_s - lanes.start_s) / budget
    for t0, t1, state in spans:
        for place, seconds in _bins_of(t0 - lanes.start_s, t1 - lanes.start_s, width_s, budget):
            bins[place][_state_index(state)] += seconds
    lane["mix"] = [[round(100 * seconds / width_s) for seconds in row] for row in bins]
    return lane


def make_area_lane(
    kind: str, who: str, points: Sequence[OccupancyPoint], lanes: TimelineLanes, budget: int
) -> dict[str, Any]:
    """An engine or a pool: how many were open from each time on, or the mean of each bin."""
    lane: dict[str, Any] = {"kind": kind, "name": who, "peak": max((count for _, count in points), default=0)}
    if len(points) <= budget:
        lane["points"] = [part for time_s, count in points for part in (_time(time_s), count)]
        return lane
    means = compute_binned_mean(points, lanes, budget)
    width_s = (lanes.end_s - lanes.start_s) / budget
    lane["points"] = [
        part for place, mean in enumerate(means) for part in (_time(lanes.start_s + place * width_s), round(mean, 2))
    ]
    lane["binned"] = True
    return lane


def make_heat_lanes(names: Sequence[str], lanes: TimelineLanes, budget: int) -> list[dict[str, Any]]:
    """Many engines: neighbours share a lane that shows their mean occupancy."""
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
    """Time-weighted mean of a step function in equal bins."""
    width_s = (lanes.end_s - lanes.start_s) / bins
    sums = [0.0] * bins
    ends = [time_s for time_s, _ in points[1:]] + [lanes.end_s]
    for (time_s, count), end_s in zip(points, ends, strict=True):
        if count:
            for place, seconds in _bins_of(time_s - lanes.start_s, end_s - lanes.start_s, width_s, bins):
                sums[place] += count * seconds
    return [total / width_s if width_s else 0.0 for total in sums]


def bin_drops(lanes: TimelineLanes, bins: int) -> list[tuple[float, int, str]]:
    """Drops in equal bins: where, how many, and why."""
    width_s = (lanes.end_s - lanes.start_s) / bins
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for time_s, reason in lanes.drops:
        place = min(bins - 1, int((time_s - lanes.start_s) / width_s)) if width_s else 0
        found[place][reason] += 1
    return [
        (
            _time(lanes.start_s + (place + 0.5) * width_s),
            reasons.total(),
            ", ".join(f"{reason} × {count}" for reason, count in reasons.most_common()),
        )
        for place, reasons in sorted(found.items())
    ]


def _bins_of(t0: float, t1: float, width_s: float, bins: int) -> Iterable[tuple[int, float]]:
    """The bins that a stretch touches, with the seconds it has in each."""
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
