"""Attention over paged KV in Triton: one token for each lane (decode), and tiles of prompts (prefill).

Decode: a program handles all query heads of one key-value head of one lane, padded to the 16 rows that tensor cores
need, and one share of the slot. Shares are equal inside a slot and have at least 256 tokens, 2048 where lanes are many,
so that one program reads a short slot and many read a long one. Where there are several, `_join` sums them.

Prefill in 16 bits: the KV that the pieces see is gathered from its pages, which costs little beside the products, and
the FlashAttention of torch does the rest. Large pieces of one long prompt go to the attention of cuDNN, twice as fast
on Hopper: it prepares itself for every size, so only multiples of `_CUDNN_TOKENS` do. In float32 a kernel of our own
reads the pages.

Scores are in base 2. Nothing behind a sequence's end is read. Soft caps and sinks (`models.attention_scores`) are part
of both kernels; libraries know neither, so prompts of such models are prefilled by the kernel that reads pages. KV in 8
bits is widened as it is read.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engines.native.block_ops import TILE_TOKENS, HeadShape, KeysValues, PageTable, PrefillBatch
from headway.engines.native.decode_graphs import choose_shortest_share
from headway.engines.native.quantized_products import FP8, read_kv_rows
from headway.engines.native.triton_launch import launch_options, wait_for_previous_kernel

_SHARED_MEMORY = 196_608
"""Bytes that keys and values on their way may take in a multiprocessor."""
_CUDNN_TOKENS = 2048
_LOG2_E = 1.4426950408889634
_SCORE_BASE = tl.constexpr(_LOG2_E)


@triton.jit
def _share(length, window, splits, BLOCK: tl.constexpr, SHORTEST: tl.constexpr):
    """Return the token at which reading begins, the tokens of a share, and the number of shares that have any."""
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0) // BLOCK * BLOCK
    span = length - begin
    share = tl.maximum(tl.cdiv(tl.cdiv(span, splits), BLOCK) * BLOCK, SHORTEST)
    return begin, share, tl.cdiv(span, share)


@triton.jit
def _find_rows(table, start, n, high, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows of the tokens `start + n`, of which those below `high` count."""
    if PAGE % BLOCK == 0:
        return tl.load(table + start // PAGE).to(tl.int64) * PAGE + (start % PAGE + n)
    at = start + n
    return tl.load(table + at // PAGE, mask=at < high, other=0).to(tl.int64) * PAGE + at % PAGE


@triton.jit
def _cap(score, cap, CAPPED: tl.constexpr):
    """Return cap · tanh(score / cap)."""
    if CAPPED:
        return cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
    return score


@triton.jit
def _find_block(table, start, n, high, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first row of a block where it lies in one page, else the rows of its tokens."""
    if PAGE % BLOCK == 0:
        return tl.load(table + start // PAGE, mask=start < high, other=0).to(tl.int64) * PAGE + start % PAGE
    else:  # noqa: RET505 - the compiler wants one type of what is returned
        return _find_rows(table, start, n, high, PAGE, BLOCK)


@triton.jit
def _widen_pairs(pairs, ASSEMBLY: tl.constexpr):
    """Return the first and the second numbers of pairs of 8 bits in float16, which holds them exactly."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd;
            .reg .b16 low, high;
            prmt.b32 even, $2, 0, 0x4420;
            prmt.b32 odd, $2, 0, 0x4431;
            mov.b32 {low, high}, even;
            cvt.rn.f16x2.e4m3x2 $0, low;
            mov.b32 {low, high}, odd;
            cvt.rn.f16x2.e4m3x2 $1, low;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def _load_block(
    keys, values, rows, kv_head, n, d, here, PAGE: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return keys and values of a block.

    Keys behind the end are read and masked as scores; values would turn what is not a number into more of it.
    """
    row: tl.constexpr = KV * SIZE // STEP
    first = kv_head * (SIZE // STEP)
    if PAGE % BLOCK == 0:
        first += rows * row
        rows = n
    k_at = keys + first + ((rows * row)[None, :] + d[:, None])
    v_at = values + first + ((rows * row)[:, None] + d[None, :])
    if SIZE == SIZE_PAD:
        return tl.load(k_at), tl.load(v_at, mask=here[:, None], other=0)
    else:  # noqa: RET505 - the compiler wants one return
        k_DN = tl.load(k_at, mask=d[:, None] * STEP < SIZE, other=0)
        return k_DN, tl.load(v_at, mask=here[:, None] & (d[None, :] * STEP < SIZE), other=0)


@triton.jit
def _score(q_GD, odd_GD, k_DN, PAIRS: tl.constexpr, ASSEMBLY: tl.constexpr):
    if PAIRS:
        even, odd = _widen_pairs(k_DN, ASSEMBLY)
        score = tl.dot(odd_GD, odd, tl.dot(q_GD, even))
    else:
        score = tl.dot(q_GD, k_DN, input_precision="ieee")
    return score


@triton.jit
def _add_values(p, v_ND, sum_GD, odd_sum_GD, fade, PAIRS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the faded sums with weighted values added; those of odd places are apart where KV comes in pairs."""
    if PAIRS:
        even, odd = _widen_pairs(v_ND, ASSEMBLY)
        sum_GD = tl.dot(p.to(tl.float16), even, sum_GD * fade[:, None])
        odd_sum_GD = tl.dot(p.to(tl.float16), odd, odd_sum_GD * fade[:, None])
    else:
        sum_GD = tl.dot(p.to(v_ND.dtype), v_ND, sum_GD * fade[:, None], input_precision="ieee")
    return sum_GD, odd_sum_GD


@triton.jit(do_not_specialize=["splits", "window"])
def _decode(
    q, keys, values, out, parts, weights, tables, lanes, positions, sinks, scale, cap, window, splits, width,
    PAGE: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, GROUP_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr, BLOCK: tl.constexpr, SHORTEST: tl.constexpr, SHARED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    length = (tl.load(positions + lane) + 1).to(tl.int32)
    begin, share, _ = _share(length, window, splits, BLOCK, SHORTEST)
    low = begin + split * share
    high = tl.minimum(low + share, length)
    group: tl.constexpr = HEADS // KV
    step: tl.constexpr = 2 if PAIRS else 1  # numbers of an element of KV
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, SIZE_PAD // step)
    n = tl.arange(0, BLOCK)
    mine = (g[:, None] < group) & (d[None, :] * step < SIZE)
    head = lane.to(tl.int64) * HEADS + kv_head * group + g
    place = head[:, None] * SIZE + d[None, :] * step
    q_GD = tl.load(q + place, mask=mine, other=0.0)
    odd_GD = q_GD
    if PAIRS:
        q_GD, odd_GD = q_GD.to(tl.float16), tl.load(q + place + 1, mask=mine, other=0.0).to(tl.float16)
    table = tables + tl.load(lanes + lane).to(tl.int64) * width
    first_seen = tl.where(window > 0, length - window, 0)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if SINKS:  # one more score that has no value, in the first share
        sink = tl.load(sinks + kv_head * group + g, mask=g < group, other=float("-inf")).to(tl.float32)
        peak = tl.where(split == 0, sink * _SCORE_BASE, peak)
        total = tl.where((split == 0) & (g < group), 1.0, 0.0)
    sum_GD = tl.zeros([GROUP_PAD, SIZE_PAD // step], tl.float32)
    odd_sum_GD = tl.zeros([GROUP_PAD, SIZE_PAD // step], tl.float32)
    rows = _find_block(table, low, n, high, PAGE, BLOCK)
    for start in range(low, high, BLOCK):
        at = start + n
        here = (at < high) & (at >= first_seen)
        k_DN, v_ND = _load_block(keys, values, rows, kv_head, n, d, here, PAGE, BLOCK, KV, SIZE, SIZE_PAD, step)
        rows = _find_block(table, start + BLOCK, n, high, PAGE, BLOCK)
        score = _cap(_score(q_GD, odd_GD, k_DN, PAIRS, EARLY) * scale, cap, CAPPED)
        score = tl.where(here[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        sum_GD, odd_sum_GD = _add_values(p, v_ND, sum_GD, odd_sum_GD, fade, PAIRS, EARLY)
        total = total * fade + tl.sum(p, 1)
        peak = higher
    if SHARED:
        mine = mine & (low < high)
        place = place + (head * (splits - 1) + split)[:, None] * SIZE
        tl.store(weights + head * splits + split, peak + tl.log2(total), mask=(g < group) & (low < high))
        target = parts
    else:
        target = out
    tl.store(target + place, (sum_GD / total[:, None]).to(target.dtype.element_ty), mask=mine)
    if PAIRS:
        tl.store(target + place + 1, (odd_sum_GD / total[:, None]).to(target.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["splits", "window"])
def _join(
    parts, weights, out, positions, window, splits, HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr, BLOCK: tl.constexpr, SHORTEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0)
    head = lane.to(tl.int64) * HEADS + tl.program_id(1)
    length = (tl.load(positions + lane) + 1).to(tl.int32)
    _, _, used = _share(length, window, splits, BLOCK, SHORTEST)
    s = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, SIZE_PAD)
    weight = tl.load(weights + head * splits + s, mask=s < used, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    mask = (s[:, None] < used) & (d[None, :] < SIZE)
    part = tl.load(parts + (head * splits + s[:, None]) * SIZE + d[None, :], mask=mask, other=0.0)
    joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * SIZE + d, joined.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit(do_not_specialize=["window"])
def _prefill(
    q, keys, values, out, tables, tiles, sinks, scale, cap, window, width, PAGE: tl.constexpr, HEADS: tl.constexpr,
    KV: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    slot = tl.load(tiles + tile * 4 + 2)
    start = tl.load(tiles + tile * 4 + 3).to(tl.int32)
    m = tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, SIZE_PAD)
    mine = (m[:, None] < count) & (d[None, :] < SIZE)
    place = ((first + m[:, None]) * HEADS + head) * SIZE + d[None, :]
    q_MD = tl.load(q + place, mask=mine, other=0.0)
    position = start + m
    high = start + count.to(tl.int32)
    low = tl.where(window > 0, tl.maximum(start - window + 1, 0), 0) // BLOCK * BLOCK
    table = tables + slot * width
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head).to(tl.float32) * _SCORE_BASE
        total += 1.0
    sum_MD = tl.zeros([ROWS, SIZE_PAD], tl.float32)
    for begin in range(low, high, BLOCK):
        at = begin + n
        here = at < high
        offset = _find_rows(table, begin, n, high, PAGE, BLOCK) * (KV * SIZE) + head // (HEADS // KV) * SIZE
        k_DN = tl.load(keys + offset[None, :] + d[:, None], mask=here[None, :] & (d[:, None] < SIZE), other=0.0)
        score = _cap(tl.dot(q_MD, k_DN.to(q_MD.dtype), input_precision="ieee") * scale, cap, CAPPED)
        seen = here[None, :] & (at[None, :] <= position[:, None])
        seen = seen & ((window <= 0) | (at[None, :] > position[:, None] - window))
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        v_ND = tl.load(values + offset[:, None] + d[None, :], mask=here[:, None] & (d[None, :] < SIZE), other=0.0)
        v_ND = v_ND.to(q_MD.dtype)
        sum_MD = sum_MD * fade[:, None] + tl.dot(p.to(v_ND.dtype), v_ND, input_precision="ieee")
        total = total * fade + tl.sum(p, 1)
        peak = higher
    tl.store(out + place, (sum_MD / total[:, None]).to(out.dtype.element_ty), mask=mine)


def decode(
    q_BHD: Tensor,
    kv: KeysValues,
    heads: HeadShape,
    pages: PageTable,
    lanes_B: Tensor,
    positions_B: Tensor,
    splits: int,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `BlockOps.decode`."""
    lanes, out = len(q_BHD), torch.empty_like(q_BHD)
    shared, pairs = splits > 1, kv[0].dtype == FP8
    shape = (lanes * heads.query * splits, heads.size) if shared else (1, 1)
    parts = torch.empty(shape, dtype=torch.float32, device=out.device)
    weights = torch.empty(shape[:1], dtype=torch.float32, device=out.device)
    size_pad, block = max(32 if pairs else 16, _pad_size(heads)), 64
    warps, stages = choose_decode_launch(lanes * heads.kv * splits, size_pad, kv[0].element_size())
    keys, values = (part.view(torch.int16) if pairs else part for part in kv)
    shortest = choose_shortest_share(lanes * heads.kv)
    _decode[(lanes, heads.kv, splits)](
        q_BHD, keys, values, out, parts, weights, pages.tables, lanes_B, positions_B,
        q_BHD if sinks_H is None else sinks_H, heads.scale * _LOG2_E, heads.softcap * _LOG2_E, heads.window, splits,
        pages.tables.shape[1], PAGE=pages.page_tokens, HEADS=heads.query, KV=heads.kv, SIZE=heads.size,
        GROUP_PAD=max(16, triton.next_power_of_2(heads.query // heads.kv)), SIZE_PAD=size_pad, BLOCK=block,
        SHORTEST=shortest, SHARED=shared, CAPPED=heads.softcap > 0, SINKS=sinks_H is not None, PAIRS=pairs,
        num_warps=warps, num_stages=max(1, min(stages, _SHARED_MEMORY // (2 * block * size_pad * keys.element_size()))),
        **launch_options(),
    )  # fmt: skip
    if shared:
        _join[(lanes, heads.query)](
            parts, weights, out, positions_B, heads.window, splits, HEADS=heads.query, SIZE=heads.size,
            SIZE_PAD=size_pad, SPLITS_PAD=triton.next_power_of_2(splits), BLOCK=block, SHORTEST=shortest, num_warps=1,
            **launch_options(),
        )  # fmt: skip
    return out


def choose_decode_launch(programs: int, size: int, element_bytes: int) -> tuple[int, int]:
    """Return warps and stages as measured on an H200: as many stages as let all programs run at once, else three."""
    if element_bytes > 2 or size > 128:
        return 4, 2
    if size <= 64:
        return (4, 3) if programs < 512 else (2, 2)
    for stages in (4, 3, 2):
        resident = 220_000 // ((stages - 1) * 128 * size * element_bytes + 6144)
        if programs <= 132 * min(resident, 6):
            return 2, stages
    return 2, 3


def _pad_size(heads: HeadShape) -> int:
    """Return the power of 2 that holds a head; tensor cores multiply 16 numbers at least."""
    return max(16, int(triton.next_power_of_2(heads.size)))


def prefill(
    q_THD: Tensor,
    kv: KeysValues,
    heads: HeadShape,
    pages: PageTable,
    batch: PrefillBatch,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `BlockOps.prefill`."""
    plain = not heads.softcap and sinks_H is None and heads.size % 8 == 0 and heads.size <= 256
    if q_THD.is_cuda and q_THD.dtype != torch.float32 and plain:
        return _prefill_with_flash(q_THD, kv, heads, batch)
    return prefill_pages(q_THD, kv, heads, pages, batch.tiles, sinks_H)


def prefill_pages(
    q_THD: Tensor,
    kv: KeysValues,
    heads: HeadShape,
    pages: PageTable,
    tiles_N4: Tensor,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend with tiles of prompts to their pages, in any type."""
    out = torch.empty_like(q_THD)
    size_pad = _pad_size(heads)
    wide = size_pad * q_THD.element_size() > 512  # twice the shared memory
    _prefill[(len(tiles_N4), heads.query)](
        q_THD, *kv, out, pages.tables, tiles_N4, q_THD if sinks_H is None else sinks_H, heads.scale * _LOG2_E,
        heads.softcap * _LOG2_E, heads.window, pages.tables.shape[1], PAGE=pages.page_tokens, HEADS=heads.query,
        KV=heads.kv, SIZE=heads.size, SIZE_PAD=size_pad, ROWS=TILE_TOKENS, BLOCK=32 if wide else 64,
        CAPPED=heads.softcap > 0, SINKS=sinks_H is not None, num_warps=4, num_stages=1 if wide else 2,
        **launch_options(),
    )  # fmt: skip
    return out


def _prefill_with_flash(q_THD: Tensor, kv: KeysValues, heads: HeadShape, batch: PrefillBatch) -> Tensor:
    keys, values = (read_kv_rows(part, batch.context_rows, q_THD.dtype) for part in kv)
    start = len(keys) - len(q_THD)
    aligned = len(q_THD) % _CUDNN_TOKENS == 0 and start % _CUDNN_TOKENS == 0
    if batch.pieces == 1 and aligned and not heads.window and heads.size <= 128 and _is_hopper():
        return _prefill_with_cudnn(q_THD, keys, values, heads.scale, start)
    window = heads.window - 1 if heads.window else None
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        q_THD, keys, values, batch.query_ends, batch.context_ends, batch.longest_query, batch.longest_context, 0.0,
        True, False, scale=heads.scale, window_size_left=window, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return attended


def _prefill_with_cudnn(q_THD: Tensor, keys: Tensor, values: Tensor, scale: float, start: int) -> Tensor:
    """Attend to the piece itself with a mask and to what is before it without one, then join both."""
    own, weight_TH1 = _attend_with_cudnn(q_THD, keys[start:], values[start:], scale, causal=True)
    if start == 0:
        return own
    before, before_TH1 = _attend_with_cudnn(q_THD, keys[:start], values[:start], scale, causal=False)
    share = torch.sigmoid(weight_TH1 - before_TH1)
    return torch.lerp(before.float(), own.float(), share).to(q_THD.dtype)


def _attend_with_cudnn(
    q_THD: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the result (T, H, D) and the logarithm of the sum of its weights (T, H, 1)."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q_THD, keys, values))
    out, weight = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out[0].transpose(0, 1).contiguous(), weight.view(1, q.shape[1], -1, 1)[0].transpose(0, 1)


@cache
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9
