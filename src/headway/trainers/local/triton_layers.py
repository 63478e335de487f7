"""GPU kernels for what lies between the matrix products of a decoder layer, each with its backward pass.

These parts only move memory, so every kernel reads its inputs once and writes its results once. All arithmetic is in
float32 and is rounded once at the end.

Legend: T tokens, E width of a row, H heads, D size of a head, K keys of all spans.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATE_BLOCK = 1024
_NORM_PROGRAMS = 8
"""Programs of a norm's backward pass on each multiprocessor; each adds up the weight gradient of its rows."""


@triton.jit
def _add_norm(x, delta, weight, total, out, scales, eps, WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    here = i < WIDTH
    value = tl.load(x + row * WIDTH + i, mask=here, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * WIDTH + i, mask=here, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + i, rounded, mask=here)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    normed = value * scale * tl.load(weight + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, normed.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])  # else it is compiled again in the first pack of another kind of length
def _add_norm_backward(
    total, weight, scales, grad_out, grad_total, grad, partial, rows,
    WIDTH: tl.constexpr, PAD: tl.constexpr, SKIP: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, PAD)
    here = i < WIDTH
    w = tl.load(weight + i, mask=here, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([PAD], tl.float32)
    row = program.to(tl.int64) * WIDTH
    for number in range(program, rows, programs):
        scale = tl.load(scales + number)
        unit = tl.load(total + row + i, mask=here, other=0.0).to(tl.float32) * scale
        g = tl.load(grad_out + row + i, mask=here, other=0.0).to(tl.float32)
        if WEIGHT:
            weight_grad += g * unit
        g = g * w
        found = (g - unit * (tl.sum(g * unit, 0) / WIDTH)) * scale
        if SKIP:
            found += tl.load(grad_total + row + i, mask=here, other=0.0).to(tl.float32)
        tl.store(grad + row + i, found.to(grad.dtype.element_ty), mask=here)
        row += programs.to(tl.int64) * WIDTH
    if WEIGHT:
        tl.store(partial + program * WIDTH + i, weight_grad, mask=here)


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_row, k_row, QUERY: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    is_q = (head < QUERY) & (d < half)
    is_k = (head >= QUERY) & (head < QUERY + KEY) & (d < half)
    at_q = (token * QUERY + head) * SIZE + d
    at_k = (token * KEY + head - QUERY) * SIZE + d
    from_q = token * q_row + head * SIZE + d
    from_k = token * k_row + (head - QUERY) * SIZE + d
    a = tl.load(q + from_q, mask=is_q, other=0.0).to(tl.float32)
    b = tl.load(q + from_q + half, mask=is_q, other=0.0).to(tl.float32)
    a += tl.load(k + from_k, mask=is_k, other=0.0).to(tl.float32)
    b += tl.load(k + from_k + half, mask=is_k, other=0.0).to(tl.float32)
    angle = token * SIZE + d
    cos_a = tl.load(cos + angle, mask=d < half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=d < half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=d < half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + half, mask=d < half, other=0.0).to(tl.float32)
    if BACK:
        first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    first, second = first.to(q_out.dtype.element_ty), second.to(q_out.dtype.element_ty)
    tl.store(q_out + at_q, first, mask=is_q)
    tl.store(q_out + at_q + half, second, mask=is_q)
    tl.store(k_out + at_k, first, mask=is_k)
    tl.store(k_out + at_k + half, second, mask=is_k)


@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    g = tl.load(gate + i, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + i, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=here)


@triton.jit
def _gate_backward(gate, up, grad, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    g = tl.load(gate + i, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=here, other=0.0).to(tl.float32)
    dy = tl.load(grad + i, mask=here, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + i, (dy * u * s * (1.0 + g * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=here)
    tl.store(grad_up + i, (dy * g * s).to(grad_up.dtype.element_ty), mask=here)


@triton.jit
def _sum_uses(grad, starts, uses, out, WIDTH: tl.constexpr, PAD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    here = i < WIDTH
    found = tl.zeros([PAD], tl.float32)
    for number in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(uses + number).to(tl.int64) * WIDTH
        found += tl.load(grad + row + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i, found.to(out.dtype.element_ty), mask=here)


def add_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, its norm times the weight, and the scale of each row."""
    rows, width = x_TE.shape
    total_TE = x_TE if delta_TE is None else torch.empty_like(x_TE)
    out_TE, scale_T = torch.empty_like(x_TE), torch.empty(rows, dtype=torch.float32, device=x_TE.device)
    _add_norm[(rows,)](
        x_TE, x_TE if delta_TE is None else delta_TE, weight_E, total_TE, out_TE, scale_T, eps,
        WIDTH=width, PAD=triton.next_power_of_2(width), ADD=delta_TE is not None, num_warps=_warps(width),
    )  # fmt: skip
    return total_TE, out_TE, scale_T


def add_norm_backward(
    total_TE: Tensor,
    weight_E: Tensor,
    scale_T: Tensor,
    grad_out_TE: Tensor,
    grad_total_TE: Tensor | None,
    *,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of both summands, and that of the weight."""
    rows, width = total_TE.shape
    grad_TE = torch.empty_like(total_TE)
    programs = min(rows, _NORM_PROGRAMS * _multiprocessors(total_TE.device))
    partial = torch.empty(programs, width if needs_weight else 0, dtype=torch.float32, device=total_TE.device)
    _add_norm_backward[(programs,)](
        total_TE, weight_E, scale_T, grad_out_TE, total_TE if grad_total_TE is None else grad_total_TE, grad_TE,
        partial, rows, WIDTH=width, PAD=triton.next_power_of_2(width), SKIP=grad_total_TE is not None,
        WEIGHT=needs_weight, num_warps=_warps(width),
    )  # fmt: skip
    return grad_TE, partial.sum(0).to(weight_E.dtype) if needs_weight else None


def rotate(
    q_THD: Tensor, k_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions; `back` is the transposed map.

    The heads of a token lie side by side; the rows of tokens may be parts of wider ones.
    """
    tokens, heads, size = q_THD.shape
    q_out, k_out = q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape)
    key_heads = k_THD.shape[1]
    _rotate[(tokens,)](
        q_THD, k_THD, cos_TD, sin_TD, q_out, k_out, q_THD.stride(0), k_THD.stride(0),
        QUERY=heads, KEY=key_heads, SIZE=size,
        HEADS_PAD=triton.next_power_of_2(heads + key_heads), HALF_PAD=triton.next_power_of_2(size // 2), BACK=back,
        num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def gate(gate_TE: Tensor, up_TE: Tensor) -> Tensor:
    """Return silu(gate)·up."""
    out_TE = torch.empty_like(gate_TE)
    count = gate_TE.numel()
    _gate[(triton.cdiv(count, _GATE_BLOCK),)](gate_TE, up_TE, out_TE, count, BLOCK=_GATE_BLOCK, num_warps=4)
    return out_TE


def gate_backward(gate_TE: Tensor, up_TE: Tensor, grad_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    grad_gate_TE, grad_up_TE = torch.empty_like(gate_TE), torch.empty_like(up_TE)
    count = gate_TE.numel()
    _gate_backward[(triton.cdiv(count, _GATE_BLOCK),)](
        gate_TE, up_TE, grad_TE, grad_gate_TE, grad_up_TE, count, BLOCK=_GATE_BLOCK, num_warps=4
    )
    return grad_gate_TE, grad_up_TE


def sum_uses(grad_KE: Tensor, starts_T: Tensor, uses_K: Tensor) -> Tensor:
    """Return, for each token, the sum of the rows of `grad_KE` that `uses_K` lists between its starts."""
    tokens, width = starts_T.shape[0] - 1, grad_KE[0].numel()
    out_TE = torch.empty(tokens, *grad_KE.shape[1:], dtype=grad_KE.dtype, device=grad_KE.device)
    _sum_uses[(tokens,)](grad_KE, starts_T, uses_K, out_TE, WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4)
    return out_TE


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
