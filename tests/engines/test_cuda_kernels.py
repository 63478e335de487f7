"""The Triton kernels do what their plain torch forms do.

Run on a GPU, or anywhere under Triton's interpreter (`TRITON_INTERPRET=1`); skipped where there is neither.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headway.engines.native import block_ops as columns
from headway.engines.native.block_ops import (
    GOLDEN_GAMMA,
    TILE_TOKENS,
    BlockOps,
    HeadShape,
    PageTable,
    PrefillBatch,
    RotaryTable,
    float_to_bits,
    sum_planes,
)
from headway.engines.native.quantized_products import FP8, QuantizedRows, multiply_quantized, quantize_rows

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor the interpreter"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
NEAR = 1e-4 if INTERPRETED else 2e-2
SHAPES = [(4, 2, 8), (4, 2, 16), (14, 2, 64), (6, 6, 96), (8, 1, 128)]


def triton_ops() -> Any:
    from headway.engines.native.triton_ops import TritonBlockOps

    return TritonBlockOps()


def triton_attention() -> Any:
    from headway.engines.native import triton_attention

    return triton_attention


def triton_quantize() -> Any:
    from headway.engines.native import triton_quantize

    return triton_quantize


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    first, second = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) < NEAR


def paged(slots: int, slot_tokens: int, page_tokens: int) -> tuple[PageTable, int]:
    """Pages in any order, and the number of rows that they have."""
    width = -(-slot_tokens // page_tokens)
    tables = torch.randperm(slots * width).view(slots, width).to(DEVICE, torch.int32)
    return PageTable(tables, page_tokens), slots * width * page_tokens


@pytest.mark.parametrize(("query", "kv", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("splits", "page_tokens"), [(1, 64), (4, 16), (8, 128)])
def test_decoding(query: int, kv: int, size: int, window: int, splits: int, page_tokens: int) -> None:
    torch.manual_seed(query + window)
    heads = HeadShape(query, kv, size, size**-0.5, window)
    pages, rows = paged(8, 1200, page_tokens)
    memory = (random(rows, kv, size), random(rows, kv, size))
    positions = [0, 5, 127, 128, 400, 1199]
    q, at = random(len(positions), query, size), torch.tensor(positions, device=DEVICE)
    lanes = torch.tensor([3, 0, 7, 1, 2, 6], device=DEVICE)
    found = triton_ops().decode(q, memory, heads, pages, lanes, at, splits)
    exact = tuple(part.float() for part in memory)
    assert close(found, BlockOps().decode(q.float(), exact, heads, pages, lanes, at, splits))


@pytest.mark.parametrize(("query", "kv", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_filling(query: int, kv: int, size: int, window: int, page_tokens: int) -> None:
    torch.manual_seed(query)
    heads = HeadShape(query, kv, size, size**-0.5, window)
    pages, rows = paged(4, 200, page_tokens)
    memory = (random(rows, kv, size), random(rows, kv, size))
    tiles = [(0, TILE_TOKENS, 2, 0), (TILE_TOKENS, 5, 2, TILE_TOKENS), (TILE_TOKENS + 5, 40, 0, 130)]
    contexts = []
    for slot, length in ((2, TILE_TOKENS + 5), (0, 170)):
        at = torch.arange(length, device=DEVICE)
        contexts.append(pages.tables[slot, at // page_tokens].long() * page_tokens + at % page_tokens)
    ends = [torch.tensor([0, TILE_TOKENS + 5, last], dtype=torch.int32, device=DEVICE) for last in (109, 239)]
    batch = PrefillBatch(torch.tensor(tiles, device=DEVICE), torch.cat(contexts), *ends, TILE_TOKENS + 5, 170, 2)
    q = random(TILE_TOKENS + 45, query, size)
    exact = tuple(part.float() for part in memory)
    wanted = BlockOps().prefill(q.float(), exact, heads, pages, batch)
    assert close(triton_ops().prefill(q, memory, heads, pages, batch), wanted)
    assert close(triton_attention().prefill_pages(q, memory, heads, pages, batch.tiles), wanted)


@pytest.mark.parametrize(("query", "kv", "size"), [(4, 2, 8), (8, 4, 192), (8, 4, 256)])
@pytest.mark.parametrize(("softcap", "sinks", "window"), [(2.0, False, 0), (0.0, True, 70), (3.0, True, 0)])
@pytest.mark.parametrize("splits", [1, 4])
def test_soft_caps_and_sinks(
    query: int, kv: int, size: int, softcap: float, sinks: bool, window: int, splits: int
) -> None:
    torch.manual_seed(size)
    heads = HeadShape(query, kv, size, size**-0.5, window, softcap)
    pages, rows = paged(4, 700, 64)
    memory = (random(rows, kv, size), random(rows, kv, size))
    exact = tuple(part.float() for part in memory)
    sinks_H = random(query) + 8 if sinks else None  # as large as the sum of all other scores
    lanes, at = torch.tensor([3, 0, 1], device=DEVICE), torch.tensor([5, 699, 300], device=DEVICE)
    q = random(3, query, size) * 3
    found = triton_ops().decode(q, memory, heads, pages, lanes, at, splits, sinks_H)
    assert close(found, BlockOps().decode(q.float(), exact, heads, pages, lanes, at, splits, sinks_H))
    plain = BlockOps().decode(q.float(), exact, HeadShape(query, kv, size, size**-0.5, window), pages, lanes, at, 1)
    assert not close(found, plain)
    tiles = torch.tensor([(0, TILE_TOKENS, 2, 0), (TILE_TOKENS, 5, 2, TILE_TOKENS)], device=DEVICE)
    ends = torch.tensor([0, TILE_TOKENS + 5], dtype=torch.int32, device=DEVICE)
    batch = PrefillBatch(tiles, tiles[:0, 0], ends, ends, TILE_TOKENS + 5, TILE_TOKENS + 5, 1)
    q = random(TILE_TOKENS + 5, query, size) * 3
    wanted = BlockOps().prefill(q.float(), exact, heads, pages, batch, sinks_H)
    assert close(triton_ops().prefill(q, memory, heads, pages, batch, sinks_H), wanted)


def test_keys_and_values_of_8_bits() -> None:
    torch.manual_seed(0)
    heads = HeadShape(14, 2, 64, 0.125)
    pages, rows = paged(2, 300, 64)
    memory = (random(rows, 2, 64).to(FP8), random(rows, 2, 64).to(FP8))
    lanes, at, q = torch.tensor([1, 0], device=DEVICE), torch.tensor([299, 70], device=DEVICE), random(2, 14, 64)
    wanted = BlockOps().decode(q.float(), tuple(part.float() for part in memory), heads, pages, lanes, at, 1)
    for splits in (1, 4):
        found = triton_ops().decode(q, memory, heads, pages, lanes, at, splits)
        assert float((found.float() - wanted).norm() / wanted.norm()) < max(NEAR, 1e-3)  # computed in float16


@pytest.mark.skipif(INTERPRETED, reason="the interpreter rounds to 8 bits in another way")
@pytest.mark.parametrize("width", [96, 896, 5000])
def test_rows_of_8_bits(width: int) -> None:
    torch.manual_seed(width)
    x, weight, delta = torch.randn(3, width, device=DEVICE), random(width), random(3, width)
    for found, wanted in (
        (triton_quantize().quantize_rows(random_ := random(3, width)), quantize_rows(random_.cpu())),
        (triton_quantize().gate_and_quantize(wide := random(3, 2 * width)), quantize_rows(gate(wide.cpu()))),
        (
            triton_ops().add_norm_quantized(x.clone(), delta, weight, 1e-6),
            BlockOps().add_norm_quantized(x.cpu().clone(), delta.cpu(), weight.cpu().float(), 1e-6),
        ),
    ):
        same = (found[0].cpu().view(torch.uint8) == wanted.data.view(torch.uint8)).float().mean()
        assert float(same) > 0.95 and close(QuantizedRows(*found).restore().cpu(), wanted.restore())
        assert close(found[1].cpu(), wanted.scale)


@pytest.mark.skipif(INTERPRETED, reason="a kernel of a library")
@pytest.mark.parametrize("rows", [1, 24, 300])
def test_products_of_8_bits(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = random(rows, 256), random(160, 256), random(160)
    wanted = multiply_quantized(x.cpu(), quantize_rows(weight.cpu()), bias.cpu())
    assert close(multiply_quantized(x, quantize_rows(weight), bias).cpu(), wanted)


@pytest.mark.skipif(INTERPRETED, reason="a kernel of a library")
@pytest.mark.parametrize("start", [0, 2048])
def test_filling_large_pieces_of_one_prompt(start: int) -> None:
    torch.manual_seed(start)
    heads, length = HeadShape(14, 2, 64, 0.125), start + 2048
    pages, rows = paged(1, length, 64)
    memory = (random(rows, 2, 64), random(rows, 2, 64))
    at = torch.arange(length, device=DEVICE)
    context = pages.tables[0, at // 64].long() * 64 + at % 64
    ends = [torch.tensor([0, last], dtype=torch.int32, device=DEVICE) for last in (2048, length)]
    tiles = torch.tensor([(0, 2048, 0, start)], device=DEVICE)
    q = random(2048, 14, 64)
    batch = PrefillBatch(tiles, context, *ends, 2048, length, 1)
    wanted = BlockOps().prefill(q.float(), tuple(part.float() for part in memory), heads, pages, batch)
    assert close(triton_ops().prefill(q, memory, heads, pages, batch), wanted)


def test_the_row_of_the_next_token() -> None:
    torch.manual_seed(0)
    pages, _ = paged(300, 90, 16)
    state = torch.randint(0, 90, (300, columns.COLUMNS), device=DEVICE)
    lanes = torch.randperm(300).to(DEVICE)[:200]
    for found, wanted in zip(
        triton_ops().locate(state, lanes, pages), BlockOps().locate(state, lanes, pages), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("query", "kv", "size"), SHAPES)
@pytest.mark.parametrize("norms", [False, True])
def test_rotating(query: int, kv: int, size: int, norms: bool) -> None:
    torch.manual_seed(size)
    angles = torch.rand(50, size // 2, device=DEVICE) * 6
    weights = (random(size), random(size)) if norms else (None, None)
    by = RotaryTable(angles.cos(), angles.sin(), *weights, eps=1e-6)
    heads = HeadShape(query, kv, size, 1.0)
    planes = torch.randn(4, 5, (query + 2 * kv) * size, device=DEVICE) if norms else None
    qkv = random(5, (query + 2 * kv) * size) if planes is None else planes
    at = torch.tensor([0, 3, 9, 49, 7], device=DEVICE)
    rows = torch.tensor([4, 0, 17, 3, 19], device=DEVICE)
    results = []
    for ops in (triton_ops(), BlockOps()):
        memory = (torch.zeros(20, kv, size, device=DEVICE, dtype=DTYPE), random(20, kv, size) * 0)
        results.append((ops.rotate_store(qkv, heads, by, at, rows, memory), *memory))
    assert all(close(found, wanted) for found, wanted in zip(*results, strict=True))


@pytest.mark.parametrize("width", [96, 896, 3000])
def test_norms_and_gates(width: int) -> None:
    torch.manual_seed(width)
    x, weight, delta = torch.randn(3, width, device=DEVICE), random(width), random(3, width)
    streams = [x.clone(), x.clone()]
    for change in (None, delta):
        found, wanted = (
            ops.add_norm(stream, change, weight, 1e-6)
            for ops, stream in zip((triton_ops(), BlockOps()), streams, strict=True)
        )
        assert close(found, wanted)
    assert close(*streams)
    planes = torch.randn(4, 3, width, device=DEVICE)
    assert close(*(ops.add_norm(x.clone(), planes, weight, 1e-6) for ops in (triton_ops(), BlockOps())))


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_products(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = random(rows, 300), random(90, 300), random(90)
    exact = [tensor.float() for tensor in (x, weight, bias)]
    for added, plain in ((None, None), (bias, exact[2])):
        found = sum_planes(triton_ops().product(x, weight, added))
        assert close(found, BlockOps().product(*exact[:2], plain))
        assert close(triton_ops().gated(x, weight, added), BlockOps().gated(*exact[:2], plain))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_products_of_few_rows(rows: int, biased: bool) -> None:
    from headway.engines.native import triton_products

    torch.manual_seed(rows)
    x, weight, bias = random(rows, 320), random(96, 320), random(96) if biased else None
    left, right = ((part, torch.rand(len(part), 1, device=DEVICE) + 0.5) for part in (x, weight))
    if not INTERPRETED:  # which does not round to 8 bits as a GPU does, but multiplies and scales any numbers
        left, right = ((part[0].to(FP8), part[1]) for part in (left, right))
    exact = [part[0].float() * part[1] for part in (left, right)]
    wide = None if bias is None else bias.float()
    found = sum_planes(triton_products.product_scaled(QuantizedRows(*left), QuantizedRows(*right), bias))
    assert close(found, BlockOps().product(*exact, wide))
    if bias is None:
        assert close(
            triton_products.gated_scaled(QuantizedRows(*left), QuantizedRows(*right)), BlockOps().gated(*exact, None)
        )


def state_of(rows: list[dict[int, int]]) -> torch.Tensor:
    plain = {
        columns.POSITION: 4,
        columns.LIMIT: 50,
        columns.ACTIVE: 1,
        columns.TEMPERATURE: float_to_bits(1.0),
        columns.TOP_P: float_to_bits(1.0),
    }
    state = torch.zeros(len(rows), columns.COLUMNS, dtype=torch.int64)
    for number, row in enumerate(rows):
        for column, value in (plain | {columns.KEY: (number * GOLDEN_GAMMA) % 2**63} | row).items():
            state[number, column] = value
    return state


@pytest.mark.parametrize("cut", [False, True])
def test_draws(cut: bool) -> None:
    torch.manual_seed(1)
    rows: list[dict[int, int]] = [
        {},
        {columns.TEMPERATURE: float_to_bits(0.6)},
        {columns.TEMPERATURE: float_to_bits(0.0)},
        {columns.ACTIVE: 0},
        {columns.LIMIT: 6},
        {columns.TEMPERATURE: float_to_bits(0.0), columns.POSITION: 11},
        *({columns.KEY: 77 * number} for number in range(6)),
    ]
    if cut:
        rows += [{columns.TOP_K: 3}, {columns.TOP_P: float_to_bits(0.5)}, {columns.MIN_P: float_to_bits(0.2)}] * 4
        rows.append({columns.TOP_K: 40, columns.TOP_P: float_to_bits(0.7), columns.MIN_P: float_to_bits(0.01)})
    state = state_of(rows).to(DEVICE)
    logits = (torch.randn(len(rows), 9001) * 3).to(DEVICE)
    ends = torch.tensor([int(logits[5].argmax()), 3], device=DEVICE)
    lanes = torch.randperm(len(rows)).to(DEVICE)
    states, blocks = [state.clone(), state.clone()], []
    for ops, one in zip((triton_ops(), BlockOps()), states, strict=True):
        block = torch.zeros(len(rows), 7, dtype=torch.int32, device=DEVICE)
        ops.draw(logits[lanes], lanes, one, block, ends, truncates=cut)
        blocks.append(block.cpu())
    found, wanted = blocks
    assert torch.equal(found[:, 0], wanted[:, 0]) and not found[3].any()
    assert torch.equal(found[:, 1], wanted[:, 1]), "the same tokens: equal numbers decide both"
    difference = found[:, 4].contiguous().view(torch.float32) - wanted[:, 4].contiguous().view(torch.float32)
    assert float(difference.abs().max()) < 1e-4
    assert torch.equal(*(one.cpu() for one in states))
    assert state[5, columns.ACTIVE] and not states[0][5, columns.ACTIVE] and not states[0][4, columns.ACTIVE]


def test_logits_that_are_not_numbers_show_in_the_log_probability() -> None:
    logits = torch.randn(2, 300).to(DEVICE)
    logits[1, 7] = float("nan")
    state, block = state_of([{}, {}]).to(DEVICE), torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    triton_ops().draw(logits, torch.arange(2, device=DEVICE), state, block, none, truncates=False)
    assert block[:, 2].cpu().contiguous().view(torch.float32).isfinite().tolist() == [True, False]
