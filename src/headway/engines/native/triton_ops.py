"""The operations of a block in Triton, one kernel each: what `BlockOps` does, on a GPU.

Only rounding differs: norms, rotations and gates are computed in float32 and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from headway.engines.native import block_ops, triton_attention, triton_products, triton_quantize, triton_sampling
from headway.engines.native.block_ops import BlockOps, HeadShape, KeysValues, PageTable, RotaryTable
from headway.engines.native.quantized_products import FP8, QuantizedRows, multiply_quantized
from headway.engines.native.triton_launch import launch_options, wait_for_previous_kernel
from headway.engines.native.triton_quantize import find_scale

_TOKEN = tl.constexpr(block_ops.TOKEN)
_POSITION = tl.constexpr(block_ops.POSITION)
_COLUMNS = tl.constexpr(block_ops.COLUMNS)


@triton.jit
def _locate(
    state, lanes, tables, tokens, positions, rows, count, width, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = lane < count
    slot = tl.load(lanes + lane, mask=here, other=0)
    position = tl.load(state + slot * _COLUMNS + _POSITION, mask=here, other=0)
    page = tl.load(tables + slot * width + position // PAGE, mask=here, other=0).to(tl.int64)
    tl.store(tokens + lane, tl.load(state + slot * _COLUMNS + _TOKEN, mask=here, other=0), mask=here)
    tl.store(positions + lane, position, mask=here)
    tl.store(rows + lane, page * PAGE + position % PAGE, mask=here)


@triton.jit
def _add_norm(
    x, delta, weight, out, scales, eps, plane, WIDTH: tl.constexpr, PAD: tl.constexpr, PLANES: tl.constexpr,
    QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, PAD)
    here = i < WIDTH
    value = tl.load(x + row + i, mask=here, other=0.0)
    for p in tl.static_range(PLANES):
        value += tl.load(delta + p * plane + row + i, mask=here, other=0.0).to(tl.float32)
    if PLANES > 0:
        tl.store(x + row + i, value, mask=here)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale * tl.load(weight + i, mask=here, other=0.0).to(tl.float32)
    if QUANTIZED:
        by = find_scale(tl.max(tl.abs(normed), 0))
        tl.store(scales + tl.program_id(0), by)
        normed = tl.minimum(tl.maximum(normed / by, -448.0), 448.0)
    tl.store(out + row + i, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def _rotate_store(
    qkv, cos, sin, query_norm, key_norm, eps, positions, rows, q, keys, values, plane,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    KV_PAD: tl.constexpr, NORMS: tl.constexpr, PLANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    half: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    target = tl.load(rows + token) * (KV * SIZE)
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    here = (head < HEADS + KV) & (d < half)
    source = qkv + token * ((HEADS + 2 * KV) * SIZE)
    i = tl.arange(0, KV_PAD)
    a = tl.zeros([HEADS_PAD, HALF_PAD], tl.float32)
    b = tl.zeros([HEADS_PAD, HALF_PAD], tl.float32)
    value = tl.zeros([KV_PAD], tl.float32)
    for p in tl.static_range(PLANES):
        at = source + p * plane
        a += tl.load(at + head * SIZE + d, mask=here, other=0.0).to(tl.float32)
        b += tl.load(at + head * SIZE + half + d, mask=here, other=0.0).to(tl.float32)
        value += tl.load(at + (HEADS + KV) * SIZE + i, mask=i < KV * SIZE, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        q_a = tl.load(query_norm + d, mask=d < half, other=0.0).to(tl.float32)
        q_b = tl.load(query_norm + half + d, mask=d < half, other=0.0).to(tl.float32)
        k_a = tl.load(key_norm + d, mask=d < half, other=0.0).to(tl.float32)
        k_b = tl.load(key_norm + half + d, mask=d < half, other=0.0).to(tl.float32)
        a = a * scale * tl.where(head < HEADS, q_a, k_a)
        b = b * scale * tl.where(head < HEADS, q_b, k_b)
    c = tl.load(cos + position * half + d, mask=d < half, other=0.0)
    s = tl.load(sin + position * half + d, mask=d < half, other=0.0)
    first = (a * c - b * s).to(q.dtype.element_ty)
    second = (b * c + a * s).to(q.dtype.element_ty)
    to_q = q + (token * HEADS + head) * SIZE + d
    to_k = keys + target + (head - HEADS) * SIZE + d
    tl.store(to_q, first, mask=here & (head < HEADS))
    tl.store(to_q + half, second, mask=here & (head < HEADS))
    tl.store(to_k, first.to(keys.dtype.element_ty), mask=here & (head >= HEADS))
    tl.store(to_k + half, second.to(keys.dtype.element_ty), mask=here & (head >= HEADS))
    tl.store(values + target + i, value.to(values.dtype.element_ty), mask=i < KV * SIZE)


class TritonBlockOps(BlockOps):
    """The operations on a GPU."""

    decode = staticmethod(triton_attention.decode)
    prefill = staticmethod(triton_attention.prefill)
    draw = staticmethod(triton_sampling.draw)

    def locate(self, state: Tensor, lanes_B: Tensor, pages: PageTable) -> tuple[Tensor, Tensor, Tensor]:
        count = len(lanes_B)
        tokens_B, positions_B, rows_B = torch.empty(3, count, dtype=torch.int64, device=state.device)
        _locate[(triton.cdiv(count, 128),)](
            state, lanes_B, pages.tables, tokens_B, positions_B, rows_B, count, pages.tables.shape[1],
            PAGE=pages.page_tokens, BLOCK=128, num_warps=4, **launch_options(),
        )  # fmt: skip
        return tokens_B, positions_B, rows_B

    def add_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
        out = torch.empty(x_TE.shape, dtype=weight_E.dtype, device=x_TE.device)
        _run_add_norm(x_TE, delta_TE, weight_E, eps, out, None)
        return out

    def add_norm_quantized(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> QuantizedRows:
        out = torch.empty(x_TE.shape, dtype=FP8, device=x_TE.device)
        scale = torch.empty(len(x_TE), 1, dtype=torch.float32, device=x_TE.device)
        _run_add_norm(x_TE, delta_TE, weight_E, eps, out, scale)
        return QuantizedRows(out, scale)

    def rotate_store(
        self, qkv: Tensor, heads: HeadShape, rotary: RotaryTable, positions_T: Tensor, rows_T: Tensor, kv: KeysValues
    ) -> Tensor:
        tokens = qkv.shape[-2]
        q = torch.empty(tokens, heads.query, heads.size, dtype=block_ops.choose_query_dtype(kv), device=qkv.device)
        norms = rotary.query_norm is not None
        _rotate_store[(tokens,)](
            qkv, rotary.cos, rotary.sin, rotary.query_norm if norms else rotary.cos,
            rotary.key_norm if norms else rotary.cos, rotary.eps,
            positions_T, rows_T, q, *kv, tokens * qkv.shape[-1], HEADS=heads.query, KV=heads.kv, SIZE=heads.size,
            HEADS_PAD=triton.next_power_of_2(heads.query + heads.kv), HALF_PAD=triton.next_power_of_2(heads.size // 2),
            KV_PAD=triton.next_power_of_2(heads.kv * heads.size), NORMS=norms,
            PLANES=_planes(qkv), num_warps=4, **launch_options(),
        )  # fmt: skip
        return q

    def _multiply(self, x_TE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if triton_products.is_faster(len(x_TE), weight.numel()):
            return triton_products.product(x_TE, weight, bias)
        return linear(x_TE, weight, bias)

    def _multiply_gated(self, x_TE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None and triton_products.is_faster(len(x_TE), weight.numel() // 2):
            return triton_products.gated(x_TE, weight)
        return self.gate(linear(x_TE, weight, bias), x_TE.dtype)

    def gate(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        gate_up = block_ops.sum_planes(gate_up)
        width = gate_up.shape[-1] // 2
        out = torch.empty(len(gate_up), width, dtype=dtype, device=gate_up.device)
        grid = (len(gate_up), triton.cdiv(width, 1024))
        _gated[grid](gate_up, out, WIDTH=width, BLOCK=1024, num_warps=4, **launch_options())
        return out

    def _multiply_scaled(self, x: QuantizedRows, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
        if triton_products.is_faster_scaled(len(x.data)):
            return triton_products.product_scaled(x, weight, bias)
        return multiply_quantized(x, weight, bias)

    def _multiply_gated_scaled(self, x: QuantizedRows, weight: QuantizedRows, bias: Tensor | None) -> QuantizedRows:
        if bias is None and triton_products.is_faster_scaled(len(x.data)):
            return QuantizedRows(*triton_quantize.quantize_rows(triton_products.gated_scaled(x, weight)))
        return QuantizedRows(*triton_quantize.gate_and_quantize(multiply_quantized(x, weight, bias)))


def _run_add_norm(
    x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float, out: Tensor, scale: Tensor | None
) -> None:
    width = x_TE.shape[-1]
    pad = triton.next_power_of_2(width)
    _add_norm[(len(x_TE),)](
        x_TE, x_TE if delta_TE is None else delta_TE, weight_E, out, x_TE if scale is None else scale, eps,
        x_TE.numel(), WIDTH=width, PAD=pad, PLANES=_planes(delta_TE), QUANTIZED=scale is not None,
        num_warps=4 if pad <= 2048 else 8, **launch_options(),
    )  # fmt: skip


def _planes(product: Tensor | None) -> int:
    if product is None:
        return 0
    return len(product) if product.dim() == 3 else 1
