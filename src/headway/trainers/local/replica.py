"""A policy that only scores: the reference model, or a follower of the trainer, in a process of its own.

Guarantees: a group is scored under one version, and where it follows says which; new weights are taken in between two
groups. Without an optimizer and
without gradients it costs the memory of its weights, twice where it follows.
"""

# ruff: noqa: N806

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.errors import ScoringError
from headway.trainers.local.learner import by_sample, numbers_of
from headway.trainers.local.model import Policy
from headway.trainers.local.optimizer import overwrite
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.tokens import rows_of
from headway.trainers.local.worker import Abandoned, Gate, Worker
from headway.types import SampleGroup, Scores
from headway.weights.base import WeightReceiver

Switch = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]


class PolicyReplica:
    """A `Scorer` of log-probabilities. `receiver` makes what takes the weights in, given how to switch to them."""

    def __init__(
        self, model: Any, settings: LocalSettings, receiver: Callable[[Switch], WeightReceiver] | None = None
    ) -> None:
        for one in model.parameters():
            one.requires_grad_(False)
        self._policy = Policy(model, settings, adapters=False)
        self._settings = settings
        self._version: int | None = None
        """What it follows with; None: it does not, or has not begun to."""
        self._worker = Worker(settings.threads, "scorer", settings.device)
        if receiver is not None:
            self.receiver = receiver(self._switch)

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        return await self._worker.call(lambda gate: self._score(group, gate))

    def _score(self, group: SampleGroup, gate: Gate) -> Sequence[Sequence[float]]:
        try:
            rows = rows_of([group], self._policy.vocabulary)
            found_N = numbers_of(lambda pack: self._policy.logps(pack).logp_N, rows, self._settings, gate)
        except Abandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {type(error).__name__}: {error}") from error
        found = by_sample(group, iter(found_N.tolist()))
        return found if self._version is None else Scores(rows=found, version=self._version)

    async def _switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def work(gate: Gate) -> None:
            with torch.no_grad():
                overwrite(self._policy.weights(), dict(tensors))
            self._version = version

        await self._worker.call(work)

    async def close(self) -> None:
        """Release the thread. Idempotent."""
        self._worker.abandon("the scorer was closed")
