"""A policy in a process of its own that only scores: the reference, or a copy that follows a trainer's weights.

Guarantees: a group is scored under one version, which is reported if the policy follows a trainer; new weights are
taken in between two groups. Without optimizer and gradients it needs the memory of its weights, twice if it follows.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.errors import ScoringError
from headway.trainers.local.local_learner import score_rows, split_by_sample
from headway.trainers.local.local_optimizer import overwrite_tensors
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import make_token_rows
from headway.trainers.local.training_thread import CommitGate, JobAbandoned, TrainingThread
from headway.types import SampleGroup, VersionedScores
from headway.weights.base import WeightReceiver

SwitchWeights = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]


class PolicyScorer:
    """A `Scorer` of log-probabilities. `receiver` gets the function that switches weights, and returns the receiver."""

    def __init__(
        self, model: Any, settings: LocalSettings, receiver: Callable[[SwitchWeights], WeightReceiver] | None = None
    ) -> None:
        model.requires_grad_(False)
        if receiver is None:  # the initial policy chooses experts by itself
            settings = replace(settings, routing_replay=False)
        separate = receiver is not None and settings.lora is not None and settings.lora.separate
        self._policy = PolicyModel(model, settings, adapters=separate)
        self._settings = settings
        self._version: int | None = None
        """Version of the weights; None until the first weights of a trainer have arrived."""
        self._thread = TrainingThread(settings.threads, "scorer", settings.device)
        self.receiver = None if receiver is None else receiver(self._switch_weights)

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._thread.call(lambda gate: self._score(group, gate))

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

    async def _switch_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def work(gate: CommitGate) -> None:
            with torch.no_grad():
                overwrite_tensors(self._policy.published_weights(), dict(tensors))
            self._version = version

        await self._thread.call(work)

    async def start(self) -> None:
        """Do nothing: the first group starts the thread."""

    async def close(self) -> None:
        """Release the thread. Idempotent."""
        self._thread.abandon("the scorer was closed")
