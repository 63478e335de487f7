"""Draws tokens in Triton: two passes over the logits, a token and its log-probability for each lane, in float32.

`_sums` reads every logit once and keeps the peak and the sum of each piece of the vocabulary; `_pick` finds the piece
and then the token at which the running sum passes the sequence's own uniform number, the same that the CPU draws with.
`_cut` runs only where a sequence truncates: it finds the smallest logit that may be drawn by halving the interval of
all float32 numbers, exact for top-k and top-p but for ties, which all stay.

Logits that are not finite give a log-probability that is not a number: the reader of the block must check.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engines.native import block_ops
from headway.engines.native.triton_launch import launch_options, wait_for_previous_kernel

WIDTH = 4096
_TOKEN = tl.constexpr(block_ops.TOKEN)
_POSITION = tl.constexpr(block_ops.POSITION)
_LIMIT = tl.constexpr(block_ops.LIMIT)
_ACTIVE = tl.constexpr(block_ops.ACTIVE)
_KEY = tl.constexpr(block_ops.KEY)
_TEMPERATURE = tl.constexpr(block_ops.TEMPERATURE)
_TOP_K = tl.constexpr(block_ops.TOP_K)
_TOP_P = tl.constexpr(block_ops.TOP_P)
_MIN_P = tl.constexpr(block_ops.MIN_P)
_COLUMNS = tl.constexpr(block_ops.COLUMNS)


@triton.jit
def _fraction(address):
    return tl.load(address).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scale(row):
    """Return 1 / temperature; 1 for greedy rows."""
    temperature = _fraction(row + _TEMPERATURE)
    return tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)


@triton.jit
def _uniform(row):
    """Return `block_ops.draw_uniform`, in float32 and below 1."""
    z = tl.load(row + _KEY).to(tl.uint64, bitcast=True)
    z += (tl.load(row + _POSITION) + 2).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _order(x):
    """Return float32 numbers as integers of the same order."""
    raw = x.to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@triton.jit
def _cut(logits, lanes, state, cuts, V, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0)
    row = state + tl.load(lanes + lane).to(tl.int64) * _COLUMNS
    logits += lane.to(tl.int64) * V
    scale = _scale(row)
    top_k = tl.load(row + _TOP_K)
    top_p = _fraction(row + _TOP_P)
    min_p = _fraction(row + _MIN_P)
    drawn = _fraction(row + _TEMPERATURE) > 0
    i = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, V, WIDTH):
        best = tl.maximum(best, tl.load(logits + start + i, mask=start + i < V, other=float("-inf")) * scale)
    peak = tl.max(best, 0)
    low = _order(tl.full([1], float("-inf"), tl.float32)).to(tl.int64)
    top = _order(tl.zeros([1], tl.float32) + peak).to(tl.int64)
    if drawn & (top_k > 0):
        high = top
        for _ in range(33):
            middle = low + ((high - low + 1) >> 1)
            count = tl.zeros([WIDTH], tl.int32)
            for start in range(0, V, WIDTH):
                x = tl.load(logits + start + i, mask=start + i < V, other=float("-inf")) * scale
                count += ((_order(x).to(tl.int64) >= middle) & (start + i < V)).to(tl.int32)
            enough = tl.sum(count, 0) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
            high = tl.maximum(low, high)
    if drawn & (top_p < 1.0):
        kept, high = low, top
        mass = tl.zeros([WIDTH], tl.float32)
        for start in range(0, V, WIDTH):
            x = tl.load(logits + start + i, mask=start + i < V, other=float("-inf")) * scale
            mass += tl.where(_order(x).to(tl.int64) >= kept, tl.exp(x - peak), 0.0)
        wanted = tl.sum(mass, 0) * top_p
        for _ in range(33):
            middle = low + ((high - low + 1) >> 1)
            mass = tl.zeros([WIDTH], tl.float32)
            for start in range(0, V, WIDTH):
                x = tl.load(logits + start + i, mask=start + i < V, other=float("-inf")) * scale
                mass += tl.where(_order(x).to(tl.int64) >= middle, tl.exp(x - peak), 0.0)
            enough = tl.sum(mass, 0) >= wanted
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
            high = tl.maximum(low, high)
    raw = low.to(tl.int32)
    found = tl.max((raw ^ ((raw >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), 0)
    least = tl.where(drawn & (min_p > 0), peak + tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    tl.store(cuts + lane, tl.maximum(found, least))


@triton.jit
def _piece(logits, cuts, lane, at, V, scale, CUT: tl.constexpr):
    """Return scaled logits at `at`, −∞ where nothing may be drawn."""
    x = tl.load(logits + lane.to(tl.int64) * V + at, mask=at < V, other=float("-inf")) * scale
    if CUT:
        x = tl.where(x >= tl.load(cuts + lane), x, float("-inf"))
    return x


@triton.jit
def _sums(
    logits, lanes, state, cuts, peaks, sums, V, PIECES, WIDTH: tl.constexpr, CUT: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0)
    piece = tl.program_id(1)
    scale = _scale(state + tl.load(lanes + lane).to(tl.int64) * _COLUMNS)
    x = _piece(logits, cuts, lane, piece * WIDTH + tl.arange(0, WIDTH), V, scale, CUT)
    peak = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    tl.store(peaks + lane * PIECES + piece, peak)
    tl.store(sums + lane * PIECES + piece, total)


@triton.jit
def _pick(
    logits, lanes, state, cuts, peaks, sums, block, ends, V, PIECES, STEPS: tl.constexpr, ENDS: tl.constexpr,
    PIECES_PAD: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    lane = tl.program_id(0)
    slot = tl.load(lanes + lane).to(tl.int64)
    row = state + slot * _COLUMNS
    scale = _scale(row)
    greedy = _fraction(row + _TEMPERATURE) <= 0
    b = tl.arange(0, PIECES_PAD)
    peak = tl.load(peaks + lane * PIECES + b, mask=b < PIECES, other=float("-inf"))
    top = tl.max(peak, 0)
    mass = tl.load(sums + lane * PIECES + b, mask=b < PIECES, other=0.0) * tl.exp(peak - top)
    total = tl.sum(mass, 0)
    goal = _uniform(row) * total
    piece = tl.sum((tl.cumsum(mass, 0) <= goal).to(tl.int32), 0)
    piece = tl.minimum(piece, tl.max(tl.where(mass > 0, b, 0), 0))
    rest = goal - tl.sum(tl.where(b < piece, mass, 0.0), 0)
    piece = tl.where(greedy, tl.argmax(peak, 0), piece)
    i = tl.arange(0, WIDTH)
    x = _piece(logits, cuts, lane, piece * WIDTH + i, V, scale, CUT)
    p = tl.exp(x - top)
    inner = tl.sum((tl.cumsum(p, 0) <= rest).to(tl.int32), 0)
    inner = tl.minimum(inner, tl.max(tl.where(p > 0, i, 0), 0))
    inner = tl.where(greedy, tl.argmax(x, 0), inner)
    token = piece * WIDTH + inner
    logp = tl.sum(tl.where(i == inner, x, 0.0), 0) - top - tl.log(total)

    active = tl.load(row + _ACTIVE) != 0
    position = tl.load(row + _POSITION)
    ended = position + 2 >= tl.load(row + _LIMIT)
    for e in range(ENDS):
        ended = ended | (token == tl.load(ends + e))
    report = block + slot * (1 + 2 * STEPS)
    count = tl.load(report)
    tl.store(report + 1 + count, token, mask=active)
    tl.store(report + 1 + STEPS + count, logp.to(tl.int32, bitcast=True), mask=active)
    tl.store(report, count + 1, mask=active)
    tl.store(row + _TOKEN, token.to(tl.int64), mask=active)
    tl.store(row + _POSITION, position + 1, mask=active)
    tl.store(row + _ACTIVE, tl.where(ended, 0, 1).to(tl.int64), mask=active)


def draw(logits_BV: Tensor, lanes_B: Tensor, state: Tensor, block: Tensor, ends: Tensor, *, truncates: bool) -> None:
    """See `BlockOps.draw`."""
    rows, vocabulary = logits_BV.shape
    pieces = triton.cdiv(vocabulary, WIDTH)
    peaks = torch.empty(2, rows, pieces, dtype=torch.float32, device=logits_BV.device)
    cuts = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    if truncates:
        _cut[(rows,)](logits_BV, lanes_B, state, cuts, vocabulary, WIDTH=2 * WIDTH, num_warps=16, **launch_options())
    _sums[(rows, pieces)](
        logits_BV, lanes_B, state, cuts, peaks[0], peaks[1], vocabulary, pieces, WIDTH=WIDTH, CUT=truncates,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    _pick[(rows,)](
        logits_BV, lanes_B, state, cuts, peaks[0], peaks[1], block, ends, vocabulary, pieces,
        STEPS=(block.shape[1] - 1) // 2, ENDS=len(ends), PIECES_PAD=triton.next_power_of_2(pieces), WIDTH=WIDTH,
        CUT=truncates, num_warps=8, **launch_options(),
    )  # fmt: skip
