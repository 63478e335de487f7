"""Quantizes rows to fp8 in Triton: rows as they are, and rows of gates that are computed on the way.

A program handles one row. It reads the row twice, first for its largest magnitude; the second time it comes from the
cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engines.native.triton_launch import launch_options, wait_for_previous_kernel

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-12)


@triton.jit
def find_scale(peak):
    """Return the scale of a row whose largest magnitude this is."""
    return tl.maximum(peak, _SMALLEST) / _LARGEST


@triton.jit
def _load_row(x, row, i, WIDTH: tl.constexpr, GATED: tl.constexpr):
    here = i < WIDTH
    if GATED:
        at = x + row * (2 * WIDTH) + i
        gate = tl.load(at, mask=here, other=0.0).to(tl.float32)
        return gate * tl.sigmoid(gate) * tl.load(at + WIDTH, mask=here, other=0.0).to(tl.float32)
    return tl.load(x + row * WIDTH + i, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _quantize(x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        peak = tl.maximum(peak, tl.abs(_load_row(x, row, start + i, WIDTH, GATED)))
    scale = find_scale(tl.max(peak, 0))
    tl.store(scales + row, scale)
    for start in tl.static_range(0, WIDTH, BLOCK):
        value = _load_row(x, row, start + i, WIDTH, GATED) / scale
        value = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)
        tl.store(out + row * WIDTH + start + i, value.to(out.dtype.element_ty), mask=start + i < WIDTH)


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 numbers and the scale of each row."""
    return _run(x_TK.contiguous(), x_TK.shape[-1], gated=False)


def gate_and_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(first half) · second half of each row as fp8 numbers and a scale."""
    return _run(gate_up, gate_up.shape[-1] // 2, gated=True)


def _run(x: Tensor, width: int, *, gated: bool) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(width))
    warps = max(4, min(16, block // 512))
    _quantize[(rows,)](x, out, scales, WIDTH=width, BLOCK=block, GATED=gated, num_warps=warps, **launch_options())
    return out, scales
