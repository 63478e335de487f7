"""What the line asks of whoever holds the weights being trained.

A step is all or nothing: `train` either returns with `version` one higher, or raises with `version` unchanged
(`TrainerError`), or the trainer is gone (`TrainerCrashed`) and comes back by `restart` with the version of its
last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headway.types import Batch, SampleGroup
from headway.weights.base import WeightSource


class Trainer(Protocol):
    """The policy being trained."""

    version: int
    """Optimizer updates done."""

    @property
    def source(self) -> WeightSource:
        """Where `param_update` gathers from."""
        ...

    async def train(self, batch: Batch) -> Mapping[str, float]:
        """One update on `batch`; returns metrics. Afterwards `version == batch.trained + 1`."""
        ...

    async def save(self, directory: Path) -> None:
        """Write everything needed to go on from `version` into the empty `directory`."""
        ...

    async def load(self, directory: Path) -> None:
        """Become what `save` wrote."""
        ...

    async def start(self) -> None:
        """Bring the trainer up before its first step; a no-op for one that lives in this process.

        Raises `ConfigError` when it cannot run as configured, `TrainerCrashed` when it does not come up; `restart`
        then tries once more.
        """
        ...

    async def restart(self) -> None:
        """Bring a crashed trainer back, holding nothing; `load` follows."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class Scorer(Protocol):
    """One number per action for each sample of a group: log-probs, reference log-probs, or values."""

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        """In the order of `group.samples`; of a policy that moves, `Scores`. Raises `ScoringError`."""
        ...

    async def start(self) -> None:
        """Bring the scorer up before its first group; a no-op for one that shares the trainer's process.

        Raises `ConfigError` when it cannot run as configured, else `ScoringError`.
        """
        ...

    async def close(self) -> None:
        """Release everything that the scorer owns. Idempotent."""
        ...
