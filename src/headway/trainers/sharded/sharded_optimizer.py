"""Pieces of tensors: what this rank holds of one that is cut over ranks, and the whole of it.

A piece is a box: along every dimension a stretch of the whole. `torch.distributed.tensor` knows where it lies.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShard:
    """Of one tensor."""

    local: Tensor
    """What is here; shares memory with the tensor it is a piece of."""
    like: Any
    """The tensor as a whole: its shape, its mesh and how it is cut."""

    @property
    def holders(self) -> int:
        """Ranks that hold different pieces, together all of it."""
        return int(self.like.device_mesh.size())

    def again(self, local: Tensor) -> DTensor:
        """`local` as a piece of a tensor that is cut in the same way, such as a moment."""
        like = self.like
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def local_shard(tensor: Tensor) -> TensorShard:
    """What this rank has of `tensor`."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a tensor of {tuple(tensor.shape)} is not cut")
    with torch.no_grad():
        like: Any = tensor.detach()
        return TensorShard(local=like.to_local(), like=like)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """All of it, gathered; every rank that holds a piece must ask."""
    with torch.no_grad():
        found: Any = tensor.detach()
        everything: Tensor = found.full_tensor() if isinstance(tensor, DTensor) else found
        return everything


PER_HEAD_WEIGHTS = (".q_norm.weight", ".k_norm.weight")
"""Weights that every rank of a tensor mesh holds whole and uses for its own heads: their gradients are parts."""


class ShardedOptimizer(Optimizer):
    """Of parameters that `fully_shard` has cut."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, tensor: DeviceMesh | None
    ) -> None:
        self._sharded = dict(parameters)
        self.pieces: dict[str, TensorShard] = {name: local_shard(one) for name, one in parameters.items()}
        self._tensor = tensor
        super().__init__({name: nn.Parameter(piece.local) for name, piece in self.pieces.items()}, settings)

    def ready(self, what: str) -> float:
        for name, one in self._sharded.items():
            if one.grad is not None:
                grad = local_shard(one.grad).local
                if self._tensor is not None and name.endswith(PER_HEAD_WEIGHTS):
                    dist.all_reduce(grad, group=self._tensor.get_group())
                self._parameters[name].grad, one.grad = grad, None
        return super().ready(what)

    def _norm(self) -> Tensor:
        grads = [(name, one.grad) for name, one in self._parameters.items() if one.grad is not None]
        norms = torch.stack(torch._foreach_norm([grad for _, grad in grads])).double()
        copies = torch.tensor([self._copies(name) for name, _ in grads], dtype=norms.dtype, device=norms.device)
        square = (norms.square() / copies).sum()
        dist.all_reduce(square)
        return square.sqrt().to(grads[0][1].dtype)

    def _copies(self, name: str) -> int:
        """Ranks that hold the same piece."""
        return dist.get_world_size() // self.pieces[name].holders

    def forget(self) -> None:
        super().forget()
        for one in self._sharded.values():
            one.grad = None
