"""The child's side of a remote trainer or scorer: answers its parent's calls with one of its own process.

A changed version is told before the answer of the call that changed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headway.errors import ScoringError, TransferError
from headway.trainers.base import Scorer, Trainer
from headway.types import Batch, SampleGroup
from headway.weights.base import Bucket, Manifest, PayloadRef, WeightReceiver


@runtime_checkable
class ScoringTrainer(Protocol):
    """A trainer that can also score: with its policy, its reference or its critic."""

    async def score(self, kind: Any, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Between two steps."""
        ...


@runtime_checkable
class WeightFollower(Protocol):
    """A scorer whose weights can be replaced between two groups."""

    receiver: WeightReceiver


class TrainerHost:
    """Made by the child around what the target returned."""

    def __init__(self, trainer: Trainer, tell: Callable[[Any], None]) -> None:
        self._trainer = trainer
        self._tell = tell
        self._told: int | None = None
        self._gathering = asyncio.Lock()

    async def ready(self) -> None:
        async with self._telling():
            pass

    async def train(self, batch: Batch) -> Mapping[str, float]:
        async with self._telling():
            return await self._trainer.train(batch)

    async def save(self, directory: Path) -> None:
        async with self._telling():
            await self._trainer.save(directory)

    async def load(self, directory: Path) -> None:
        async with self._telling():
            await self._trainer.load(directory)

    async def score(self, kind: str, group: SampleGroup) -> Sequence[Sequence[float]]:
        if not isinstance(self._trainer, ScoringTrainer):
            raise ScoringError(f"{type(self._trainer).__name__} trains and cannot score")
        async with self._telling():
            return await self._trainer.score(kind, group)

    async def gather(self, version: int) -> tuple[Manifest, list[Bucket]]:
        """All buckets at once: a manifest with their checksums exists only when they do."""
        async with self._telling(), self._gathering:
            manifest, buckets = await self._trainer.source.gather(version)
            found = [bucket async for bucket in buckets]
        if not all(isinstance(bucket.payload, PayloadRef) for bucket in found):
            raise TransferError(f"version {version} lies where no other process sees it: its store needs another arena")
        return manifest, found

    async def close(self) -> None:
        await self._trainer.close()

    @asynccontextmanager
    async def _telling(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._trainer.version != self._told:
                self._told = self._trainer.version
                self._tell(self._told)


class ScorerHost:
    """Made by the child around a `Scorer`; one that is a `WeightFollower` takes new weights."""

    def __init__(self, scorer: Scorer, tell: Callable[[Any], None]) -> None:
        self._scorer = scorer

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._scorer.score(group)

    async def begin(self, manifest: Manifest) -> None:
        await self._receiver().begin(manifest)

    async def load(self, bucket: Bucket) -> None:
        await self._receiver().load(bucket)

    async def flip(self) -> int:
        await self._receiver().flip()
        return self._receiver().version

    async def close(self) -> None:
        await self._scorer.close()

    def _receiver(self) -> WeightReceiver:
        if not isinstance(self._scorer, WeightFollower):
            raise TransferError(f"the weights of {type(self._scorer).__name__} cannot be replaced")
        return self._scorer.receiver
