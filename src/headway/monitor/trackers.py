"""Trackers give the numbers of a run to files and services that draw them while it goes on.

    trackers = make_trackers(config.track_with, run_dir, project="sums", config=changed)
    for tracker in trackers:
        log.attach(tracker)
    ...
    for tracker in trackers:
        tracker.close()

`scalar_series` defines the numbers. Packages are imported when they are asked for. One that is missing, or does not
start, is a `ConfigError` before anything runs; one that fails later is reported once and switched off, and the run goes
on. Writers get a handful of numbers per step and are expected to return at once.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError
from headway.monitor.event_log import LoggedEvent
from headway.monitor.metric_exports import OpenTelemetrySink, PrometheusWriter
from headway.monitor.scalar_series import ScalarMeter, ScalarPoint
from headway.monitor.tracker_writers import (
    METRICS_FILE,
    JsonlWriter,
    MlflowWriter,
    SwanLabWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
)


class TrackerWriter(Protocol):
    """Writes points to a file or a service."""

    def write(self, point: ScalarPoint) -> None:
        """Take one point; a rewind comes before the numbers that replace the old ones."""

    def close(self) -> None:
        """Return when everything that was written is safe."""


_WRITER_FACTORIES: dict[str, Callable[[Path, str, Mapping[str, Any]], TrackerWriter]] = {
    "tensorboard": lambda directory, project, config: TensorBoardWriter(directory / "tensorboard"),
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
    "mlflow": MlflowWriter,
    "swanlab": SwanLabWriter,
    "jsonl": lambda directory, project, config: JsonlWriter(directory / METRICS_FILE),
}
TRACKER_MODULES = {name: "" if name == "jsonl" else name for name in _WRITER_FACTORIES}
"""The module that each tracker needs."""


def print_to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


class ClosableSink(Protocol):
    """A sink that has something to finish."""

    def __call__(self, event: LoggedEvent) -> None: ...
    def close(self) -> None: ...


class GuardedSink:
    """Passes events on to a sink of somebody else's, and switches it off with one line if it raises."""

    def __init__(self, name: str, sink: ClosableSink, on_failure: Callable[[str], None] = print_to_stderr) -> None:
        self.name = name
        self.failure = ""
        """Why it was switched off; empty while it works."""
        self._sink = sink
        self._on_failure = on_failure

    def __call__(self, event: LoggedEvent) -> None:
        if self.failure:
            return
        try:
            self._sink(event)
        except Exception as error:  # third-party code may raise anything, and must not stop a run
            self._switch_off(error)

    def close(self) -> None:
        if self.failure:
            return
        try:
            self._sink.close()
        except Exception as error:  # third-party code may raise anything, and must not stop a run
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._on_failure(f"{self.name}: tracking is switched off for the rest of the run ({self.failure})")


class Tracker(GuardedSink):
    """A sink that gives the numbers of a run to one writer."""

    def __init__(self, name: str, writer: TrackerWriter, on_failure: Callable[[str], None] = print_to_stderr) -> None:
        super().__init__(name, _PointSink(writer), on_failure)


class _PointSink:
    """Measures events and writes the points that they make."""

    def __init__(self, writer: TrackerWriter) -> None:
        self._writer, self._meter = writer, ScalarMeter()

    def __call__(self, event: LoggedEvent) -> None:
        point = self._meter(event)
        if point is not None:
            self._writer.write(point)

    def close(self) -> None:
        self._writer.close()


def make_trackers(
    names: Sequence[str],
    directory: Path,
    *,
    project: str,
    config: Mapping[str, Any],
    on_failure: Callable[[str], None] = print_to_stderr,
) -> list[Tracker]:
    """Return a tracker for each name, with its files in `directory`. Raises `ConfigError`.

    `on_failure` is called with a message when a tracker is switched off.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        _check_tracker_name(name)
    directory.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    for name in names:
        try:
            writer = _WRITER_FACTORIES[name](directory, project, config)
        except Exception as error:  # third-party code that talks to files, accounts and networks may raise anything
            for tracker in trackers:
                tracker.close()
            problem = f"does not start: {type(error).__name__}: {error}"
            raise ConfigError(problem, key="track_with", value=name, hint="leave it out to run without it") from error
        trackers.append(Tracker(name, writer, on_failure))
    return trackers


def make_exports(*, prometheus_port: int | None, opentelemetry_endpoint: str | None, run: str) -> list[GuardedSink]:
    """Return the exports for monitoring systems that a configuration asks for. Raises `ConfigError`."""
    exports: list[GuardedSink] = []
    if prometheus_port is not None:
        exports.append(Tracker("prometheus", PrometheusWriter(prometheus_port, run)))
    if opentelemetry_endpoint:
        exports.append(GuardedSink("opentelemetry", OpenTelemetrySink(opentelemetry_endpoint, run)))
    return exports


def _check_tracker_name(name: str) -> None:
    if name not in _WRITER_FACTORIES:
        known = ", ".join(_WRITER_FACTORIES)
        raise ConfigError(f"no such tracker; there are {known}", key="track_with", value=name)
    if TRACKER_MODULES[name] and importlib.util.find_spec(TRACKER_MODULES[name]) is None:
        raise ConfigError("the package is not installed", key="track_with", value=name, hint=f"pip install {name}")
