"""Linear layers whose weights are stored in the order that this machine multiplies fastest.

`torch.nn.Linear` stores (out, in), which is slow for a few dozen rows. Where oneDNN can pack weights ahead, that is
done when weights arrive; elsewhere they are stored as (in, out). Results are those of `torch.nn.Linear` up to rounding.
Weights cannot be read back from here.

oneDNN has its own threads on some machines: set OMP_NUM_THREADS before the process starts to limit them.
"""

import torch
from torch import Tensor, nn

from headway.engines.native.quantized_products import Matrix, QuantizedRows, multiply_quantized


class WeightLayout:
    """One order of the weights in memory. This one stores (out, in), which GPUs multiply as it is."""

    def prepare(self, weight: Tensor) -> Tensor:
        """Return a copy of (out, in) weights in this layout."""
        return weight.clone()

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        return nn.functional.linear(x, weight, bias)


class TransposedLayout(WeightLayout):
    """Stores (in, out), contiguous."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight.t(), bias)


class PackedLayout(WeightLayout):
    """Stores the blocks of oneDNN."""

    def prepare(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return packed

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product


def choose_fastest_layout(dtype: torch.dtype) -> WeightLayout:
    """Return the packed layout where it works on this machine, tried out on a small product."""
    packed, weight, x = PackedLayout(), torch.randn(8, 16, dtype=dtype), torch.randn(1, 3, 16, dtype=dtype)
    try:
        same = torch.allclose(packed.multiply(x, packed.prepare(weight), None), x @ weight.t(), atol=1e-2)
    except (RuntimeError, AttributeError, NotImplementedError):
        same = False
    return packed if same else TransposedLayout()


class ServedLinear(nn.Module):
    """Replaces a `torch.nn.Linear`."""

    def __init__(self, layout: WeightLayout) -> None:
        super().__init__()
        self.layout = layout
        self.prepared: Tensor | None = None
        self.scale: Tensor | None = None
        """Scales of the outputs, where the weights are served in 8 bits."""
        self.bias: Tensor | None = None
        self.quantized = False
        """Whether its weights are served in 8 bits."""
        self.down: Tensor | None = None
        """Adapter (rank, in), where adapters are served apart from their base."""
        self.up: Tensor | None = None
        """Adapter (out, rank)."""
        self.adapter_scale = 1.0

    @property
    def operand(self) -> Matrix:
        """The weights as they are multiplied."""
        if self.prepared is None:
            raise RuntimeError("no weights")
        return self.prepared if self.scale is None else QuantizedRows(self.prepared, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.operand
        if isinstance(weight, Tensor):
            product = self.layout.multiply(x, weight, self.bias)
            return product if self.down is None else self.add_adapter(product, x)
        product = multiply_quantized(x.reshape(-1, x.shape[-1]), weight, self.bias)
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    def add_adapter(self, product: Tensor, x: Matrix) -> Tensor:
        """Add what the adapter makes of x, in place; a product in float32 may come in planes (P, …, out)."""
        if self.down is None or self.up is None or not isinstance(x, Tensor):
            raise RuntimeError("adapters are not added to weights in 8 bits")
        narrow = (x.reshape(-1, x.shape[-1]) @ self.down.t()).to(self.up.dtype)
        flat = product.view(-1, product.shape[-1])[: len(narrow)]
        if flat.dtype == narrow.dtype:
            flat.addmm_(narrow, self.up.t(), alpha=self.adapter_scale)
        elif flat.is_cuda:
            flat.add_(torch.mm(narrow, self.up.t(), out_dtype=flat.dtype), alpha=self.adapter_scale)
        else:
            flat.add_(narrow.to(flat.dtype) @ self.up.t().to(flat.dtype), alpha=self.adapter_scale)
        return product


class FusedLinearSlice(nn.Module):
    """One of several linear layers that get the same input one after the other, computed as one product.

    The first one called computes them all. One that gets another input than the one before is still right, only slower.
    """

    def __init__(self, whole: ServedLinear, sizes: list[int], number: int, results: list[Tensor]) -> None:
        super().__init__()
        self._whole = (whole,)  # not a child: the whole has no name of its own in the model
        self._sizes = sizes
        self._number = number
        self._results = results
        """Shared by the slices: the last input, then the product of each slice."""

    @property
    def whole(self) -> ServedLinear:
        """All slices as one layer."""
        return self._whole[0]

    def forward(self, x: Tensor) -> Tensor:
        results = self._results
        if not results or results[0] is not x:
            results[:] = [x, *self._whole[0](x).split(self._sizes, -1)]
        result = results[self._number + 1]
        if self._number + 1 == len(self._sizes):
            results.clear()
        return result
