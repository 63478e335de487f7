"""The asynchronous face of a learner: a `Trainer` whose work is done by one thread.

Guarantees: the event loop never blocks. A step changes everything or nothing; cancelled, it has either changed nothing
or is completed. Each version is copied into the store before its step is reported. A trainer that was broken while it
moved weights, or that `lose` gave up, raises `TrainerCrashed` until `restart`, which brings back what it was first
given; the thread of a hung step is left behind, and what it computes goes nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headway.algorithms.kl import KlController
from headway.errors import BackendError, TrainerCrashed, TrainerError
from headway.trainers.local import local_checkpoint
from headway.trainers.local.local_learner import LocalLearner, ScoreKind
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.training_thread import CommitGate, TrainingThread
from headway.types import Batch, SampleGroup, VersionedScores
from headway.weights.base import WeightSource

_LEAVE_S = 10.0
"""How long a restart waits for the thread before it: two sets of weights at once are dear."""


class PublishingStore(WeightSource, Protocol):
    """A source that versions are published into."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Hold a copy of `tensors` as `version`."""
        ...

    def clear(self) -> None:
        """Hold nothing."""
        ...


class LocalTrainer:
    """Trains what `make_model` gives: a causal language model of `transformers`, the same at every call.

    `make_critic` gives the critic's decoder (else a copy of the policy's), `make_kl` who steers the token penalty.
    `tokenizer`, where given, is saved beside the model. The store stays the caller's to close.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        settings: LocalSettings,
        store: PublishingStore,
        *,
        make_critic: Callable[[], Any] | None = None,
        make_kl: Callable[[], KlController] | None = None,
        tokenizer: Any = None,
        team: RankGroup = SINGLE_RANK,
    ) -> None:
        self._make_model, self._make_critic, self._make_kl = make_model, make_critic, make_kl
        self._settings = settings
        self._store = store
        self._tokenizer = tokenizer
        self._team = team
        self.source: WeightSource = store
        self.version = 0
        self._worker = TrainingThread(settings.threads, device=settings.device)
        self._publishing = threading.Lock()
        self._learner: LocalLearner | None = None
        self._take(self._made())

    def _made(self) -> LocalLearner:
        return LocalLearner(
            self._make_model(),
            self._settings,
            critic_model=self._make_critic() if self._make_critic and self._settings.critic else None,
            kl=self._make_kl() if self._make_kl else None,
            team=self._team,
        )

    @property
    def learner(self) -> LocalLearner:
        """What is behind. Raises `TrainerCrashed` when there is nothing."""
        if self._learner is None:
            raise TrainerCrashed("the trainer is down")
        return self._learner

    def _take(self, learner: LocalLearner) -> None:
        self._learner = learner
        self._store.clear()
        self._publish(learner)

    def _publish(self, learner: LocalLearner) -> None:
        """Hold a copy of what `learner` knows, unless it was given up meanwhile."""
        with self._publishing:
            if learner is self._learner:
                self._hand_over(learner)
                self.version = learner.version

    def _hand_over(self, learner: LocalLearner) -> None:
        self._store.publish(learner.version, learner.policy.weights())

    def _write(self, learner: LocalLearner, directory: Path) -> None:
        local_checkpoint.save_checkpoint(learner, directory, self._tokenizer)

    def _read(self, learner: LocalLearner, directory: Path) -> None:
        local_checkpoint.load_checkpoint(learner, directory)

    async def train(self, batch: Batch) -> Mapping[str, float]:
        learner = self.learner

        def work(gate: CommitGate) -> dict[str, float]:
            metrics = learner.learn(batch, gate)
            try:
                self._publish(learner)
            except BackendError as error:
                learner.broken = True
                raise TrainerError(f"version {learner.version} cannot be published: {error}") from error
            return metrics

        try:
            return await self._worker.call(work)
        except TrainerError as error:
            if not learner.broken:
                raise
            self.lose(f"weights are half moved: {error}")
            raise TrainerCrashed(str(error)) from error

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Log-probabilities or values of a group, between two steps."""
        learner = self.learner

        def work(gate: CommitGate) -> Sequence[Sequence[float]]:
            rows = learner.score(kind, group, gate)
            return VersionedScores(rows=rows, version=learner.version) if kind == "policy" else rows

        return await self._worker.call(work)

    async def save(self, directory: Path) -> None:
        learner = self.learner
        await self._worker.call(lambda gate: self._write(learner, directory))

    async def load(self, directory: Path) -> None:
        learner = self.learner

        def work(gate: CommitGate) -> None:
            self._read(learner, directory)
            self._take(learner)

        await self._worker.call(work)

    async def start(self) -> None:
        """Do nothing: the first call starts the training thread."""

    async def restart(self) -> None:
        self.lose("the trainer was restarted")
        await self._worker.ended(_LEAVE_S)
        self._worker = TrainingThread(self._settings.threads, device=self._settings.device)
        await self._worker.call(lambda gate: self._take(self._made()))

    async def close(self) -> None:
        self.lose("the trainer was closed")

    def lose(self, reason: str) -> None:
        """Give everything up: whoever waits is told, and no weights can be had. Idempotent."""
        self._worker.abandon(reason)
        self._learner = None
        with self._publishing:
            self._store.clear()
