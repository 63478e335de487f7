"""Writers of trackers: TensorBoard, JSON lines, Weights & Biases, trackio, MLflow and SwanLab.

A resumed run goes on in the same files and under the same name at a service. Steps that are trained again after a
crash replace the old ones: in TensorBoard by its own mark of a restart, in `metrics.jsonl` by a line
`{"rewind": step}`, which voids every earlier line of that step or a later one (`read_metrics` applies these lines).
The services cannot take numbers back, so their curves show both; points carry the trained version as `trained`, and
curves are drawn over it, because validation and steps made again do not come in order.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.monitor.scalar_series import ScalarPoint

METRICS_FILE = "metrics.jsonl"
_TENSORBOARD_QUEUE_SIZE = 1000
"""Points that TensorBoard's own thread may be behind before a write has to wait."""
_ID_FILE = "tracker_id"
_MLFLOW_PARAMETER_LENGTH, _MLFLOW_PARAMETERS = 6000, 100
"""Longest value of a parameter, and most parameters of one request, that MLflow takes."""


class JsonlWriter:
    """Writes lines such as `{"step": 7, "time_s": 81.2, "reward/train": 0.4, …}`; null if a number is not finite."""

    def __init__(self, path: Path) -> None:
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._stream = path.open("a", encoding="utf-8", newline="\n", buffering=1)
        if is_torn:
            self._stream.write("\n")

    def write(self, point: ScalarPoint) -> None:
        if point.rewind:
            self._write_line({"rewind": point.step})
        if point.values:
            values = {name: value if math.isfinite(value) else None for name, value in point.values.items()}
            self._write_line({"step": point.step, "time_s": round(point.time_s, 6), **values})

    def _write_line(self, row: dict[str, Any]) -> None:
        self._stream.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._stream.close()


def read_metrics(lines: Iterable[str]) -> dict[int, dict[str, float | None]]:
    """Return what `metrics.jsonl` holds by step, without voided lines and lines torn by a killed process."""
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
    """Writes event files for `tensorboard --logdir`, with the tensorboard package alone."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        is_first = not any(directory.glob("events.out.tfevents.*"))
        self._files = EventFileWriter(str(directory), max_queue_size=_TENSORBOARD_QUEUE_SIZE, flush_secs=10)
        if is_first:
            self._mark_restart(0)  # the first mark of a start voids nothing, each later one does

    def _mark_restart(self, step: int) -> None:
        start = self._session(status=self._session.START)
        self._files.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def write(self, point: ScalarPoint) -> None:
        if point.rewind:
            self._mark_restart(point.step)
        if point.values:
            rows = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            summary = self._summary(value=rows)
            self._files.add_event(self._event(wall_time=time.time(), step=point.step, summary=summary))

    def close(self) -> None:
        self._files.close()


class _ServiceWriter:
    """Writes to a run at a service, which cannot take numbers back."""

    _run: Any
    """The run as the client of the service knows it."""

    def write(self, point: ScalarPoint) -> None:
        if point.values:
            self.log(point)

    def log(self, point: ScalarPoint) -> None:
        """Send the numbers of one point."""
        raise NotImplementedError

    def close(self) -> None:
        self._run.finish()


class WandbWriter(_ServiceWriter):
    """Writes to a run of Weights & Biases."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        run_id = load_tracker_id(directory)
        name = f"{directory.name}-{run_id}"
        where = {"project": project, "name": name, "id": run_id, "dir": str(directory)}
        self._run = wandb.init(**where, resume="allow", config=dict(config))
        self._run.define_metric("trained")
        self._run.define_metric("*", step_metric="trained")

    def log(self, point: ScalarPoint) -> None:
        self._run.log({**point.values, "trained": point.step})


class TrackioWriter(_ServiceWriter):
    """Writes to a run of trackio."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        name = f"{directory.name}-{load_tracker_id(directory)}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(config))

    def log(self, point: ScalarPoint) -> None:
        self._run.log({**point.values, "trained": point.step}, step=point.step)


class SwanLabWriter(_ServiceWriter):
    """Writes to a run of SwanLab; `SWANLAB_MODE` says whether it goes to the service or stays here."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import swanlab

        logs = directory / "swanlab"
        logs.mkdir(exist_ok=True)
        name = f"{directory.name}-{load_tracker_id(directory)}"
        where = {"project": project, "name": name, "id": load_tracker_id(directory), "log_dir": str(logs)}
        self._run = swanlab.init(**where, resume="allow", config=dict(config))

    def log(self, point: ScalarPoint) -> None:
        self._run.log(dict(point.values), step=point.step)


class MlflowWriter(_ServiceWriter):
    """Writes to a run of MLflow: to the server of `MLFLOW_TRACKING_URI`, or to `mlflow.db` beside the run."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, mark = Metric, directory / "mlflow_run"
        server = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=server)
        if mark.exists():
            self._run_id = mark.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment, run_name=directory.name).info.run_id
        options = [Param(key, str(value)[:_MLFLOW_PARAMETER_LENGTH]) for key, value in config.items()]
        for first in range(0, len(options), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=options[first : first + _MLFLOW_PARAMETERS])
        mark.write_text(f"{self._run_id}\n", encoding="utf-8")

    def log(self, point: ScalarPoint) -> None:
        now_ms = int(time.time() * 1000)
        rows = [self._metric(name, value, now_ms, point.step) for name, value in point.values.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def load_tracker_id(directory: Path) -> str:
    """Return the id of this run at a service; the first call makes it and stores it in the run's directory."""
    path = directory / _ID_FILE
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
