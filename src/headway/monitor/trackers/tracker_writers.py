"""Trackers that write files into the run's directory: TensorBoard and JSON lines.

Both append to what an earlier process wrote. Steps that are trained again after a crash replace the old ones: in
TensorBoard by its own mark of a restart, in `metrics.jsonl` by a line `{"rewind": step}`, behind which every earlier
line of that step or a later one is void. `read_metrics` applies the marks.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.monitor.trackers.scalar_series import ScalarPoint

METRICS_FILE = "metrics.jsonl"
_QUEUED = 1000
"""Points TensorBoard's own thread may be behind before a write has to wait."""


class JsonlWriter:
    """`{"step": 7, "time_s": 81.2, "reward/train": 0.4, …}`, a line a point; numbers JSON does not have are null."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._stream = path.open("a", encoding="utf-8", newline="\n", buffering=1)
        if torn:
            self._stream.write("\n")

    def write(self, point: ScalarPoint) -> None:
        if point.rewind:
            self._line({"rewind": point.step})
        if point.values:
            values = {name: value if math.isfinite(value) else None for name, value in point.values.items()}
            self._line({"step": point.step, "time_s": round(point.time_s, 6), **values})

    def _line(self, row: dict[str, Any]) -> None:
        self._stream.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._stream.close()


def read_metrics(lines: Iterable[str]) -> dict[int, dict[str, float | None]]:
    """What `metrics.jsonl` holds, by step, voided lines left out; lines a killed process tore are passed over."""
    found: dict[int, dict[str, float | None]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "rewind" in row:
            found = {step: values for step, values in found.items() if step < row["rewind"]}
        else:
            found.setdefault(row.pop("step"), {}).update(row)
    return found


class TensorBoardWriter:
    """Event files for `tensorboard --logdir`, written by the tensorboard package alone."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        is_first = not any(directory.glob("events.out.tfevents.*"))
        self._files = EventFileWriter(str(directory), max_queue_size=_QUEUED, flush_secs=10)
        if is_first:
            self._mark(0)  # the first mark of a start voids nothing, each later one does

    def _mark(self, step: int) -> None:
        start = self._session(status=self._session.START)
        self._files.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def write(self, point: ScalarPoint) -> None:
        if point.rewind:
            self._mark(point.step)
        if point.values:
            rows = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            summary = self._summary(value=rows)
            self._files.add_event(self._event(wall_time=time.time(), step=point.step, summary=summary))

    def close(self) -> None:
        self._files.close()


_ID_FILE = "tracker_id"


class WandbWriter:
    """A run of Weights & Biases."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        kept = load_tracker_id(directory)
        name = f"{directory.name}-{kept}"
        self._run = wandb.init(
            project=project, name=name, id=kept, resume="allow", dir=str(directory), config=dict(config)
        )
        self._run.define_metric("trained")
        self._run.define_metric("*", step_metric="trained")

    def write(self, point: ScalarPoint) -> None:
        if point.values:
            self._run.log({**point.values, "trained": point.step})

    def close(self) -> None:
        self._run.finish()


class TrackioWriter:
    """A run of trackio."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        name = f"{directory.name}-{load_tracker_id(directory)}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(config))

    def write(self, point: ScalarPoint) -> None:
        if point.values:
            self._run.log({**point.values, "trained": point.step}, step=point.step)

    def close(self) -> None:
        self._run.finish()


def load_tracker_id(directory: Path) -> str:
    """The name of this run at a service: made once, then read again."""
    path = directory / _ID_FILE
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
