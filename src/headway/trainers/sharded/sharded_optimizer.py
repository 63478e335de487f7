"""Shards of tensors, and AdamW over them: every rank updates what it holds, and all agree on one gradient norm.

A shard is a box: along every dimension a range of the full tensor. Shards are plain tensors that share memory with what
the model gathers from, so a step is local and needs no other rank. Guarantees: the norm is that of the whole gradient,
every element counted once; if it is not finite, all ranks raise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.settings import OptimizerSettings
from headway.trainers.sharded.staged_collectives import all_reduce, gather_whole, shard_like


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShard:
    """This rank's shard of one tensor."""

    local: Tensor
    """The elements of this rank; shares memory with the sharded tensor."""
    sharded: Any
    """The sharded tensor, with the full shape, the mesh and the placements."""

    def with_local(self, local: Tensor) -> DTensor:
        """Return `local` as a shard of a tensor that is cut in the same way, such as a moment."""
        return shard_like(self.sharded, local)  # a moment may live on the host


def local_shard(tensor: Tensor) -> TensorShard:
    """Return this rank's shard of `tensor`."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a tensor of {tuple(tensor.shape)} is not sharded")
    with torch.no_grad():
        sharded: Any = tensor.detach()
        return TensorShard(local=sharded.to_local(), sharded=sharded)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; every rank that holds a shard must call this."""
    with torch.no_grad():
        found: Any = tensor.detach()
        everything: Tensor = gather_whole(found) if isinstance(tensor, DTensor) else found
        return everything


PER_HEAD_WEIGHTS = (".q_norm.weight", ".k_norm.weight")
"""Weights that every rank of a tensor mesh holds whole but uses for its own heads: gradients are partial sums."""


class ShardedOptimizer(Optimizer):
    """The optimizer of parameters that `fully_shard` has cut."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, tensor: DeviceMesh | None
    ) -> None:
        self._sharded = dict(parameters)
        self.shards: dict[str, TensorShard] = {name: local_shard(one) for name, one in parameters.items()}
        self._tensor = tensor
        super().__init__({name: nn.Parameter(shard.local) for name, shard in self.shards.items()}, settings)

    def clip_gradients(self, step_name: str) -> float:
        for name, one in self._sharded.items():
            if one.grad is not None:
                grad = local_shard(one.grad).local
                if self._tensor is not None and name.endswith(PER_HEAD_WEIGHTS):
                    all_reduce(grad, group=self._tensor.get_group())
                self._parameters[name].grad, one.grad = grad, None
        return super().clip_gradients(step_name)

    def _gradient_norm(self) -> Tensor:
        grads = [(name, one.grad) for name, one in self._parameters.items() if one.grad is not None]
        norms = torch.stack(torch._foreach_norm([grad for _, grad in grads])).double()
        copies = torch.tensor([self._count_copies(name) for name, _ in grads], dtype=norms.dtype, device=norms.device)
        square = (norms.square() / copies).sum()
        all_reduce(square)
        return square.sqrt().to(grads[0][1].dtype)

    def _count_copies(self, name: str) -> int:
        """Return the number of ranks that hold the same shard."""
        return dist.get_world_size() // int(self.shards[name].sharded.device_mesh.size())

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for one in self._sharded.values():
            one.grad = None
