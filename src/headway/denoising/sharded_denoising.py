"""Denoising models that are cut over ranks: each has a share of the samples and a shard of weights and moments.

Weights are cut by `fully_shard` and gathered block by block around a forward pass. The frozen copies of the policy that
KL and DiffusionNFT need are cut in the same way. Numbers and gradients are those of one process, up to rounding:
denominators are those of the whole mini-batch, and gradients are sums over the ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from headway.denoising.denoising_batch import SampleSteps
from headway.denoising.denoising_policy import DenoisingPolicy, FrozenPolicy
from headway.denoising.denoising_ranks import MicroBatch, OldPolicyFollower, split_micro_batches
from headway.denoising.denoising_trainer import DenoisingLearner, DenoisingTrainer
from headway.denoising.settings import DenoisingTrainerSettings
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.settings import OptimizerSettings
from headway.trainers.sharded.sharded_model import ShardedWeights, cut_modules, find_adapted_layers
from headway.trainers.sharded.sharded_optimizer import ShardedOptimizer, local_shard
from headway.trainers.sharded.sharded_trainer import ShardedRankGroup, ShardedTrainer


class ShardedDenoisingPolicy(ShardedWeights, DenoisingPolicy):
    """A policy of which every rank holds a shard. It is whole while it is made."""

    def __init__(self, model: Any, settings: DenoisingTrainerSettings, mesh: DeviceMesh, copies: int) -> None:
        super().__init__(model, settings.local, settings.denoising)
        self._adapted = find_adapted_layers(self.model)
        self._copies = [_copy_model(self.model) for _ in range(copies)]
        for one in (self.model, *self._copies):
            cut_modules(one, _find_blocks(one), mesh, MixedPrecisionPolicy())
        self._list_shards(self.model)

    def freeze(self) -> FrozenPolicy:
        """Return one of the copies that were made before the policy was cut."""
        module, names = self._copies.pop(), self.trainable().keys()
        values = {name: local_shard(one).local for name, one in module.named_parameters() if name in names}
        return FrozenPolicy(values=values, module=module.requires_grad_(False))


class ShardedOldPolicyOptimizer(OldPolicyFollower, ShardedOptimizer):
    """The optimizer of DiffusionNFT on ranks."""


class ShardedDenoisingRanks:
    """The `DenoisingRanks` of one rank. It is made once in a process, after all ranks have joined."""

    def __init__(self, group: ShardedRankGroup) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        return self._group.is_first

    def make_policy(self, model: Any, settings: DenoisingTrainerSettings, copies: int) -> DenoisingPolicy:
        return ShardedDenoisingPolicy(model, settings, self._group.meshes.shard, copies)

    def make_optimizer(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, old: Mapping[str, Tensor] | None
    ) -> Optimizer:
        if old is None:
            return ShardedOptimizer(parameters, settings, None)
        optimizer = ShardedOldPolicyOptimizer(parameters, settings, None)
        optimizer.old = old
        return optimizer

    def split(self, rows: Sequence[SampleSteps], size: int) -> Iterator[MicroBatch]:
        """Iterate over every so-manieth row; ranks that run out repeat the first row with a weight of 0."""
        ways, number = self._group.size, self._group.rank
        yield from split_micro_batches(rows[number::ways], size)
        most, own = -(-len(rows) // ways), len(rows[number::ways])
        for _ in range(-(-most // size) - -(-own // size)):
            yield MicroBatch(rows[:1], 0.0)

    def all_reduce(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        return self._group.all_reduce(sums, maxima)

    def on_out_of_memory(self, failure: str) -> None:
        self._group.on_out_of_memory(failure)


class DenoisingRankTrainer(ShardedTrainer[DenoisingLearner], DenoisingTrainer):
    """The trainer of denoising models in a process that has joined the others."""


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, inner ones first."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for blocks in reversed(lists) for block in blocks if any(True for _ in block.parameters())]


def _copy_model(model: nn.Module) -> nn.Module:
    """Copy a model; the frozen parts of a pipeline around it are shared."""
    pipeline = getattr(model, "_pipeline", None)
    return deepcopy(model, {} if pipeline is None else {id(pipeline): pipeline})
