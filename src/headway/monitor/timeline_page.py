"""The timeline: a run as one HTML page that opens from a file, without network, library or server.

    Path("timeline.html").write_text(timeline_page(events, title="my run"), encoding="utf-8")

The page shows a lane for every stage and engine, numbered training steps, trained and served versions, drops and
faults, the curves and the lag histogram. Data travels in a JSON block whose text cannot end the block or start markup,
whatever names and error messages contain; the page writes it as text only and forbids itself every outside source.

It is made after the run from the list of events; `live_display` shows a run that goes on.
"""

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_tables import format_duration, format_number, format_percent
from headway.monitor.role_usage import BUSY_STATES, STATES
from headway.monitor.run_report import RunMonitor, RunReport, to_plain_json
from headway.monitor.timeline_lanes import MOST_MARKERS, LaneCollector, TimelineLanes, bin_drops, thin_lanes

T = TypeVar("T")

DATA_MARK = "@@HEADWAY_DATA@@"
_DRAWING_BUDGET = 40_000
_DROP_BINS = 400
_CURVE_POINTS = 2000
_STEP_BOXES = 4000
# `<` would let data end the script block or start a comment; the two separators are line ends to old parsers.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_timeline_page(events: Iterable[LoggedEvent], *, title: str = "Headway run", warmup_steps: int = 1) -> str:
    """Return the whole page as text."""
    return render_template("timeline.html", make_timeline_data(events, title=title, warmup_steps=warmup_steps))


def render_template(template: str, data: object) -> str:
    """Return an HTML template of this package with its data in it."""
    text = files("headway.monitor").joinpath(template).read_text(encoding="utf-8")
    before, after = text.split(DATA_MARK)
    return before + embed_json(data) + after


def embed_json(data: object) -> str:
    """Return JSON text that is safe inside a `<script>` block and parses back to the same data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def make_timeline_data(events: Iterable[LoggedEvent], *, title: str, warmup_steps: int = 1) -> dict[str, Any]:
    """Return what the page draws, already small enough to draw."""
    monitor, collector = RunMonitor(warmup_steps), LaneCollector()
    for event in events:
        monitor(event)
        collector(event)
    return draw_timeline(collector.finish(), monitor.report(), title=title)


def draw_timeline(lanes: TimelineLanes, report: RunReport, *, title: str) -> dict[str, Any]:
    """Return what the page draws for a run that has been read already."""
    data: dict[str, Any] = to_plain_json(
        {
            "title": title,
            "start": lanes.start_s,
            "end": lanes.end_s,
            "window": [report.window.start_s, report.window.end_s],
            "states": STATES,
            "summary": _make_tiles(report),
            "lanes": _add_busy_shares(thin_lanes(lanes, _DRAWING_BUDGET), report),
            "steps": _flatten(_take_every_nth(lanes.steps, _STEP_BOXES)),
            "versions": _flatten(_take_every_nth(lanes.versions, _STEP_BOXES)),
            "drops": bin_drops(lanes, _DROP_BINS),
            "markers": lanes.markers[:MOST_MARKERS],
            "markers_left_out": max(0, len(lanes.markers) - MOST_MARKERS),
            **_make_chart_data(report),
        }
    )
    return data


def _make_tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """Return name, value and small print of each number at the top."""
    speed, lag, ends, pool = report.throughput, report.lag, report.ends, report.usage.pool
    window = report.window
    tiles = [
        ("duration", format_duration(report.duration_s), f"{window.steps} of {len(speed.steps)} steps measured"),
        ("seconds per step", format_number(speed.step_mean_s), f"p95 {format_number(speed.step_p95_s)}, "
                                                        f"training {format_number(speed.train_mean_s)}"),
        ("samples/s", format_number(speed.samples_per_s), f"{format_number(speed.samples)} trained"),
        ("actions/s", format_number(speed.actions_per_s), f"{format_number(speed.actions)} trained"),
        ("lag", format_number(lag.mean), f"max {lag.max} · {format_number(lag.mean_in_flight)} in flight, "
                                  f"{format_number(lag.mean_in_queue)} in queue"),
        ("served behind", format_number(lag.behind_mean), f"versions, max {lag.behind_max}"),
        ("dropped", format_percent(ends.drop_share), f"{format_number(ends.dropped)} samples"),
    ]  # fmt: skip
    if pool:
        tiles.append(("engines busy", format_percent(pool.busy), f"{format_number(pool.concurrency)} requests at once"))
    if speed.reward_last is not None and speed.reward_first is not None:
        tiles.append(("reward", format_number(speed.reward_last), f"from {format_number(speed.reward_first)}"))
    return tiles


def _add_busy_shares(drawn: list[dict[str, Any]], report: RunReport) -> list[dict[str, Any]]:
    """Return the lanes with the busy share of their role in the window, which stands beside the name."""
    roles = {role.role: role for role in report.usage.roles}
    engines = {engine.engine: engine for engine in report.usage.engines}
    for lane in drawn:
        name = lane["name"]
        if lane["kind"] == "state" and name in roles:
            busy_s = sum(roles[name].states.get(state, 0.0) for state in BUSY_STATES)
            lane["busy"] = busy_s / (report.window.seconds or 1.0)
        elif lane["kind"] == "pool" and name in roles:
            lane["busy"] = roles[name].busy
        elif lane["kind"] in ("engine", "heat"):
            members = lane.pop("members", [name])
            lane["busy"] = sum(engines[member].busy for member in members if member in engines) / len(members)
    return drawn


def _make_chart_data(report: RunReport) -> dict[str, Any]:
    steps = _take_every_nth(report.throughput.steps, _CURVE_POINTS)
    return {
        "reward": [(step.trained, step.reward) for step in steps if step.reward is not None],
        "validation_label": report.validations[-1].label if report.validations else "held-out",
        "validation": [(v.trained, v.reward) for v in report.validations if v.reward is not None],
        "step_s": [(step.trained, step.seconds) for step in steps],
        "lag": [(b.lag, b.samples, b.in_flight, b.in_queue) for b in report.lag.histogram],
        "roles": [
            (role.role, role.busy, [role.states.get(state, 0.0) for state in STATES] if role.states else [])
            for role in report.usage.roles
        ],
    }


def _flatten(rows: Iterable[tuple[float, ...]]) -> list[float]:
    return [round(part, 6) for row in rows for part in row]


def _take_every_nth(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return at most about `most` rows, the last one included."""
    if len(rows) <= most:
        return rows
    stride = -(-len(rows) // most)
    return [*rows[:-1:stride], rows[-1]]
