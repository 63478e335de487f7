"""Attention of one layer of the native engine on a GPU: the part `attention` of `engine_gpu.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from headway.engines.native.block_ops import HeadShape, PageTable, PrefillBatch
from headway.engines.native.decode_graphs import choose_splits

BANDWIDTH = 4.3e12
"""Bytes a second that a copy moves on an H200."""


def time_events(work: Callable[[], object], times: int, warm: int = 3) -> float:
    """Milliseconds for each."""
    for _ in range(warm):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(times):
        work()
    marks[1].record()
    marks[1].synchronize()
    return float(marks[0].elapsed_time(marks[1]) / times)


async def measure_attention(model: PreTrainedModel, name: str) -> None:
    """One layer's attention alone, captured in a graph."""
    from headway.engines.native.triton_ops import TritonBlockOps

    config, ops = model.config, TritonBlockOps()
    size = config.hidden_size // config.num_attention_heads
    heads = HeadShape(config.num_attention_heads, config.num_key_value_heads, size, size**-0.5)
    print(f"\n## {name}: decode attention of one layer, µs and share of the floor of bytes")
    for lanes, length in ((512, 320), (64, 320), (8, 4000), (1, 32000), (4, 32000), (16, 32000), (64, 8000)):
        splits = choose_splits(lanes, heads.kv, length)
        least = lanes * length * 2 * heads.kv * size * 2 / BANDWIDTH * 1e6
        times = {page: _time_decode(ops, heads, lanes, length, page, splits) for page in (16, 32, 64, 128)}
        line = ", ".join(f"{page}: {took:.1f} ({least / took:.0%})" for page, took in times.items())
        print(f"{lanes:4} lanes of {length:6}, {splits:3} splits: {line}", flush=True)
    print(f"## {name}: prefill attention of one layer, a chunk behind a context, TFLOP/s")
    for count, context in ((8192, 8192), (8192, 32768), (2048, 32768)):
        print(f"{count} of {context}: {_time_prefill(ops, heads, count, context)}", flush=True)


def _time_decode(ops: Any, heads: HeadShape, lanes: int, length: int, page: int, splits: int) -> float:
    """Microseconds; several sets of KV in turn, so that no cache holds them."""
    width = -(-length // page)
    sets = max(1, min(4, 2**32 // (lanes * length * heads.kv * heads.size * 4)))
    shape = ((lanes * width + 1) * page, heads.kv, heads.size)
    kv = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(sets)]
    table = PageTable((torch.randperm(lanes * width, device="cuda") + 1).view(lanes, width).int(), page)
    q = torch.randn(lanes, heads.query, heads.size, device="cuda", dtype=torch.bfloat16)
    at, order = torch.full((lanes,), length - 1, device="cuda"), torch.arange(lanes, device="cuda")
    ops.decode(q, kv[0], heads, table, order, at, splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(12):
            ops.decode(q, kv[number % sets], heads, table, order, at, splits)
    return time_events(graph.replay, 10) / 12 * 1e3


def _time_prefill(ops: Any, heads: HeadShape, count: int, context: int) -> str:
    from headway.engines.native.triton_attention import prefill_pages

    pages, start = context // 64, context - count
    kv = tuple(torch.randn(context + 64, heads.kv, heads.size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = PageTable((torch.randperm(pages, device="cuda") + 1).view(1, -1).int(), 64)
    q = torch.randn(count, heads.query, heads.size, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(context, device="cuda")
    rows = table.tables[0, at // 64].long() * 64 + at % 64
    ends = [torch.tensor([0, last], device="cuda", dtype=torch.int32) for last in (count, context)]
    tiles = torch.tensor([(first, 64, 0, start + first) for first in range(0, count, 64)], device="cuda")
    batch = PrefillBatch(tiles, rows, *ends, count, context, 1)
    keys, values = (part[rows].transpose(0, 1)[None] for part in kv)
    work = {
        "engine": lambda: ops.prefill(q, kv, heads, table, batch),
        "pages": lambda: prefill_pages(q, kv, heads, table, tiles),
    }
    if count == context:
        wide = q.transpose(0, 1)[None]
        work["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            wide, keys, values, is_causal=True, enable_gqa=True
        )
    flops = 4 * heads.query * heads.size * (count * start + count * (count + 1) / 2)
    return ", ".join(f"{title} {flops / time_events(each, 10) / 1e9:.0f}" for title, each in work.items())
