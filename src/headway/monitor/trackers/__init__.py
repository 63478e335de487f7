"""Trackers: who is told the numbers of a run while it goes on. `scalars` says which numbers there are.

    trackers = make_trackers(config.track_with, run_dir, project=config.exp_name, config=changed)
    for tracker in trackers:
        log.attach(tracker)
    ...
    for tracker in trackers:
        tracker.close()

Packages are imported when they are asked for. One that is missing, or does not start, is a `ConfigError` here,
before anything runs; one that fails later is switched off (`tracker`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.monitor.trackers.scalar_series import ScalarMeter, ScalarPoint, compute_scalars
from headway.monitor.trackers.tracker import Tracker, TrackerWriter, print_to_stderr
from headway.monitor.trackers.tracker_writers import (
    METRICS_FILE,
    JsonlWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    read_metrics,
)

__all__ = ["METRICS_FILE", "ScalarMeter", "ScalarPoint", "Tracker", "compute_scalars", "make_trackers", "read_metrics"]

TrackerWriterFactory = Callable[[Path, str, Mapping[str, Any]], TrackerWriter]
_MAKERS: dict[str, TrackerWriterFactory] = {
    "tensorboard": lambda directory, project, config: TensorBoardWriter(directory / "tensorboard"),
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
    "jsonl": lambda directory, project, config: JsonlWriter(directory / METRICS_FILE),
}
TRACKER_NAMES = tuple(_MAKERS)


def make_trackers(
    names: Sequence[str],
    directory: Path,
    *,
    project: str,
    config: Mapping[str, Any],
    on_failure: Callable[[str], None] = print_to_stderr,
) -> list[Tracker]:
    """A tracker for each name, with its files in `directory`; `on_failure` is told when one is switched off."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        _check(name)
    directory.mkdir(parents=True, exist_ok=True)
    made: list[Tracker] = []
    for name in wanted:
        try:
            writer = _MAKERS[name](directory, project, config)
        except Exception as error:  # foreign code that talks to files, accounts and networks
            for tracker in made:
                tracker.close()
            problem = f"does not start: {type(error).__name__}: {error}"
            raise ConfigError(problem, key="track_with", value=name, hint="leave it out to run without it") from error
        made.append(Tracker(name, writer, on_failure))
    return made


def _check(name: str) -> None:
    if name not in _MAKERS:
        raise ConfigError(f"no such tracker; there are {', '.join(TRACKER_NAMES)}", key="track_with", value=name)
    if name != "jsonl" and importlib.util.find_spec(name) is None:
        raise ConfigError("the package is not installed", key="track_with", value=name, hint=f"pip install {name}")
