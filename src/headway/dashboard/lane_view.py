"""The lanes of the timeline in any stretch of time: from the index, or exactly, where few events are in sight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.dashboard.curve_columns import round_numbers
from headway.monitor.log_follower import read_part_events
from headway.monitor.log_index import PartSummary
from headway.monitor.role_usage import STATES, natural_sort_key
from headway.monitor.timeline_lanes import LaneCollector, TimelineLanes

_STAGES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "critic", "reward", "train", "param_update")
_MOST_EXACT_EVENTS = 120_000
_MOST_EXACT_SPANS = 6_000
_MOST_MARKS = 400


def view_lanes(directory: Path, parts: Sequence[PartSummary], from_s: float, to_s: float, bins: int) -> dict[str, Any]:
    """Return what to draw between two times, with lanes of about `bins` columns."""
    seen = [part for part in parts if part.last_s >= from_s and part.first_s <= to_s]
    steps = [step for part in seen for step in part.steps if step[1] >= from_s and step[0] <= to_s]
    before = [row for part in parts if part.first_s <= from_s for row in part.versions if row[0] < from_s][-1:]
    versions = before + [row for part in seen for row in part.versions if from_s <= row[0] <= to_s]
    markers = [row for part in seen for row in part.markers if from_s <= row[0] <= to_s]
    found: dict[str, Any] = {
        "from": from_s,
        "to": to_s,
        "start": parts[0].first_s if parts else 0.0,
        "end": parts[-1].last_s if parts else 0.0,
        "states": STATES,
        "steps": steps if len(steps) <= _MOST_MARKS else [],
        "steps_in_sight": len(steps),
        "versions": _thin_rows(versions),
        "markers": _thin_rows(markers),
    }
    width_s = (to_s - from_s) / max(1, bins)
    finest_s = min((part.width_s for part in seen), default=0.0)
    if seen and width_s < finest_s and sum(part.events for part in seen) <= _MOST_EXACT_EVENTS:
        lanes = _read_exact_lanes(directory, parts, seen, from_s, to_s)
        if sum(len(lane.get("spans", ())) + len(lane.get("points", ())) for lane in lanes) <= 3 * _MOST_EXACT_SPANS:
            return found | {"exact": True, "lanes": lanes}
    return found | {"exact": False, "lanes": _make_binned_lanes(seen, from_s, to_s, bins)}


def _thin_rows(rows: list[Any]) -> list[Any]:
    return rows[:: max(1, -(-len(rows) // _MOST_MARKS))]


def resample(parts: Sequence[PartSummary], from_s: float, to_s: float, bins: int) -> dict[str, NDArray[np.float64]]:
    """Return amount × seconds in equal bins, by series."""
    edges = np.linspace(from_s, to_s, bins + 1)
    found: dict[str, NDArray[np.float64]] = {}
    for part in parts:
        if not part.series:
            continue
        count = max(len(values) for values in part.series.values())
        borders = (part.first_bin + np.arange(count + 1)) * part.width_s
        low = max(0, int(np.searchsorted(edges, borders[0])) - 1)
        high = min(bins, int(np.searchsorted(edges, borders[-1])) + 1)
        for key, values in part.series.items():
            sums = np.zeros(count + 1)
            sums[1 : len(values) + 1] = np.cumsum(np.array(values, dtype=np.float64))
            sums[len(values) + 1 :] = sums[len(values)]
            row = found.get(key)
            if row is None:
                row = found[key] = np.zeros(bins)
            row[low:high] += np.diff(np.interp(edges[low : high + 1], borders, sums))
    return found


def _make_binned_lanes(parts: Sequence[PartSummary], from_s: float, to_s: float, bins: int) -> list[dict[str, Any]]:
    series, width_s = resample(parts, from_s, to_s, bins), (to_s - from_s) / bins or 1.0
    peaks: dict[str, float] = {}
    for part in parts:
        for key, peak in part.peaks.items():
            peaks[key] = max(peak, peaks.get(key, 0.0))
    states: dict[str, dict[str, Any]] = {}
    areas: list[dict[str, Any]] = []
    for key, row in series.items():
        kind, _, name = key.partition("/")
        if kind == "state":
            who, _, state = name.rpartition("/")
            states.setdefault(who, {})[state] = np.round(row / width_s, 3).tolist()
        elif kind in ("engine", "pool", "gpu", "groups"):
            lane = {"kind": kind, "name": name, "peak": peaks.get(key, 0.0), "mean": round_numbers(row / width_s)}
            if kind == "engine":
                busy = series.get(f"busy/{name}")
                lane["busy"] = [] if busy is None else np.round(busy / width_s, 3).tolist()
            areas.append(lane)
    drops = {key[5:]: np.round(row, 2).tolist() for key, row in series.items() if key.startswith("drop/") and row.any()}
    lanes = [{"kind": "state", "name": who, "shares": states[who]} for who in _order_stages(states)]
    lanes += _order_areas(areas)
    return [*lanes, {"kind": "drops", "name": "drops", "reasons": drops}] if drops else lanes


def _order_stages(names: Sequence[str] | dict[str, Any]) -> list[str]:
    known = [name for name in _STAGES if name in names]
    return known + [name for name in names if name not in known]


def _order_areas(areas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = ("engine", "gpu", "pool", "groups")
    return sorted(areas, key=lambda lane: (kinds.index(lane["kind"]), natural_sort_key(lane["name"])))


def _read_exact_lanes(
    directory: Path, parts: Sequence[PartSummary], seen: Sequence[PartSummary], from_s: float, to_s: float
) -> list[dict[str, Any]]:
    """Return lanes with every change in sight, from the events themselves."""
    collector, place = LaneCollector(), parts.index(seen[0])
    if place:
        state = parts[place - 1].state
        collector.begin_from(float(state["time_s"]), state["states"], state["open"])
    for part in seen:
        for logged in read_part_events(directory, part):
            if logged.time_s > to_s:
                break
            collector(logged)
    return _cut_lanes(collector.finish(), from_s, to_s)


def _cut_lanes(lanes: TimelineLanes, from_s: float, to_s: float) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []
    for who in _order_stages(lanes.states):
        spans = [span for span in lanes.states[who] if span[1] >= from_s and span[0] <= to_s]
        flat = [part for t0, t1, state in spans for part in (round(t0, 6), round(t1, 6), _get_state_number(state))]
        drawn.append({"kind": "state", "name": who, "spans": flat})
    areas: list[dict[str, Any]] = []
    for kind, found in (("engine", lanes.engines), ("pool", lanes.pools)):
        for name, points in found.items():
            before = [point for point in points if point[0] < from_s][-1:]
            shown = before + [point for point in points if from_s <= point[0] <= to_s]
            flat = [part for time_s, count in shown for part in (round(time_s, 6), count)]
            peak = max((count for _, count in points), default=0)
            areas.append({"kind": kind, "name": name, "peak": peak, "points": flat})
    return drawn + _order_areas(areas)


def _get_state_number(state: str) -> int:
    return STATES.index(state) if state in STATES else 0
