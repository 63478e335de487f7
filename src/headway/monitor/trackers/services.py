"""Trackers of others: Weights & Biases, and trackio, which has the same interface.

A resumed run goes on under the name it had, which is kept in the run's directory. Points carry the trained version
as `trained`, and curves are drawn over it: both services take numbers in any order of it, which validation and steps
made again after a crash need. Neither can take numbers back; after a rewind a curve has both.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.monitor.trackers.scalars import Point

_ID_FILE = "tracker_id"


class WandbWriter:
    """A run of Weights & Biases."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        kept = kept_id(directory)
        name = f"{directory.name}-{kept}"
        self._run = wandb.init(
            project=project, name=name, id=kept, resume="allow", dir=str(directory), config=dict(config)
        )
        self._run.define_metric("trained")
        self._run.define_metric("*", step_metric="trained")

    def write(self, point: Point) -> None:
        if point.values:
            self._run.log({**point.values, "trained": point.step})

    def close(self) -> None:
        self._run.finish()


class TrackioWriter:
    """A run of trackio."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        name = f"{directory.name}-{kept_id(directory)}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(config))

    def write(self, point: Point) -> None:
        if point.values:
            self._run.log({**point.values, "trained": point.step}, step=point.step)

    def close(self) -> None:
        self._run.finish()


def kept_id(directory: Path) -> str:
    """The name of this run at a service: made once, then read again."""
    path = directory / _ID_FILE
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
