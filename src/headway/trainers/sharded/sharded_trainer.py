"""One rank's trainer: the local trainer's face and thread around a learner whose team are the other ranks.

Every rank is asked the same in the same order, and answers the same; rank 0 has the store that engines are served from.
A rank does not restart itself: ranks live and die together, and the controller starts all of them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headway.algorithms.kl import KlController
from headway.errors import TrainerCrashed
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings
from headway.trainers.sharded import sharded_checkpoint
from headway.trainers.sharded.sharded_model import ShardedPolicy
from headway.trainers.sharded.sharded_ranks import ShardedRankGroup
from headway.weights.base import WeightSource


class ShardGatheringStore(WeightSource, Protocol):
    """A store that asks for tensors by name, one after the other; the same names in the same order on every rank."""

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> None:
        """Hold a copy of what `read` gives as `version`; `tensors` says which there are."""
        ...

    def clear(self) -> None:
        """Hold nothing."""
        ...


class RankTrainer(LocalTrainer):
    """Of a process that has met the others. Rank 0 has a store, the others a `weights.elsewhere.Elsewhere`."""

    def __init__(
        self,
        make_model: Callable[[], Any],
        settings: LocalSettings,
        store: ShardGatheringStore,
        ranks: ShardedRankGroup,
        *,
        make_critic: Callable[[], Any] | None = None,
        make_kl: Callable[[], KlController] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._versions, self._ranks = store, ranks
        super().__init__(
            make_model, settings, store, make_critic=make_critic, make_kl=make_kl, tokenizer=tokenizer, team=ranks
        )

    def _hand_over(self, learner: LocalLearner) -> None:
        policy = learner.policy
        assert isinstance(policy, ShardedPolicy)
        self._versions.publish(learner.version, policy.shards(), policy.whole)

    def _write(self, learner: LocalLearner, directory: Path) -> None:
        sharded_checkpoint.save_sharded_checkpoint(learner, directory, self._ranks, self._tokenizer)

    def _read(self, learner: LocalLearner, directory: Path) -> None:
        sharded_checkpoint.load_sharded_checkpoint(learner, directory, self._ranks)

    async def restart(self) -> None:
        raise TrainerCrashed("a rank cannot come back alone: all of them are started anew")
