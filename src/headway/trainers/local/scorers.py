"""Scorers that live in a trainer: they share its thread and its models, and take turns with its steps.

`LogpScorer` scores with the weights of the moment, `ReferenceScorer` with those of the start, `ValueScorer` with the
critic. A trainer that is down cannot score: that is a `ScoringError`, as every other failure here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import ScoringError, TrainerCrashed
from headway.trainers.local.learner import Score
from headway.trainers.local.trainer import LocalTrainer
from headway.types import SampleGroup


class _Scorer:
    kind: Score

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer = trainer

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        try:
            return await self._trainer.score(self.kind, group)
        except TrainerCrashed as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error


class LogpScorer(_Scorer):
    """ℓ_p: under the weights at the moment of asking."""

    kind: Score = "policy"


class ReferenceScorer(_Scorer):
    """ℓ_ref: under the weights of the start."""

    kind: Score = "reference"


class ValueScorer(_Scorer):
    """What the critic expects before each action."""

    kind: Score = "value"
