"""Products in 8 bits: weights have a scale for each output, inputs one for each token.

A row becomes fp8 numbers (e4m3, 3 bits of mantissa) and one float32 scale, its largest magnitude over 448. Weights are
quantized when a version arrives, inputs in every step, so nothing has to be calibrated. On GPUs that multiply fp8
(compute capability 8.9 and later) products run at twice the speed of bfloat16 and read half the bytes. Elsewhere the
same numbers are multiplied in float32, for tests.

Shapes: T rows, K numbers of a row, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of fp8."""
_SMALLEST = 1e-12


class QuantizedRows(NamedTuple):
    """A matrix whose rows are fp8 numbers times a scale."""

    data: Tensor
    """(T, K), fp8."""
    scale: Tensor
    """(T, 1), float32."""

    def restore(self) -> Tensor:
        """Return the numbers that these stand for, in float32."""
        return self.data.float() * self.scale


Matrix = Tensor | QuantizedRows


def quantize_rows(x_TK: Tensor) -> QuantizedRows:
    """Return each row in fp8 with its scale."""
    if x_TK.is_cuda:
        from headway.engines.native import triton_quantize

        return QuantizedRows(*triton_quantize.quantize_rows(x_TK))
    scale = x_TK.abs().amax(-1, keepdim=True).float().clamp_min(_SMALLEST) / LARGEST
    return QuantizedRows((x_TK.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale)


def quantize(x: Matrix) -> QuantizedRows:
    """Quantize a matrix that is not in 8 bits yet."""
    return x if isinstance(x, QuantizedRows) else quantize_rows(x)


def multiply_quantized(x: Matrix, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, in bfloat16 on a GPU; inputs that are not quantized yet are."""
    rows = quantize(x)
    if not rows.data.is_cuda:
        product = (rows.data.float() @ weight.data.float().t()) * rows.scale * weight.scale.t()
        return product if bias is None else product + bias.float()
    return torch._scaled_mm(
        rows.data,
        weight.data.t(),
        scale_a=rows.scale,
        scale_b=weight.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def read_kv_rows(part: Tensor, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of keys or values in this type, whatever they are stored in."""
    if part.dtype != FP8:
        return part.index_select(0, rows_T)
    return part.view(torch.uint8).index_select(0, rows_T).view(FP8).to(dtype)


def write_kv_rows(part: Tensor, rows_T: Tensor, found: Tensor) -> None:
    """Store rows of keys or values; 8 bits have no scale, and what is beyond their range becomes the largest number."""
    if part.dtype != FP8:
        part.index_copy_(0, rows_T, found.to(part.dtype))
        return
    small = found.float().clamp(-LARGEST, LARGEST).to(FP8)
    part.view(torch.uint8).index_copy_(0, rows_T, small.view(torch.uint8))


def can_quantize(shape: tuple[int, ...]) -> bool:
    """Return whether the products of a weight of this shape run in 8 bits."""
    return len(shape) == 2 and all(size % 16 == 0 for size in shape)


def check_quantized_device(device: torch.device, key: str = "dtype") -> None:
    """Raise `ConfigError` for a GPU that does not multiply fp8."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        problem = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) does not multiply fp8"
        raise ConfigError(problem, key=key, value="fp8", hint="bf16")
