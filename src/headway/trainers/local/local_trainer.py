"""Trainers whose work is done by one thread of this process.

`ThreadedTrainer` is the asynchronous part that all of them share; `LocalTrainer` is the one for language models.

Guarantees: the event loop never blocks. A step changes everything or nothing; a cancelled step has either changed
nothing or is completed. Each version is copied into the store before its step is reported. A trainer that broke while
it changed weights, or that was abandoned, raises `TrainerCrashed` until `restart`, which brings the initial model back.
The thread of a hung step is left behind, and its result is ignored.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from headway.algorithms.kl import KlController
from headway.errors import BackendError, TrainerCrashed, TrainerError
from headway.trainers.base import ScoreKind
from headway.trainers.local.local_checkpoint import load_checkpoint, save_checkpoint
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.optimizer_steps import StepLearner
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.training_thread import CommitGate, TrainingThread
from headway.types import Batch, SampleGroup, VersionedScores
from headway.weights.base import PublishingStore, WeightSource

_RESTART_WAIT_S = 10.0
"""How long a restart waits for the old thread, because two sets of weights at once may not fit into memory."""


L = TypeVar("L", bound=StepLearner)


class ThreadedTrainer(ABC, Generic[L]):
    """A `Trainer` around a learner that one thread runs. The caller closes the store."""

    def __init__(self, settings: LocalSettings, store: PublishingStore, tokenizer: Any = None) -> None:
        self._settings = settings
        self._store = store
        self._tokenizer = tokenizer
        self.source: WeightSource = store
        self.version = 0
        self._report_offload: Callable[[bool], object] = lambda begins: None
        self._thread = TrainingThread(settings.threads, device=settings.device)
        self._publishing = threading.Lock()
        self._learner: L | None = None
        self._use_learner(self._make_learner())

    @abstractmethod
    def _make_learner(self) -> L:
        """Return a new learner in the initial state."""

    def _publish_weights(self, learner: L) -> None:
        self._store.publish(learner.version, learner.published_weights())

    def _save(self, learner: L, directory: Path) -> None:
        save_checkpoint(learner, directory, self._tokenizer)

    def _load(self, learner: L, directory: Path) -> list[str]:
        return load_checkpoint(learner, directory)

    def report_offload_to(self, report: Callable[[bool], object]) -> None:
        self._report_offload = report

    @property
    def learner(self) -> L:
        """The learner. Raises `TrainerCrashed` while the trainer is down."""
        if self._learner is None:
            raise TrainerCrashed("the trainer is down")
        return self._learner

    def _use_learner(self, learner: L) -> None:
        self._learner = learner
        for optimizer in learner.optimizers:
            optimizer.report_offload_to(lambda begins: self._report_offload(begins))
        self._store.clear()
        self._publish(learner)

    def _publish(self, learner: L) -> None:
        """Publish the weights of `learner`, unless it was abandoned meanwhile."""
        with self._publishing:
            if learner is self._learner:
                self._publish_weights(learner)
                self.version = learner.version

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
            return await self._thread.call(work)
        except TrainerError as error:
            if not learner.broken:
                raise
            self.abandon(f"weights are half moved: {error}")
            raise TrainerCrashed(str(error)) from error

    async def score(self, kind: ScoreKind, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Return log-probabilities or values of a group, computed between two steps."""
        learner = self.learner

        def work(gate: CommitGate) -> Sequence[Sequence[float]]:
            rows = learner.score(kind, group, gate)
            return VersionedScores(rows=rows, version=learner.version) if kind == "policy" else rows

        return await self._thread.call(work)

    async def save(self, directory: Path) -> None:
        learner = self.learner
        await self._thread.call(lambda gate: self._save(learner, directory))

    async def load(self, directory: Path) -> Sequence[str]:
        learner = self.learner

        def work(gate: CommitGate) -> list[str]:
            notes = self._load(learner, directory)
            self._use_learner(learner)
            return notes

        return await self._thread.call(work)

    async def start(self) -> None:
        """Do nothing: the first call starts the training thread."""

    async def restart(self) -> None:
        self.abandon("the trainer was restarted")
        await self._thread.wait_for_end(_RESTART_WAIT_S)
        self._thread = TrainingThread(self._settings.threads, device=self._settings.device)
        await self._thread.call(lambda gate: self._use_learner(self._make_learner()))

    async def close(self) -> None:
        self.abandon("the trainer was closed")

    def abandon(self, reason: str) -> None:
        """Give up the learner: raise `reason` to everybody who waits, and clear the store. Idempotent."""
        self._thread.abandon(reason)
        self._learner = None
        with self._publishing:
            self._store.clear()


class LocalTrainer(ThreadedTrainer[LocalLearner]):
    """Trains the causal language model of `transformers` that `make_model` returns, the same at every call.

    `make_critic` returns the critic's decoder (a copy of the policy's without it), `make_kl` the controller of the
    token penalty. `tokenizer`, if given, is saved beside the model. `ranks` are the processes that compute together.
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
        ranks: RankGroup = SINGLE_RANK,
    ) -> None:
        self._make_model, self._make_critic, self._make_kl = make_model, make_critic, make_kl
        self._ranks = ranks
        super().__init__(settings, store, tokenizer)

    def _make_learner(self) -> LocalLearner:
        return LocalLearner(
            self._make_model(),
            self._settings,
            critic_model=self._make_critic() if self._make_critic and self._settings.critic else None,
            kl=self._make_kl() if self._make_kl else None,
            ranks=self._ranks,
        )

    async def compute_returns(self, batch: Batch) -> tuple[list[float], list[bool]]:
        """Return what a critic in another process learns from a batch; `train` with the same batch follows."""
        learner = self.learner
        return await self._thread.call(lambda gate: learner.compute_returns(batch, gate))
