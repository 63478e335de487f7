"""A trainer, or a scorer, in a process of its own, behind the same protocols.

    trainer = RemoteTrainer(ChildSpec(name="trainer", target="package.module:make_trainer", args={…}), start=…)

Guarantees: a step is all or nothing, as in the child; cancelled here, it is cancelled there. A child that ends is
`TrainerCrashed` at once for everybody who waits for it (`TransferError` for who gathers, `ScoringError` for who
scores), and until `restart`, which starts another that holds what the target made. `version` is what the child last
told: after a step that was cancelled too late to stop it, it follows with the next answer. Weights cross as names of
shared memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from headway.errors import (
    BackendError,
    ConfigError,
    EngineCrashed,
    HeadwayError,
    ScoringError,
    TrainerCrashed,
    TrainerError,
    TransferError,
)
from headway.processes.base import ChildSpec, Peer, PeerFailed, PeerLost, RestartablePeer, StartPeer
from headway.trainers.base import Trainer
from headway.types import Batch, SampleGroup
from headway.weights.base import Bucket, Manifest

TRAINER_HOST = "headway.trainers.trainer_host:TrainerHost"
SCORER_HOST = "headway.trainers.trainer_host:ScorerHost"

ScoreKind = Literal["policy", "reference", "value"]
"""Log-probabilities now, log-probabilities at the start, or values."""


class RestartableChild(Protocol):
    """One child after the other, or several that live and die together; once lost, down until `restart`."""

    async def start(self) -> None: ...
    async def call(self, method: str, *args: Any, failure: type[BackendError]) -> Any: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class RemoteTrainer:
    """`spec.target` makes the `Trainer` in the child, with a store in shared memory."""

    def __init__(self, spec: ChildSpec, start: StartPeer, *, close_s: float = 5.0) -> None:
        self.name = spec.name
        self.version = 0
        self.source = RemoteWeightSource(self)
        self._child = self._kept(replace(spec, host=TRAINER_HOST), start, close_s)

    def _kept(self, spec: ChildSpec, start: StartPeer, close_s: float) -> RestartableChild:
        return RestartablePeer(
            spec, start, crashed=TrainerCrashed, on_note=self._told, greeting="ready", close_s=close_s
        )

    async def start(self) -> None:
        """Have the child ready. Raises `ConfigError` when it refuses what it was given, else `TrainerCrashed`."""
        await self._child.start()

    async def train(self, batch: Batch) -> Mapping[str, float]:
        metrics: Mapping[str, float] = await self.ask("train", batch)
        return metrics

    async def save(self, directory: Path) -> None:
        await self.ask("save", directory)

    async def load(self, directory: Path) -> None:
        await self.ask("load", directory)

    async def restart(self) -> None:
        await self._child.restart()

    async def close(self) -> None:
        await self._child.close()

    async def ask(self, method: str, *args: Any, otherwise: type[BackendError] = TrainerError) -> Any:
        """Call the child. Errors that are not ours become `otherwise`."""
        return await self._child.call(method, *args, failure=otherwise)

    def _told(self, version: int) -> None:
        self.version = version


class RemoteWeightSource:
    """A `WeightSource` that any number of tasks may gather from: the child lets them in one by one."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        try:
            manifest, buckets = await self._trainer.ask("gather", version, otherwise=TransferError)
        except TrainerCrashed as error:
            raise TransferError(f"version {version}: {error}") from error
        return manifest, _each(buckets)


async def _each(buckets: Sequence[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


class RemoteScorer:
    """A `Scorer` inside the trainer's child: it shares its models, and takes turns with its steps."""

    def __init__(self, trainer: RemoteTrainer, kind: ScoreKind) -> None:
        self._trainer = trainer
        self._kind = kind

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            rows: Sequence[Sequence[float]] = await self._trainer.ask("score", self._kind, group)
        except (TrainerCrashed, TrainerError) as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error
        return rows

    async def start(self) -> None:
        """Do nothing: the trainer's child does the scoring."""

    async def close(self) -> None:
        """Do nothing: the trainer owns the child."""


class ReplicaScorer:
    """A `Scorer` in a child of its own.

    With `follows`, it takes that trainer's weights before it scores, whenever it is behind, and a group is scored
    under no older weights than the trainer had when it was asked; the source must stand several gathers at once, as
    that of `RemoteTrainer` does. Without, it scores with what the target made. A child that has ended is started again
    by the next group.
    """

    def __init__(
        self, spec: ChildSpec, start: StartPeer, *, follows: Trainer | None = None, close_s: float = 5.0
    ) -> None:
        self.name = spec.name
        self.version = -1
        """What it scores with, where it follows."""
        self._spec = replace(spec, host=SCORER_HOST)
        self._start = start
        self._follows = follows
        self._close_s = close_s
        self._peer: Peer | None = None
        self._updating = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Have the child ready. Raises `ConfigError` when it refuses what it was given, else `ScoringError`."""
        try:
            await self._ready()
        except ScoringError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            peer = await self._ready()
            rows: Sequence[Sequence[float]] = await peer.call("score", group)
        except (PeerLost, PeerFailed, TransferError, EngineCrashed) as error:
            raise ScoringError(f"{self.name}: group {group.group_id}: {error}") from error
        return rows

    async def close(self) -> None:
        """Release everything. Idempotent."""
        self._closed = True
        peer, self._peer = self._peer, None
        if peer is not None:
            await peer.close(self._close_s)

    async def _ready(self) -> Peer:
        """The child, with the weights of now."""
        async with self._updating:
            if self._closed:
                raise ScoringError(f"{self.name} is closed")
            peer = self._peer
            if peer is None or not peer.alive:
                self.version = -1
                try:
                    peer = self._peer = await self._start(self._spec)
                except HeadwayError as error:
                    raise ScoringError(f"{self.name} does not come up: {error}") from error
            if self._follows is not None and self.version != self._follows.version:
                await self._update(peer, self._follows)
            return peer

    async def _update(self, peer: Peer, trainer: Trainer) -> None:
        manifest, buckets = await trainer.source.gather(trainer.version)
        await peer.call("begin", manifest)
        async for bucket in buckets:
            await peer.call("load", bucket)
        self.version = await peer.call("flip")
