"""Quantizes rows to fp8 in Triton: rows as they are, and rows of gates.

A program handles one row, or a piece of a row of gates: those are wide, so their largest magnitudes are found piece by
piece while gates are computed, and a second kernel scales.
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
def _round_row(value, scale):
    return tl.minimum(tl.maximum(value * (1.0 / scale), -_LARGEST), _LARGEST)


@triton.jit
def _quantize(x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = find_scale(tl.max(tl.abs(value), 0))
    tl.store(scales + row, scale)
    tl.store(out + row * WIDTH + i, _round_row(value, scale).to(out.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _gate(gate_up, out, peaks, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * (2 * WIDTH) + i
    gate = tl.load(at, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * tl.load(at + WIDTH, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = value.to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + i, value, mask=i < WIDTH)
    tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(value.to(tl.float32)), 0))


@triton.jit
def _quantize_by_peaks(
    x, peaks, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, PIECES_PAD)
    scale = find_scale(tl.max(tl.load(peaks + row * PIECES + p, mask=p < PIECES, other=0.0), 0))
    tl.store(scales + row, scale, mask=tl.program_id(1) == 0)
    value = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, _round_row(value, scale).to(out.dtype.element_ty), mask=i < WIDTH)


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 numbers and the scale of each row."""
    width = x_TK.shape[-1]
    out, scales = _allocate(x_TK, width)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 32
    _quantize[(len(out),)](
        x_TK.contiguous(), out, scales, WIDTH=width, BLOCK=block, num_warps=warps, **launch_options()
    )
    return out, scales


def gate_and_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(first half) · second half of each row as fp8 numbers and a scale."""
    width = gate_up.shape[-1] // 2
    out, scales = _allocate(gate_up, width)
    rows, block = len(out), min(1024, triton.next_power_of_2(width))
    pieces = triton.cdiv(width, block)
    gated = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    peaks = torch.empty(rows, pieces, dtype=torch.float32, device=gate_up.device)
    _gate[(rows, pieces)](gate_up, gated, peaks, WIDTH=width, BLOCK=block, num_warps=4, **launch_options())
    _quantize_by_peaks[(rows, pieces)](
        gated, peaks, out, scales, WIDTH=width, BLOCK=block, PIECES=pieces,
        PIECES_PAD=triton.next_power_of_2(pieces), num_warps=4, **launch_options(),
    )  # fmt: skip
    return out, scales


def _allocate(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    return out, torch.empty(rows, 1, dtype=torch.float32, device=x.device)
