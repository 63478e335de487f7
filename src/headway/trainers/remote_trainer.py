"""Trainers and scorers in child processes: what the parent calls, and the hosts that answer in the child.

    trainer = RemoteTrainer(ChildSpec(name="trainer", target="package.module:make_trainer", args={…}), start=…)

Guarantees: a step is all or nothing, as in the child; if it is cancelled here, it is cancelled there. When a child
ends, everybody who waits for it gets `TrainerCrashed` at once (`TransferError` from `gather`, `ScoringError` from a
`ReplicaScorer`), and so does every later call until `restart`, which starts a child in the initial state. `version` is
what the child last reported: a change is reported before the answer of the call that made it, and after a step that was
cancelled too late with the next answer. Weights cross as names of shared memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headway.errors import (
    BackendError,
    ConfigError,
    EngineCrashed,
    ScoringError,
    TrainerCrashed,
    TrainerError,
    TransferError,
)
from headway.processes.base import ChildSpec, RestartablePeer, RestartablePeers, StartPeer
from headway.trainers.base import OffloadReporter, ReturnsTrainer, ScoreKind, ScoringTrainer, Trainer
from headway.types import Batch, SampleGroup
from headway.weights.base import Bucket, Manifest, PayloadRef, WeightReceiver

TRAINER_HOST = "headway.trainers.remote_trainer:TrainerHost"
SCORER_HOST = "headway.trainers.remote_trainer:ScorerHost"


class ReplicaModel(Protocol):
    """A scorer with a model of its own."""

    @property
    def receiver(self) -> WeightReceiver | None:
        """Takes in new weights between two groups; None if the weights never change."""

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Score a group."""

    async def close(self) -> None:
        """Release everything. Idempotent."""


class TrainerHost:
    """Serves a trainer; `tell` reports its version as a number, and as true and false when it begins and ends a step
    that moves moments between host and device. A rank has no trainer before all ranks have joined."""

    def __init__(self, trainer: Trainer | None, tell: Callable[[Any], None]) -> None:
        self.trainer = trainer
        self._tell = tell
        self._reported: int | None = None
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

    async def load(self, directory: Path) -> Sequence[str]:
        async with self._serving() as trainer:
            return await trainer.load(directory)

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        async with self._serving() as trainer:
            if not isinstance(trainer, ScoringTrainer):
                raise ScoringError(f"{type(trainer).__name__} trains and cannot score")
            return await trainer.score(kind, group)

    async def compute_returns(self, batch: Batch) -> tuple[Sequence[float], Sequence[bool]]:
        """Return what a critic in another process learns from a batch."""
        async with self._serving() as trainer:
            if not isinstance(trainer, ReturnsTrainer):
                raise TrainerError(f"{type(trainer).__name__} computes no returns")
            return await trainer.compute_returns(batch)

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
        if self._reported is None and isinstance(trainer, OffloadReporter):
            loop = asyncio.get_running_loop()
            trainer.report_offload_to(lambda begins: loop.call_soon_threadsafe(self._tell, begins))
        try:
            yield trainer
        finally:
            if trainer.version != self._reported:
                self._reported = trainer.version
                self._tell(self._reported)


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


class RemoteTrainer:
    """A `Trainer` in a child process. `spec.target` makes it there, with a store in shared memory."""

    def __init__(self, spec: ChildSpec, start: StartPeer) -> None:
        self.name = spec.name
        self.version = 0
        self._report_offload: Callable[[bool], object] = lambda begins: None
        self.source = RemoteWeightSource(self)
        self._child = self._make_child(replace(spec, host=TRAINER_HOST), start)

    def _make_child(self, spec: ChildSpec, start: StartPeer) -> RestartablePeers:
        return RestartablePeer(spec, start, crashed=TrainerCrashed, on_note=self._take_note, greeting="ready")

    async def start(self) -> None:
        await self._child.start()

    def report_offload_to(self, report: Callable[[bool], object]) -> None:
        self._report_offload = report

    async def train(self, batch: Batch) -> Mapping[str, float]:
        metrics: Mapping[str, float] = await self.call("train", batch)
        return metrics

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        rows: Sequence[Sequence[float]] = await self.call("score", kind, group)
        return rows

    async def save(self, directory: Path) -> None:
        await self.call("save", directory)

    async def load(self, directory: Path) -> Sequence[str]:
        notes: Sequence[str] = await self.call("load", directory)
        return notes

    async def restart(self) -> None:
        await self._child.restart()

    async def close(self) -> None:
        await self._child.close()

    async def call(self, method: str, *args: Any, failure: type[BackendError] = TrainerError) -> Any:
        """Call a method of the child. An error that is not Headway's becomes `failure`."""
        return await self._child.call(method, *args, failure=failure)

    def _take_note(self, note: int | bool) -> None:
        if isinstance(note, bool):
            self._report_offload(note)
        else:
            self.version = note


class RemoteWeightSource:
    """The `WeightSource` of a remote trainer. Any number of tasks may gather; the child serves them one by one."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        try:
            manifest, buckets = await self._trainer.call("gather", version, failure=TransferError)
        except TrainerCrashed as error:
            raise TransferError(f"version {version}: {error}") from error
        return manifest, _iterate(buckets)


async def _iterate(buckets: Sequence[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


class ReplicaScorer:
    """A `Scorer` with a model in a child process of its own. A child that has ended is restarted by the next group.

    With `follows`, it takes that trainer's weights before it scores, whenever it is behind. A group is then scored
    under no older weights than the trainer had at the call. The trainer's source must allow several gathers at once, as
    that of `RemoteTrainer` does. Without `follows` it scores with the initial weights.
    """

    def __init__(self, spec: ChildSpec, start: StartPeer, *, follows: Trainer | None = None) -> None:
        self.name = spec.name
        self.version = -1
        """Version of the trainer's weights; −1 before the first ones."""
        self._follows = follows
        self._child = RestartablePeer(
            replace(spec, host=SCORER_HOST),
            start,
            crashed=ScoringError,
            on_note=lambda note: None,
            on_down=self._reset_version,
        )
        self._updating = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        try:
            await self._bring_up_to_date()
        except ScoringError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            await self._bring_up_to_date()
            rows: Sequence[Sequence[float]] = await self._child.call("score", group, failure=ScoringError)
        except (ScoringError, TransferError, EngineCrashed) as error:
            if isinstance(error.__cause__, TrainerCrashed):
                raise error.__cause__ from error  # the trainer that it follows is lost
            raise ScoringError(f"{self.name}: group {group.group_id}: {error}") from error
        return rows

    async def close(self) -> None:
        self._closed = True
        await self._child.close()

    def _reset_version(self) -> None:
        self.version = -1

    async def _bring_up_to_date(self) -> None:
        """Start the child if it is down, and give it the trainer's weights if it is behind."""
        async with self._updating:
            if self._closed:
                raise ScoringError(f"{self.name} is closed")
            if not self._child.alive:
                await self._child.restart()
            trainer = self._follows
            if trainer is not None and self.version != trainer.version:
                manifest, buckets = await trainer.source.gather(trainer.version)
                await self._child.call("begin", manifest, failure=TransferError)
                async for bucket in buckets:
                    await self._child.call("load", bucket, failure=TransferError)
                self.version = await self._child.call("flip", failure=TransferError)


class ScorerReplicas:
    """A `Scorer` of several others that compute the same; each group goes to the one with the fewest groups."""

    def __init__(self, scorers: Sequence[ReplicaScorer]) -> None:
        self._scorers, self._groups = list(scorers), [0] * len(scorers)

    async def start(self) -> None:
        for outcome in await asyncio.gather(*(one.start() for one in self._scorers), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        number = self._groups.index(min(self._groups))
        self._groups[number] += 1
        try:
            return await self._scorers[number].score(group)
        finally:
            self._groups[number] -= 1

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._scorers))
