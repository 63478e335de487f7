"""The trainer of one rank, and the rank group that its learner asks.

Every rank gets the same calls in the same order and returns the same results; rank 0 has the store that engines gather
from. A rank cannot restart alone: ranks live and die together, and the controller starts all of them again.

Guarantees: every rank makes the same collective calls in the same order, whatever its share of the samples, because
shares are filled up with packs without actions. A step equals the step of one process, up to rounding.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from headway.errors import TrainerCrashed, TrainerError
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.local_trainer import LocalTrainer, ThreadedTrainer
from headway.trainers.local.optimizer_steps import StepLearner
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import PromptTree, TokenPack, pack_rows_evenly
from headway.trainers.sharded.rank_layout import RankLayout
from headway.trainers.sharded.sharded_checkpoint import (
    get_sharded_policy,
    load_sharded_checkpoint,
    save_sharded_checkpoint,
)
from headway.trainers.sharded.sharded_model import ShardedCritic, ShardedPolicy, ShardingMeshes
from headway.trainers.sharded.sharded_optimizer import ShardedOptimizer
from headway.trainers.sharded.staged_collectives import all_reduce

L = TypeVar("L", bound=StepLearner)


class ShardedRankGroup:
    """The `RankGroup` of one rank. It is made once in a process, after all ranks have joined."""

    def __init__(self, layout: RankLayout, device: str) -> None:
        self.layout, self.size = layout, layout.ranks
        self.rank = dist.get_rank()
        self.coordinates = layout.coordinates(self.rank)
        self._device = device
        kind = torch.device(device).type
        mesh = init_device_mesh(kind, (layout.shards, layout.tensor), mesh_dim_names=("shard", "tensor"))
        self._data = _make_process_group(layout.rank_sets("data"), self.rank)
        self.meshes = ShardingMeshes(
            shard=mesh["shard"],
            tensor=mesh["tensor"] if layout.tensor > 1 else None,
            context=_make_process_group(layout.rank_sets("context"), self.rank) if layout.context > 1 else None,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and publishes weights for all."""
        return self.rank == 0

    def make_policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        return ShardedPolicy(model, settings, self.meshes, adapters=adapters)

    def make_critic(self, model: Any, settings: LocalSettings) -> CriticModel:
        return ShardedCritic(model, settings, self.meshes)

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
        return ShardedOptimizer(parameters, settings, self.meshes.tensor)

    def make_packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> list[TokenPack]:
        """Return this rank's packs. All ranks get packs of similar size at the same time, so that none waits long."""
        share, device, ways = settings.share_prompts, settings.device, self.layout.data
        packs = pack_rows_evenly(rows, ways, budget=settings.micro_batch_tokens, share=share, device=device)
        packs.sort(key=lambda pack: -pack.token_L.numel())
        packs += [_make_empty_pack(device)] * (-len(packs) % ways)
        return packs[self.coordinates.data :: ways]

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        found = sums.to(self._device, copy=True), maxima.to(self._device, copy=True)
        for numbers, operation in zip(found, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if numbers.numel():
                all_reduce(numbers, operation, self._data)
        return found

    def on_out_of_memory(self, failure: str) -> None:
        raise TrainerError(
            f"rank {self.rank} is out of memory ({failure}); a smaller per_device_train_batch_size of actor_train, "
            "or more ranks, need less"
        )


def _make_process_group(sets: Sequence[Sequence[int]], rank: int) -> Any:
    """Return the process group that `rank` is in. All ranks must create all groups."""
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in sets]
    return next(group for ranks, group in groups if rank in ranks)


def _make_empty_pack(device: str) -> TokenPack:
    """Return a pack for a rank that has none left while others have."""
    zero, empty = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    trees = (PromptTree(start=0, prefix=0, members=(1,)),)
    return TokenPack(token_L=zero, position_L=zero, trees=trees, before_N=empty, chosen_N=empty, action_N=empty)


class ShardedTrainer(ThreadedTrainer[L]):
    """What the trainers of ranks have in common, whatever they train. Ranks without a store have a
    `NonPublishingStore`."""

    _ranks: Any
    """The ranks; `is_first` on rank 0."""

    def _publish_weights(self, learner: L) -> None:
        policy = get_sharded_policy(learner)
        read = partial(policy.gather_weight, dtype=self._store.wire_dtype)
        self._store.publish(learner.version, policy.shards(), read)

    def _save(self, learner: L, directory: Path) -> None:
        save_sharded_checkpoint(learner, directory, is_first=self._ranks.is_first, tokenizer=self._tokenizer)

    def _load(self, learner: L, directory: Path) -> list[str]:
        return load_sharded_checkpoint(learner, directory, is_first=self._ranks.is_first)

    async def restart(self) -> None:
        raise TrainerCrashed("a rank cannot come back alone: all of them are started anew")


class RankTrainer(ShardedTrainer[LocalLearner], LocalTrainer):
    """The trainer of language models in a process that has joined the others."""
