"""A run as it was left behind: its directory read once, whatever state it is in.

    record = read_run_record(Path("runs/one"))

Only the event log is required. `config.yaml` says what ran, `samples.jsonl` what the policy answered and `images.jsonl`
what it drew, if they exist. A run that still goes on, was killed, or has hardly begun reads like any other; what is
missing is not shown. Steps that were lost in a crash and trained again count once in the curves, as what they became.

The log is read in one pass and nothing is kept per event, so a log of a million events is read in seconds.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from headway.errors import HeadwayError
from headway.monitor.event_files import LOG_FILE, last_written_s, read_event_log
from headway.monitor.event_log import DAMAGED_LOG, LoggedEvent
from headway.monitor.events import ErrorReport, RunBegin, RunEnd
from headway.monitor.run_report import RunMonitor, RunReport
from headway.monitor.sample_excerpts import AnswerExcerpts, ImagePair, read_answers, read_images
from headway.monitor.scalar_series import ScalarMeter, ScalarPoint
from headway.monitor.timeline_lanes import LaneCollector, TimelineLanes

CONFIG_FILE = "config.yaml"
SAMPLES_FILE = "samples.jsonl"
IMAGES_FILE = "images.jsonl"
_ALIVE_S = 120.0
"""A log without an end that was written to this recently belongs to a run that goes on."""


@dataclass(slots=True)
class RunCurves:
    """The points of a run by step, without those of lost steps."""

    steps: dict[int, ScalarPoint] = field(default_factory=dict)
    held_out: dict[int, ScalarPoint] = field(default_factory=dict)

    def add(self, point: ScalarPoint) -> None:
        """Add a point, in the order of the log."""
        if point.rewind:
            for points in (self.steps, self.held_out):
                for step in [step for step in points if step >= point.step]:
                    del points[step]
        if point.is_held_out:
            self.held_out[point.step] = point
        elif point.values:
            self.steps[point.step] = point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSegment:
    """The part of a run that one process did; a run that was resumed has several."""

    begun_s: float
    begin: RunBegin
    end: RunEnd | None = None
    """None if the process did not report its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that a page about a run is made of."""

    name: str
    report: RunReport
    lanes: TimelineLanes
    curves: RunCurves
    segments: tuple[RunSegment, ...]
    """Empty for logs without `RunBegin`, such as those of the simulator."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys; empty if the run has no configuration file."""
    answers: AnswerExcerpts = field(default_factory=AnswerExcerpts)
    images: tuple[ImagePair, ...] = ()
    is_alive: bool = False
    """Whether the log has no end and was written to a moment ago."""


def make_run_record(events: Iterable[LoggedEvent], *, name: str = "run", warmup_steps: int = 1) -> RunRecord:
    """Return the record of events, in one pass over them."""
    monitor, lanes, meter = RunMonitor(warmup_steps), LaneCollector(), ScalarMeter()
    curves, segments = RunCurves(), list[RunSegment]()
    for logged in events:
        monitor(logged)
        lanes(logged)
        point = meter(logged)
        if point is not None:
            curves.add(point)
        if isinstance(logged.event, RunBegin):
            segments.append(RunSegment(begun_s=logged.time_s, begin=logged.event))
        elif isinstance(logged.event, RunEnd) and segments:
            segments[-1] = replace(segments[-1], end=logged.event)
    report = monitor.report()
    return RunRecord(name=name, report=report, lanes=lanes.finish(), curves=curves, segments=tuple(segments))


def read_run_record(path: Path, *, warmup_steps: int = 1) -> RunRecord:
    """Return the record of a run's directory, or of an event log alone. Raises `HeadwayError`."""
    directory, log = (path, path / LOG_FILE) if path.is_dir() else (path.parent, path)
    try:
        events = _refuse_foreign_file(read_event_log(log), log)
        record = make_run_record(events, name=directory.resolve().name, warmup_steps=warmup_steps)
        age_s = time.time() - last_written_s(log)
    except OSError as error:
        raise HeadwayError(f"{path}: no run to report on ({error.strerror}: {log.name})") from error
    return replace(
        record,
        config=flatten_mapping(_read_config(directory / CONFIG_FILE)),
        answers=read_answers(directory / SAMPLES_FILE),
        images=read_images(directory / IMAGES_FILE),
        is_alive=age_s < _ALIVE_S and bool(record.segments) and record.segments[-1].end is None,
    )


def _refuse_foreign_file(events: Iterable[LoggedEvent], path: Path) -> Iterator[LoggedEvent]:
    """Yield the events. Raise `HeadwayError` if there is none among many lines."""
    damaged: LoggedEvent | None = None
    whole = False
    for logged in events:
        if isinstance(logged.event, ErrorReport) and logged.event.error == DAMAGED_LOG:
            damaged = logged
        else:
            whole = True
        yield logged
    if damaged is not None and not whole:
        raise HeadwayError(f"{path}: holds no events: {damaged.data['message']}")


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise HeadwayError(f"{path}: cannot be read ({error})") from error
    return tree if isinstance(tree, dict) else {}


def flatten_mapping(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_mapping(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
