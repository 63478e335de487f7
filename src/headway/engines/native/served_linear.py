"""Linear layers in the order of memory that this machine multiplies fastest.

`torch.nn.Linear` keeps (out, in), which is the slow way round for a few dozen rows. Where oneDNN can pack weights
ahead, it does so when weights arrive; elsewhere they are kept as (in, out). Results are those of `torch.nn.Linear`
up to rounding. Weights cannot be read back from here.

oneDNN has its own threads on some machines: set OMP_NUM_THREADS before the process starts to hold it to a number.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class WeightLayout(Protocol):
    """One order of memory."""

    def prepare(self, weight: Tensor) -> Tensor:
        """(out, in) as this layout wants it; always a copy."""
        ...

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias."""
        ...


class TransposedLayout:
    """(in, out), contiguous."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight.t(), bias)


class PackedLayout:
    """Blocks of oneDNN."""

    def prepare(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return packed

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product


class PlainLayout:
    """(out, in), as it came: GPUs multiply it as it is."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.clone()

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)


def choose_fastest_layout(dtype: torch.dtype) -> WeightLayout:
    """Packed where it works here, tried out on something small."""
    packed, weight, x = PackedLayout(), torch.randn(8, 16, dtype=dtype), torch.randn(1, 3, 16, dtype=dtype)
    try:
        same = torch.allclose(packed.multiply(x, packed.prepare(weight), None), x @ weight.t(), atol=1e-2)
    except (RuntimeError, AttributeError, NotImplementedError):
        same = False
    return packed if same else TransposedLayout()


class ServedLinear(nn.Module):
    """Stands where a `torch.nn.Linear` stood."""

    def __init__(self, layout: WeightLayout) -> None:
        super().__init__()
        self.layout = layout
        self.prepared: Tensor | None = None
        self.added: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.prepared is None:
            raise RuntimeError("no weights")
        return self.layout.multiply(x, self.prepared, self.added)


class FusedLinearSlice(nn.Module):
    """One of several linear layers that are given the same input one after the other, computed as one.

    The first one called computes them all. One that is given something else than the one before is still right, only
    slower.
    """

    def __init__(self, whole: ServedLinear, sizes: list[int], number: int, shelf: list[Tensor]) -> None:
        super().__init__()
        self._whole = (whole,)  # not a child: the whole has no name of its own in the model
        self._sizes = sizes
        self._number = number
        self._shelf = shelf
        """Shared by the parts: the input seen last, then a product for each."""

    @property
    def whole(self) -> ServedLinear:
        """All parts as one layer."""
        return self._whole[0]

    def forward(self, x: Tensor) -> Tensor:
        shelf = self._shelf
        if not shelf or shelf[0] is not x:
            shelf[:] = [x, *self._whole[0](x).split(self._sizes, -1)]
        part = shelf[self._number + 1]
        if self._number + 1 == len(self._sizes):
            shelf.clear()
        return part
