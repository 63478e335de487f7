"""One run as the dashboard shows it: its log as far as it is known, its status and its configuration.

A view is read by one thread at a time. `refresh` reads on for a bounded time; everything else answers from memory,
apart from exact timelines, samples and pictures, of which only what is asked for is read.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from headway.config.resolved_config import list_leaves
from headway.config.schema import Config
from headway.dashboard.curve_columns import CurveColumns
from headway.dashboard.lane_view import resample, view_lanes
from headway.dashboard.sample_view import SampleView
from headway.errors import HeadwayError
from headway.monitor.event_files import last_written_s
from headway.monitor.event_log import parse_event
from headway.monitor.events import RunBegin, RunEnd
from headway.monitor.log_follower import LogFollower
from headway.monitor.report_page import IGNORED_DIFFERENCES, describe_segments, list_facts
from headway.monitor.run_record import CONFIG_FILE, RunSegment, flatten_mapping
from headway.monitor.run_status import RunStatus
from headway.monitor.throughput import MISMATCH_LIMIT
from headway.runs.run_condition import find_status
from headway.runs.run_directory import ORIGINS_FILE

_RECENT_STEPS = 8
_SPARK_POINTS = 60
_STATUS_EVERY_S = 0.9
_ALIVE_S = 30.0
_STATUS_TIMEOUT_S = 1.5
_COMPARABLE = ("lag/mean", "train/optimizer_steps")
"""Engine and trainer have the same weights if the first is 0 and the second is 1."""
_SILENT_EVERY_S = 15.0
"""How often a run is asked that has not answered."""


class RunView:
    """A run that somebody looks at."""

    def __init__(self, run_id: str, directory: Path) -> None:
        self.run_id, self.directory = run_id, directory
        self.samples = SampleView(directory)
        self._log, self._generation = LogFollower(directory), 0
        self._taken = (0, 0)
        """Parts whose points are in the columns, and points of the newest part."""
        self.columns = CurveColumns()
        self._segments: list[RunSegment] = []
        self._status: RunStatus | None = None
        self._condition, self._asked_s = "", 0.0
        self._given: Mapping[str, Any] = {}
        self._config_s = -1.0
        self.revision = 0
        """Grows with every change."""

    def close(self) -> None:
        self._log.close()

    def refresh(self, budget_s: float = 0.25) -> bool:
        """Read on for about `budget_s` seconds. Return whether there is more to read at once."""
        until_s, before = time.monotonic() + budget_s, (self._log.generation, self._log.events)
        more = self._log.advance()
        while more and time.monotonic() < until_s:
            more = self._log.advance()
        if self._log.generation != self._generation:
            self._generation, self._taken = self._log.generation, (0, 0)
            self.columns, self._segments = CurveColumns(), []
        self._take_points()
        self._read_config()
        has_answered = self._ask()
        if has_answered or before != (self._log.generation, self._log.events):
            self.revision += 1
        return more

    def _take_points(self) -> None:
        parts = self._log.all_parts()
        part_number, point_number = self._taken
        for number in range(part_number, len(parts)):
            first = point_number if number == part_number else 0
            for point in parts[number].points[first:]:
                self.columns.add(point)
        whole = len(self._log.parts)
        self._taken = (whole, len(parts[whole].points) if len(parts) > whole else 0)
        self._segments = _make_segments([row for part in parts for row in part.segments])

    def _read_config(self) -> None:
        """Read the configuration if its file is another one than before; simulated runs have only that of origins."""
        for path in (self.directory / CONFIG_FILE, self.directory / ORIGINS_FILE):
            try:
                changed_s = path.stat().st_mtime
                if changed_s != self._config_s:
                    tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.suffix == ".yaml" else {}
                    given = [row[:2] for row in self._read_origins() if row[2] != "default"]
                    self._given = flatten_mapping(tree if isinstance(tree, dict) else {}) or dict(given)
                    self._config_s = changed_s
                return
            except (OSError, ValueError, yaml.YAMLError):
                continue

    def _read_origins(self) -> list[tuple[str, Any, str]]:
        try:
            rows = json.loads((self.directory / ORIGINS_FILE).read_text(encoding="utf-8"))
            return [(str(key), value, str(origin)) for key, value, origin in rows]
        except (OSError, ValueError, TypeError):
            return []

    def _ask(self) -> bool:
        """Ask the run for its status if the last answer is old. Return whether there is a new one."""
        now_s = time.monotonic()
        is_silent = self._condition.startswith("does not answer")
        if now_s - self._asked_s < (_SILENT_EVERY_S if is_silent else _STATUS_EVERY_S):
            return False
        self._asked_s, before = now_s, self._status
        try:
            self._status, self._condition, _ = find_status(self.directory, timeout_s=_STATUS_TIMEOUT_S)
        except HeadwayError:
            self._status, self._condition = None, ""
        return before is None or self._status is None or before.time_s != self._status.time_s

    def make_head(self) -> dict[str, Any]:
        """Return the run in one glance."""
        curves, status = self.columns, self._status
        state, said = self._describe_state()
        done = curves.steps[-1] if curves.steps else 0
        total = self._count_steps()
        recent = curves.last("time/step_s", _RECENT_STEPS)
        parts = self._log.all_parts()
        held_out = curves.held_out_rewards()
        drops: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        for part in parts:
            faults.update(part.faults)
            drops.update({key[5:]: round(sum(row)) for key, row in part.series.items() if key.startswith("drop/")})
        return {
            "id": self.run_id,
            "name": self.directory.resolve().name,
            "state": state,
            "said": said,
            "condition": self._condition,
            "step": done,
            "steps": total,
            "left_s": max(0, total - done) * sum(recent) / len(recent) if recent and state == "going" else None,
            "duration_s": parts[-1].last_s - parts[0].first_s if parts else 0.0,
            "reward": _mean(curves.last("reward/train", _RECENT_STEPS)),
            "held_out": held_out[-1] if held_out else None,
            "spark": curves.thin_curve("reward/train", _SPARK_POINTS),
            "lag": _mean(curves.last("lag/mean")),
            "tokens_per_s": _mean(curves.last("throughput/tokens_per_s", _RECENT_STEPS)),
            "generated_per_s": _mean(curves.last("throughput/generated_tokens_per_s", _RECENT_STEPS)),
            "step_s": _mean(recent),
            "mfu": _mean(curves.last("throughput/mfu", _RECENT_STEPS)),
            "served": status.served
            if status
            else (parts[-1].versions[-1][2] if parts and parts[-1].versions else None),
            "drops": dict(drops),
            "faults": dict(faults),
            "events": self._log.events,
            "known": round(self._log.progress, 3),
            "changes": self.columns.changes,
            "generation": self._log.generation,
            "alpha": self._given.get("async_generation_ratio"),
            "family": self._make_family(),
            "seed": self._given.get("seed"),
            "health": self._describe_health(state),
            "has_samples": self.samples.has_any,
            "has_pictures": self.samples.has_pictures,
            "written_s": self._get_written_s(),
        }

    def _get_written_s(self) -> float:
        try:
            return last_written_s(self.directory)
        except OSError:
            return 0.0

    def _describe_state(self) -> tuple[str, str]:
        status = self._status
        is_alive = time.time() - self._get_written_s() < _ALIVE_S or self._condition.startswith("at work")
        if self._condition.startswith(("was killed", "does not answer")):
            return "silent", self._condition
        if not self._segments and status is not None and status.phase == "starting":
            return "going", "starting"
        state, said = describe_segments(self._segments, is_alive=is_alive)
        return (state, said) if state else ("simulated", "simulated, or a log alone")

    def _count_steps(self) -> int:
        given = self._given.get("max_steps") or (self._status.steps if self._status else 0)
        if given:
            return int(given)
        return self.columns.steps[-1] if self.columns.steps else 0

    def _describe_health(self, state: str) -> tuple[str, str]:
        """Return `good`, `watch` or `bad`, and one line that says why."""
        status = self._status
        if state == "stopped" or state == "silent":
            return "bad", self._describe_state()[1]
        if status is not None and state == "going":
            if status.quiet_s > 60:
                culprit = status.culprits[0] if status.culprits else "nobody is to blame"
                return "bad", f"nothing has moved for {status.quiet_s:.0f} s: {culprit}"
            down = [engine.name for engine in status.engines if engine.health != "up"]
            if down:
                return "watch", f"{', '.join(down[:4])} not in service"
            if status.level != "normal":
                return "watch", f"degraded: {status.level}"
        kl, lag, updates = (self.columns.last(name) for name in ("train/behaviour_kl", *_COMPARABLE))
        if kl and kl[0] > MISMATCH_LIMIT and lag == [0.0] and updates == [1.0]:
            return "watch", f"engine and trainer are {kl[0]:.3g} nats apart on the same weights"
        if bias := [value for value in self.columns.last("bias/length") if abs(value) > 0.02]:
            return "watch", f"trained answers are {bias[-1]:+.1%} longer than those started"
        return "good", {"going": "everything moves", "done": "all steps are done"}.get(state, "nothing to report")

    def _make_family(self) -> str:
        """Return what runs that differ only in their seed have in common."""
        own = {"seed", "max_steps", *IGNORED_DIFFERENCES}
        shared = {key: str(value) for key, value in sorted(self._given.items()) if key not in own}
        return json.dumps(shared) if shared else ""

    def make_facts(self) -> list[tuple[str, str]]:
        return list_facts(self._given, self._segments)

    def make_status(self) -> dict[str, Any] | None:
        """Return the newest status of the run with its condition."""
        return None if self._status is None else {**self._status.to_json(), "condition": self._condition}

    def make_curves(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Return curves between two steps, validations, and where processes of the run began."""
        begins = [(segment.begin.trained, segment.begun_s) for segment in self._segments[1:]]
        head = {"changes": self.columns.changes, "generation": self._log.generation, "resumed": begins}
        return {**head, **self.columns.thin(first, last), "held_out": self.columns.held_out_rows()}

    def make_timeline(self, from_s: float | None, to_s: float | None, bins: int) -> dict[str, Any]:
        parts = self._log.all_parts()
        start_s, end_s = (parts[0].first_s, parts[-1].last_s) if parts else (0.0, 1.0)
        begin_s = start_s if from_s is None else max(start_s, from_s)
        stop_s = end_s if to_s is None else min(max(end_s, begin_s), to_s)
        return view_lanes(self.directory, parts, begin_s, max(stop_s, begin_s + 1e-6), max(1, min(2000, bins)))

    def make_flow(self, bins: int = 400) -> dict[str, Any]:
        """Return groups in flight and ready over the time of the run, and trained against served."""
        parts = self._log.all_parts()
        if not parts:
            return {"time": [], "in_flight": [], "ready": [], "versions": []}
        start_s, end_s = parts[0].first_s, max(parts[-1].last_s, parts[0].first_s + 1e-6)
        series, width_s = resample(parts, start_s, end_s, bins), (end_s - start_s) / bins
        versions = [row for part in parts for row in part.versions]
        none = [0.0] * bins
        return {
            "time": [round(start_s + (place + 0.5) * width_s, 3) for place in range(bins)],
            "in_flight": [round(value / width_s, 2) for value in series.get("groups/in flight", none)],
            "ready": [round(value / width_s, 2) for value in series.get("groups/ready", none)],
            "versions": versions[:: max(1, -(-len(versions) // 800))],
        }

    def make_incidents(self, most: int = 200) -> list[Any]:
        """Return the newest markers of the log, newest first."""
        rows = [row for part in self._log.all_parts()[-64:] for row in part.markers]
        return rows[: -most - 1 : -1]

    def make_config(self) -> list[tuple[str, Any, str]]:
        """Return key, value and origin of every option."""
        rows = self._read_origins()
        if rows or not self._given:
            return rows
        usual = {key: value for key, value in list_leaves(Config()) if key not in self._given}
        rows = [(key, value, CONFIG_FILE) for key, value in self._given.items()]
        return rows + [(key, value, "default") for key, value in usual.items()]


def _make_segments(rows: list[tuple[str, float, dict[str, Any]]]) -> list[RunSegment]:
    found: list[RunSegment] = []
    for kind, time_s, data in rows:
        event = parse_event(f"run.{kind}", "run", data)
        if isinstance(event, RunBegin):
            found.append(RunSegment(begun_s=time_s, begin=event))
        elif isinstance(event, RunEnd) and found:
            found[-1] = RunSegment(begun_s=found[-1].begun_s, begin=found[-1].begin, end=event)
    return found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
