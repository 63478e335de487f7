"""Products of a few rows with matrices of a few megabytes, in Triton.

With few rows a product only reads its matrix, and libraries made for many rows wait more than they read. Here a program
handles a strip of the matrix and a share of its depth. Shares become float32 planes that the reader of the product
sums, which costs no kernel and no rounding. Where `is_faster` returns False, the library is as fast or faster. In 8
bits the library is slow for few rows whatever the size, and `is_faster_scaled` says how few.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engines.native.quantized_products import QuantizedRows
from headway.engines.native.triton_launch import launch_options, wait_for_previous_kernel

_MOST_ROWS = 64
_MOST_ELEMENTS = 5_000_000
_PROGRAMS = 288
"""Number of programs: about two for each multiprocessor keep the memory busy."""


@triton.jit
def _scale(total, x_scale, weight_scale, m, n, rows, WIDTH: tl.constexpr):
    by_row = tl.load(x_scale + m, mask=m < rows, other=0.0)
    return total * by_row[:, None] * tl.load(weight_scale + n, mask=n < WIDTH, other=0.0)[None, :]


@triton.jit(do_not_specialize=["rows", "planes"])
def _product(
    x, weight, bias, x_scale, weight_scale, out, rows, planes, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    strip = tl.program_id(0)
    plane = tl.program_id(1)
    m = tl.arange(0, ROWS)
    n = strip * STRIP + tl.arange(0, STRIP)
    k = tl.arange(0, BLOCK)
    share = tl.cdiv(tl.cdiv(DEPTH, planes), BLOCK) * BLOCK
    low = plane * share
    high = tl.minimum(low + share, DEPTH)
    x_at = x + m[:, None] * DEPTH + k[None, :]
    w_at = weight + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    total = tl.zeros([ROWS, STRIP], tl.float32)
    for start in range(low, high, BLOCK):
        deep = start + k < high
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & deep[None, :], other=0.0)
        b = tl.load(w_at + start, mask=(n[None, :] < WIDTH) & deep[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if SCALED:
        total = _scale(total, x_scale, weight_scale, m, n, rows, WIDTH)
    if BIASED:
        added = tl.load(bias + n, mask=(n < WIDTH) & (plane == 0), other=0.0)
        total += added.to(tl.float32)[None, :]
    place = out + (plane * rows + m[:, None]) * WIDTH + n[None, :]
    tl.store(place, total, mask=(m[:, None] < rows) & (n[None, :] < WIDTH))


@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x, weight, x_scale, weight_scale, out, rows, WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    STRIP: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    k = tl.arange(0, BLOCK)
    x_at = x + m[:, None] * DEPTH + k[None, :]
    gate_at = weight + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    up_at = gate_at + WIDTH * DEPTH
    gate = tl.zeros([ROWS, STRIP], tl.float32)
    up = tl.zeros([ROWS, STRIP], tl.float32)
    for start in range(0, DEPTH, BLOCK):
        deep = start + k < DEPTH
        mask = (n[None, :] < WIDTH) & deep[:, None]
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & deep[None, :], other=0.0)
        gate = tl.dot(a, tl.load(gate_at + start, mask=mask, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(up_at + start, mask=mask, other=0.0), up, input_precision="ieee")
    if SCALED:
        gate = _scale(gate, x_scale, weight_scale, m, n, rows, WIDTH)
        up = _scale(up, x_scale, weight_scale + WIDTH, m, n, rows, WIDTH)
    result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + m[:, None] * WIDTH + n[None, :], result, mask=(m[:, None] < rows) & (n[None, :] < WIDTH))


def is_faster(rows: int, elements: int) -> bool:
    """Return whether these kernels are faster: measured on an H200 with shapes of 0.5, 1.5 and 7 billion parameters."""
    return rows <= _MOST_ROWS and elements <= _MOST_ELEMENTS


def is_faster_scaled(rows: int) -> bool:
    """Return whether these kernels are faster in 8 bits."""
    return rows <= _MOST_ROWS


def product(x_TE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias as float32 planes, (P, T, out)."""
    return _run_product(x_TE, weight, bias, None)


def product_scaled(x: QuantizedRows, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """Return the same for operands in 8 bits."""
    return _run_product(x.data, weight.data, bias, (x.scale, weight.scale))


def _run_product(x_TE: Tensor, weight: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    rows, (width, depth) = len(x_TE), weight.shape
    strip, block = 32, 128 if scales is None else 256
    strips = triton.cdiv(width, strip)
    planes = _power_below(max(1, min(_PROGRAMS // strips, 8, depth // block)))
    out = torch.empty(planes, rows, width, dtype=torch.float32, device=x_TE.device)
    _product[(strips, planes)](
        x_TE, weight, weight if bias is None else bias, *(scales or (out, out)), out, rows, planes, WIDTH=width,
        DEPTH=depth, ROWS=max(16, triton.next_power_of_2(rows)), STRIP=strip, BLOCK=block, BIASED=bias is not None,
        SCALED=scales is not None, num_warps=4, num_stages=_choose_stages(x_TE, 5), **launch_options(),
    )  # fmt: skip
    return out


def gated(x_TE: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x · gateᵀ) · (x · upᵀ), gate and up being the halves of `weight`."""
    return _run_gated(x_TE, weight, None)


def gated_scaled(x: QuantizedRows, weight: QuantizedRows) -> Tensor:
    """Return the same for operands in 8 bits, in bfloat16."""
    return _run_gated(x.data, weight.data, (x.scale, weight.scale))


def _run_gated(x_TE: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    rows, width, depth = len(x_TE), weight.shape[0] // 2, weight.shape[1]
    padded = max(16, triton.next_power_of_2(rows))
    strip, block = (64, 128 if padded == 16 else 64) if scales is None else (32, 256)
    dtype = x_TE.dtype if x_TE.dtype.itemsize > 1 else torch.bfloat16
    out = torch.empty(rows, width, dtype=dtype, device=x_TE.device)
    _gated_product[(triton.cdiv(width, strip),)](
        x_TE, weight, *(scales or (out, out)), out, rows, WIDTH=width, DEPTH=depth, ROWS=padded, STRIP=strip,
        BLOCK=block, SCALED=scales is not None, num_warps=4,
        num_stages=_choose_stages(x_TE, 5 if scales is None else 4), **launch_options(),
    )  # fmt: skip
    return out


def _choose_stages(x: Tensor, stages: int) -> int:
    """Return the pipeline stages: float32 takes twice the shared memory."""
    return stages if x.dtype.itemsize <= 2 else 2


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
