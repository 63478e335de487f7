"""The child's side of a remote trainer or scorer: it answers the calls of the parent with an object of its process.

A changed version is reported before the answer of the call that changed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headway.errors import ScoringError, TrainerCrashed, TransferError
from headway.trainers.base import ScoreKind, Trainer
from headway.types import Batch, SampleGroup
from headway.weights.base import Bucket, Manifest, PayloadRef, WeightReceiver


@runtime_checkable
class ScoringTrainer(Protocol):
    """A trainer that can also score with its policy, its reference or its critic."""

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Score a group between two steps."""
        ...


class ReplicaModel(Protocol):
    """A scorer with a model of its own."""

    @property
    def receiver(self) -> WeightReceiver | None:
        """Takes in new weights between two groups; None if the weights never change."""
        ...

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Score a group."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class TrainerHost:
    """Serves a trainer; `tell` reports its version. A rank has no trainer before all ranks have joined."""

    def __init__(self, trainer: Trainer | None, tell: Callable[[Any], None]) -> None:
        self.trainer = trainer
        self._tell = tell
        self._told: int | None = None
        self._gathering = asyncio.Lock()

    async def ready(self) -> None:
        """Report the version."""
        async with self._serving():
            pass

    async def train(self, batch: Batch) -> Mapping[str, float]:
        async with self._serving() as trainer:
            return await trainer.train(batch)

    async def save(self, directory: Path) -> None:
        async with self._serving() as trainer:
            await trainer.save(directory)

    async def load(self, directory: Path) -> None:
        async with self._serving() as trainer:
            await trainer.load(directory)

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        async with self._serving() as trainer:
            if not isinstance(trainer, ScoringTrainer):
                raise ScoringError(f"{type(trainer).__name__} trains and cannot score")
            return await trainer.score(kind, group)

    async def gather(self, version: int) -> tuple[Manifest, list[Bucket]]:
        """Return all buckets at once, because a manifest with their checksums exists only when they do."""
        async with self._serving() as trainer, self._gathering:
            manifest, buckets = await trainer.source.gather(version)
            found = [bucket async for bucket in buckets]
        if not all(isinstance(bucket.payload, PayloadRef) for bucket in found):
            raise TransferError(f"version {version} lies where no other process sees it: its store needs another arena")
        return manifest, found

    async def close(self) -> None:
        if self.trainer is not None:
            await self.trainer.close()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Trainer]:
        """Yield the trainer, and report its version afterwards if it changed."""
        trainer = self.trainer
        if trainer is None:
            raise TrainerCrashed("the ranks have not joined yet")
        try:
            yield trainer
        finally:
            if trainer.version != self._told:
                self._told = trainer.version
                self._tell(self._told)


class ScorerHost:
    """Serves a scorer with a model of its own."""

    def __init__(self, scorer: ReplicaModel, tell: Callable[[Any], None]) -> None:
        self._scorer = scorer

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._scorer.score(group)

    async def begin(self, manifest: Manifest) -> None:
        await self._receiver().begin(manifest)

    async def load(self, bucket: Bucket) -> None:
        await self._receiver().load(bucket)

    async def flip(self) -> int:
        """Switch to the new weights and return their version."""
        await self._receiver().flip()
        return self._receiver().version

    async def close(self) -> None:
        await self._scorer.close()

    def _receiver(self) -> WeightReceiver:
        receiver = self._scorer.receiver
        if receiver is None:
            raise TransferError(f"the weights of {type(self._scorer).__name__} cannot be replaced")
        return receiver
