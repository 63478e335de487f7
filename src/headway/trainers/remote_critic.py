"""A critic in a child process beside the trainer, and both of them behind the protocol of one trainer.

A step has two halves that run at the same time: the trainer changes the policy, the critic learns the returns that the
trainer computed before. Guarantees: both halves happen, or the trainer counts as lost: then both go back to the last
checkpoint. The same if the critic ends, since its weights are lost with it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ScoringError, TrainerCrashed, TrainerError
from headway.monitor.wait_graph import WaitEdge
from headway.processes.base import ChildSpec, RestartablePeer, StartPeer
from headway.trainers.base import ScoreKind
from headway.trainers.remote_trainer import RemoteTrainer, RemoteWeightSource
from headway.types import Batch, Sample, SampleGroup

CRITIC_HOST = "headway.trainers.remote_critic:CriticHost"


class Critic(Protocol):
    """What serves in the child; `LocalCritic` is one."""

    version: int

    async def train(self, batch: Batch, returns: Sequence[float], mask: Sequence[bool]) -> Mapping[str, float]: ...
    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]: ...
    async def save(self, directory: Path) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def close(self) -> None: ...


class CriticHost:
    """Serves a critic; `tell` reports its version."""

    def __init__(self, critic: Critic, tell: Callable[[Any], None]) -> None:
        self._critic, self._tell = critic, tell

    async def train(self, batch: Batch, returns: Sequence[float], mask: Sequence[bool]) -> Mapping[str, float]:
        try:
            return await self._critic.train(batch, returns, mask)
        finally:
            self._tell(self._critic.version)

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._critic.score(group)

    async def save(self, directory: Path) -> None:
        await self._critic.save(directory)

    async def load(self, directory: Path) -> None:
        await self._critic.load(directory)
        self._tell(self._critic.version)

    async def close(self) -> None:
        await self._critic.close()


class TrainerWithCritic:
    """A `Trainer` of two parts: `trainer` has the policy, a child made from `spec` the critic."""

    def __init__(self, trainer: RemoteTrainer, spec: ChildSpec, start: StartPeer) -> None:
        self._trainer, self._critic_version = trainer, 0
        self._critic = RestartablePeer(
            replace(spec, host=CRITIC_HOST),
            start,
            crashed=TrainerCrashed,
            on_note=self._set_critic_version,
            on_down=lambda: self._set_critic_version(0),
        )

    @property
    def version(self) -> int:
        """Number of training steps done."""
        return self._trainer.version

    @property
    def source(self) -> RemoteWeightSource:
        """The source that weight updates gather from."""
        return self._trainer.source

    def waits(self) -> list[WaitEdge]:
        """Return edges of the wait-for graph: what the trainer waits for."""
        report: Callable[[], list[WaitEdge]] | None = getattr(self._trainer, "waits", None)
        return [] if report is None else report()

    async def train(self, batch: Batch) -> Mapping[str, float]:
        self._check_versions()
        batch = await self._add_missing_values(batch)
        returns, mask = await self._trainer.call("compute_returns", batch)
        halves = [
            asyncio.ensure_future(self._trainer.train(batch)),
            asyncio.ensure_future(self._critic.call("train", batch, returns, mask, failure=TrainerError)),
        ]
        try:
            await asyncio.wait(halves)
        finally:  # a step that is cancelled here is cancelled there, or done; `_check_versions` sees what became of it
            for half in halves:
                half.cancel()
        errors = [half.exception() for half in halves]
        failed = next((error for error in errors if error is not None), None)
        if failed is None:
            return {**halves[0].result(), **halves[1].result()}
        if None in errors and not isinstance(failed, TrainerCrashed):
            raise TrainerCrashed(f"policy and critic are at different steps: {failed}") from failed
        raise failed

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Return values of the critic, or what the trainer scores."""
        if kind != "value":
            return await self._trainer.score(kind, group)
        rows: Sequence[Sequence[float]] = await self._critic.call("score", group, failure=ScoringError)
        return rows

    async def save(self, directory: Path) -> None:
        self._check_versions()
        await self._critic.call("save", directory, failure=TrainerError)  # first: the trainer's mark lists all files
        await self._trainer.save(directory)

    async def load(self, directory: Path) -> Sequence[str]:
        await self._critic.call("load", directory, failure=TrainerError)  # checks its file before anything is changed
        return await self._trainer.load(directory)

    async def start(self) -> None:
        await _gather_all(self._trainer.start(), self._critic.start())

    async def restart(self) -> None:
        await _gather_all(self._trainer.restart(), self._critic.restart())

    async def close(self) -> None:
        await _gather_all(self._trainer.close(), self._critic.close())

    def _set_critic_version(self, version: int) -> None:
        self._critic_version = version

    def _check_versions(self) -> None:
        """Raise `TrainerCrashed` if a step was only half done, or the critic was lost."""
        if not self._critic.alive or self._critic_version != self._trainer.version:
            versions = f"the trainer is at version {self._trainer.version}, the critic at {self._critic_version}"
            raise TrainerCrashed(self._critic.down_reason or versions)

    async def _add_missing_values(self, batch: Batch) -> Batch:
        """Return the batch with values in every sample; a group of an earlier process may have none."""
        groups = []
        for group in batch.groups:
            if any(sample.values is None for sample in group.samples):
                pairs = zip(group.samples, await self.score("value", group), strict=True)
                group = replace(group, samples=tuple(_fill_values(sample, row) for sample, row in pairs))
            groups.append(group)
        return replace(batch, groups=tuple(groups))


def _fill_values(sample: Sample, row: Sequence[float]) -> Sample:
    return replace(sample, values=row)


async def _gather_all(*calls: Any) -> None:
    """Await all calls to their ends, then raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
