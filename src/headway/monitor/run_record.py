"""A run as it was left behind: its directory read once, whatever state it is in.

    record = read_run(Path("runs/one"))        # or: record_of(events, name="one")

The event log is all that is needed. `config.yaml` says what ran, `samples.jsonl` what the policy answered and
`images.jsonl` what it drew, where they are there. A run that still goes on, was killed, or has hardly begun reads like
any other: what is not there is not shown. Steps that were lost in a crash and trained again count once in the curves,
with what they became.

One pass over the log and nothing kept for every event: a log of a million events is read in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headway.errors import HeadwayError
from headway.monitor.event_log import LoggedEvent, read_events
from headway.monitor.run_report import RunMonitor, RunReport
from headway.monitor.sample_excerpts import AnswerExcerpts, ImageExcerpts, read_answers, read_images
from headway.monitor.timeline_lanes import LaneCollector, TimelineLanes
from headway.monitor.trackers.scalar_series import HELD_OUT_REWARD, ScalarMeter, ScalarPoint

LOG_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"
SAMPLES_FILE = "samples.jsonl"
IMAGES_FILE = "images.jsonl"
_ALIVE_S = 120.0
"""A log without an end that was written to this recently is of a run that goes on."""


@dataclass(slots=True)
class RunCurves:
    """The points of a run by step, those of lost steps taken back."""

    steps: dict[int, ScalarPoint] = field(default_factory=dict)
    held_out: dict[int, ScalarPoint] = field(default_factory=dict)

    def add(self, point: ScalarPoint) -> None:
        """Take a point, in the order of the log."""
        if point.rewind:
            for points in (self.steps, self.held_out):
                for step in [step for step in points if step >= point.step]:
                    del points[step]
        if HELD_OUT_REWARD in point.values:
            self.held_out[point.step] = point
        elif point.values:
            self.steps[point.step] = point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSegment:
    """What one process did for a run: a run that was resumed has several."""

    begun_s: float
    begin: Mapping[str, Any]
    """What `run.begin` said."""
    end: Mapping[str, Any] | None = None
    """What `run.end` said; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that a page about a run is made of."""

    name: str
    report: RunReport
    lanes: TimelineLanes
    curves: RunCurves
    parts: tuple[RunSegment, ...]
    """Empty for logs that do not say when they begin, as those of the simulator."""
    config: Mapping[str, Any]
    """Dotted keys; empty where it was not kept."""
    answers: AnswerExcerpts
    pictures: ImageExcerpts = field(default_factory=ImageExcerpts)
    is_alive: bool = False
    """The log has no end and was written to a moment ago."""


class RunRecordCollector:
    """Builds a `RunRecord` in one pass."""

    def __init__(self, warmup_steps: int = 1) -> None:
        self._monitor, self._lanes, self._meter = RunMonitor(warmup_steps), LaneCollector(), ScalarMeter()
        self._curves = RunCurves()
        self._parts: list[RunSegment] = []

    def __call__(self, event: LoggedEvent) -> None:
        self._monitor(event)
        self._lanes(event)
        point = self._meter(event)
        if point is not None:
            self._curves.add(point)
        if event.kind == "run.begin":
            self._parts.append(RunSegment(begun_s=event.time_s, begin=event.data))
        elif event.kind == "run.end" and self._parts:
            last = self._parts[-1]
            self._parts[-1] = RunSegment(begun_s=last.begun_s, begin=last.begin, end=event.data)

    def record(
        self,
        name: str,
        *,
        config: Mapping[str, Any],
        answers: AnswerExcerpts,
        pictures: ImageExcerpts | None = None,
        is_recent: bool = False,
    ) -> RunRecord:
        """What has been read."""
        parts = tuple(self._parts)
        return RunRecord(
            name=name,
            report=self._monitor.report(),
            lanes=self._lanes.finish(),
            curves=self._curves,
            parts=parts,
            config=flatten_mapping(config),
            answers=answers,
            pictures=pictures or ImageExcerpts(),
            is_alive=is_recent and bool(parts) and parts[-1].end is None,
        )


def make_run_record(
    events: Iterable[LoggedEvent],
    *,
    name: str = "run",
    config: Mapping[str, Any] | None = None,
    answers: AnswerExcerpts | None = None,
    warmup_steps: int = 1,
) -> RunRecord:
    """The record of events from anywhere."""
    collector = RunRecordCollector(warmup_steps)
    for event in events:
        collector(event)
    return collector.record(name, config=config or {}, answers=answers or AnswerExcerpts())


def read_run_record(path: Path, *, warmup_steps: int = 1) -> RunRecord:
    """The record of a run's directory, or of an event log alone."""
    directory, log = (path, path / LOG_FILE) if path.is_dir() else (path.parent, path)
    collector = RunRecordCollector(warmup_steps)
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for event in read_events(lines):
                collector(event)
        age_s = time.time() - log.stat().st_mtime
    except OSError as error:
        raise HeadwayError(f"{path}: no run to report on ({error.strerror}: {log.name})") from error
    return collector.record(
        directory.resolve().name,
        config=_config(directory / CONFIG_FILE),
        answers=read_answers(directory / SAMPLES_FILE),
        pictures=read_images(directory / IMAGES_FILE),
        is_recent=age_s < _ALIVE_S,
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise HeadwayError(f"{path}: cannot be read ({error})") from error
    return tree if isinstance(tree, dict) else {}


def flatten_mapping(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_mapping(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
