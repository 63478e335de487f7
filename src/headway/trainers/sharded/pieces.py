"""Pieces of tensors: what this rank holds of one that is cut over ranks, and the whole of it.

A piece is a box: along every dimension a stretch of the whole. `torch.distributed.tensor` knows where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
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


def piece_of(tensor: Tensor) -> Piece:
    """What this rank has of `tensor`."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a tensor of {tuple(tensor.shape)} is not cut")
    with torch.no_grad():
        like: Any = tensor.detach()
        return Piece(local=like.to_local(), like=like)


def whole(tensor: Tensor) -> Tensor:
    """All of it, gathered; every rank that holds a piece must ask."""
    with torch.no_grad():
        found: Any = tensor.detach()
        everything: Tensor = found.full_tensor() if isinstance(tensor, DTensor) else found
        return everything
