"""What every trainer must do."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.errors import TrainerCrashed, TrainerError, TransferError
from headway.trainers.base import Trainer
from headway.trainers.remote_trainer import RemoteTrainer
from headway.types import Batch


class Watched(RemoteTrainer):
    """Knows the checksums of its newest weights."""

    contents: tuple[str, ...] = ()

    async def note(self) -> None:
        manifest, _ = await self.source.gather(self.version)
        self.contents = manifest.checksums

    async def train(self, batch: Batch) -> Any:
        found = await super().train(batch)
        await self.note()
        return found

    async def load(self, directory: Path) -> Sequence[str]:
        notes = await super().load(directory)
        await self.note()
        return notes


class TrainerContract(ABC):
    """Subclass, fill in the factory, and name the class `Test…`."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    @abstractmethod
    def make(self) -> Trainer:
        """A trainer at version 0."""

    @abstractmethod
    def batch(self, trained: int) -> Batch:
        """Something to train on; another `trained`, other samples."""

    @abstractmethod
    async def crash(self, trainer: Trainer) -> None:
        """Break it."""

    @abstractmethod
    def contents(self, trainer: Trainer) -> object:
        """What was learnt, comparable: a digest of the weights."""

    def test_a_step_makes_the_next_version_and_publishes_it(self) -> None:
        async def scenario() -> None:
            trainer = self.make()
            assert trainer.version == 0
            await trainer.source.gather(0)
            for trained in range(3):
                metrics = await trainer.train(self.batch(trained))
                assert all(isinstance(value, float) for value in metrics.values())
                assert trainer.version == trained + 1
                manifest, buckets = await trainer.source.gather(trained + 1)
                assert manifest.version == trained + 1
                assert [bucket.checksum async for bucket in buckets] == list(manifest.checksums)

        self.run(scenario())

    def test_a_step_is_all_or_nothing(self) -> None:
        async def scenario() -> None:
            trainer = self.make()
            before = self.contents(trainer)
            with pytest.raises(TrainerError):
                await trainer.train(self.batch(5))
            assert trainer.version == 0 and self.contents(trainer) == before
            task = asyncio.create_task(trainer.train(self.batch(0)))
            await asyncio.sleep(0)
            await self.crash(trainer)
            with pytest.raises(TrainerCrashed):
                await task
            with pytest.raises(TrainerCrashed):
                await trainer.train(self.batch(0))
            with pytest.raises(TransferError):
                await trainer.source.gather(1)

        self.run(scenario())

    def test_a_checkpoint_brings_back_what_was_learnt(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            trainer = self.make()
            await trainer.train(self.batch(0))
            await trainer.train(self.batch(1))
            await trainer.save(tmp_path / "checkpoint")
            saved = self.contents(trainer)
            await trainer.train(self.batch(2))
            assert self.contents(trainer) != saved
            ahead = self.contents(trainer)
            await self.crash(trainer)
            await trainer.restart()
            await trainer.load(tmp_path / "checkpoint")
            assert trainer.version == 2 and self.contents(trainer) == saved
            await trainer.source.gather(2)
            await trainer.train(self.batch(2))
            assert self.contents(trainer) == ahead, "the same samples teach the same again"

        self.run(scenario())

    def test_another_trainer_can_load_the_checkpoint(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            trainer, other = self.make(), self.make()
            await trainer.train(self.batch(0))
            await trainer.save(tmp_path / "checkpoint")
            await other.load(tmp_path / "checkpoint")
            assert other.version == 1 and self.contents(other) == self.contents(trainer)

        self.run(scenario())

    def test_a_directory_without_checkpoint_is_refused(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            trainer = self.make()
            with pytest.raises(TrainerError):
                await trainer.load(tmp_path)
            assert trainer.version == 0

        self.run(scenario())

    def test_close_can_be_called_twice(self) -> None:
        async def scenario() -> None:
            trainer = self.make()
            await trainer.close()
            await trainer.close()

        self.run(scenario())
