"""Scorers that live in a trainer: they share its thread and its models, and take turns with its steps.

`LogpScorer` scores with the weights of the moment, `ReferenceScorer` with those of the start, `ValueScorer` with the
critic. A trainer that is down cannot score: that is a `ScoringError`, as every other failure here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.errors import ScoringError, TrainerCrashed
from headway.trainers.local.local_learner import ScoreKind, score_rows, split_by_sample
from headway.trainers.local.local_optimizer import overwrite_tensors
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import make_token_rows
from headway.trainers.local.training_thread import CommitGate, JobAbandoned, TrainingThread
from headway.types import SampleGroup, VersionedScores
from headway.weights.base import WeightReceiver


class _Scorer:
    kind: ScoreKind

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer = trainer

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            return await self._trainer.score(self.kind, group)
        except TrainerCrashed as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error

    async def start(self) -> None:
        """Do nothing: the trainer's thread does the scoring."""

    async def close(self) -> None:
        """Do nothing: the trainer owns the models and the thread."""


class LogpScorer(_Scorer):
    """ℓ_p: under the weights at the moment of asking."""

    kind: ScoreKind = "policy"


class ReferenceScorer(_Scorer):
    """ℓ_ref: under the weights of the start."""

    kind: ScoreKind = "reference"


class ValueScorer(_Scorer):
    """What the critic expects before each action."""

    kind: ScoreKind = "value"


SwitchWeights = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]


class PolicyScorer:
    """A `Scorer` of log-probabilities. `receiver` makes what takes the weights in, given how to switch to them."""

    def __init__(
        self, model: Any, settings: LocalSettings, receiver: Callable[[SwitchWeights], WeightReceiver] | None = None
    ) -> None:
        for one in model.parameters():
            one.requires_grad_(False)
        self._policy = PolicyModel(model, settings, adapters=False)
        self._settings = settings
        self._version: int | None = None
        """What it follows with; None: it does not, or has not begun to."""
        self._worker = TrainingThread(settings.threads, "scorer", settings.device)
        if receiver is not None:
            self.receiver = receiver(self._switch)

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._worker.call(lambda gate: self._score(group, gate))

    def _score(self, group: SampleGroup, gate: CommitGate) -> Sequence[Sequence[float]]:
        try:
            rows = make_token_rows([group], self._policy.vocabulary)
            found_N = score_rows(lambda pack: self._policy.logps(pack).logp_N, rows, self._settings, gate)
        except JobAbandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {type(error).__name__}: {error}") from error
        found = split_by_sample(group, iter(found_N.tolist()))
        return found if self._version is None else VersionedScores(rows=found, version=self._version)

    async def _switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def work(gate: CommitGate) -> None:
            with torch.no_grad():
                overwrite_tensors(self._policy.weights(), dict(tensors))
            self._version = version

        await self._worker.call(work)

    async def start(self) -> None:
        """Do nothing: the first group starts the thread."""

    async def close(self) -> None:
        """Release the thread. Idempotent."""
        self._worker.abandon("the scorer was closed")
