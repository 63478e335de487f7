"""One rank among its peers: its meshes, and the team that a learner asks.

Guarantees: every rank makes the same collective calls in the same order, whatever share of the samples it has: shares
are filled up with packs without actions. A step is the step of one process, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import PromptTree, TokenPack, pack_rows
from headway.trainers.sharded.rank_layout import RankLayout
from headway.trainers.sharded.sharded_model import ShardedCritic, ShardedPolicy, ShardingMeshes
from headway.trainers.sharded.sharded_optimizer import ShardedOptimizer


class ShardedRankGroup:
    """The `Team` of a rank. Made once in a process, after the others were met."""

    def __init__(self, layout: RankLayout, device: str) -> None:
        self.layout, self.size = layout, layout.ranks
        self.rank = dist.get_rank()
        self.seat = layout.seat(self.rank)
        self._device = device
        kind = torch.device(device).type
        mesh = init_device_mesh(kind, (layout.shards, layout.tensor), mesh_dim_names=("shard", "tensor"))
        self._data = _group_of(layout.together("data"), self.rank)
        self._cut = ShardingMeshes(
            shard=mesh["shard"],
            tensor=mesh["tensor"] if layout.tensor > 1 else None,
            context=_group_of(layout.together("context"), self.rank) if layout.context > 1 else None,
        )

    @property
    def first(self) -> bool:
        """Whether this rank answers for all of them."""
        return self.rank == 0

    def policy(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> PolicyModel:
        return ShardedPolicy(model, settings, self._cut, adapters=adapters)

    def critic(self, model: Any, settings: LocalSettings) -> CriticModel:
        return ShardedCritic(model, settings, self._cut)

    def optimizer(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizer:
        return ShardedOptimizer(parameters, settings, self._cut.tensor)

    def packs(self, rows: Sequence[TokenRow], settings: LocalSettings) -> list[TokenPack]:
        """Those of one size are looked at at the same time, so that nobody waits long."""
        share, device, ways = settings.share_prompts, settings.device, self.layout.data
        packs = pack_rows(rows, budget=settings.micro_batch_tokens, share=share, device=device)
        if len(packs) < ways:
            tokens = sum(pack.token_L.numel() for pack in packs)
            packs = pack_rows(rows, budget=max(-(-tokens // ways), 1), share=share, device=device)
        packs.sort(key=lambda pack: -pack.token_L.numel())
        packs += [_without_actions(device)] * (-len(packs) % ways)
        return packs[self.seat.data :: ways]

    def joined(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        found = sums.to(self._device, copy=True), largest.to(self._device, copy=True)
        for numbers, how in zip(found, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if numbers.numel():
                dist.all_reduce(numbers, how, group=self._data)
        return found

    def out_of_memory(self, failure: str) -> None:
        raise TrainerError(
            f"rank {self.rank} is out of memory ({failure}); a smaller per_device_train_batch_size of actor_train, "
            "or more ranks, need less"
        )


def _group_of(sets: Sequence[Sequence[int]], rank: int) -> Any:
    """The group of the set that `rank` is in. All ranks make all groups."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in sets]
    return next(group for ranks, group in made if rank in ranks)


def _without_actions(device: str) -> TokenPack:
    """For somebody who has nothing left to look at while others have."""
    one, none = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    trees = (PromptTree(start=0, prefix=0, members=(1,)),)
    return TokenPack(token_L=one, position_L=one, trees=trees, before_N=none, chosen_N=none, action_N=none)
