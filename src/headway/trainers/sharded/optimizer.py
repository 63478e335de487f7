"""AdamW over pieces: every rank moves what it holds, and all agree on one norm.

The pieces are plain tensors that share memory with what the model gathers from, so a step is local and needs no other
rank. Guarantees: the norm is that of the whole gradient, every element counted once; where it is not finite, all ranks
raise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headway.trainers.local.optimizer import Optimizer
from headway.trainers.local.settings import OptimizerSettings
from headway.trainers.sharded.pieces import Piece, piece_of

PER_HEAD = (".q_norm.weight", ".k_norm.weight")
"""Weights that every rank of a tensor mesh holds whole and uses for its own heads: their gradients are parts."""


class ShardedOptimizer(Optimizer):
    """Of parameters that `fully_shard` has cut."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, tensor: DeviceMesh | None
    ) -> None:
        self._sharded = dict(parameters)
        self.pieces: dict[str, Piece] = {name: piece_of(one) for name, one in parameters.items()}
        self._tensor = tensor
        super().__init__({name: nn.Parameter(piece.local) for name, piece in self.pieces.items()}, settings)

    def ready(self, what: str) -> float:
        for name, one in self._sharded.items():
            if one.grad is not None:
                grad = piece_of(one.grad).local
                if self._tensor is not None and name.endswith(PER_HEAD):
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
