"""Steps as CUDA graphs: captured once for each shape, replayed without Python.

A shape is a number of lanes from a ladder, in how many shares long slots are read, and whether anybody truncates. A
step is run once before it is captured, so that kernels are compiled and loaded outside of the capture; the caller sees
to it that such a run has no effect. All graphs share one pool of memory, as no two of them run at once; nothing may be
kept from inside a step. What a step reads and writes must outlive the graphs: their owner holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_FULL = 512
"""Programs that keep a GPU of 132 multiprocessors busy."""
_SHARE = 512
"""Tokens one program may read where there are fewer; twice as many where there are more, half where there are few."""


class DecodeShape(NamedTuple):
    """What a captured step depends on."""

    lanes: int
    splits: int
    cut: bool


def round_up_lanes(lanes: int, most: int) -> int:
    """The next size that is captured: powers of 2 to 16, then steps of an eighth or less."""
    if lanes <= 16:
        size = 1 << (lanes - 1).bit_length()
    else:
        step = max(16, 1 << max(0, (lanes - 1).bit_length() - 3))
        size = -(-lanes // step) * step
    return min(size, most)


def choose_splits(lanes: int, kv_heads: int, longest: int) -> int:
    """In how many shares slots are read: a power of 2. All wait for the longest share; adding up costs a kernel."""
    programs = lanes * kv_heads
    share = _SHARE // 2 if 8 * programs < _FULL else _SHARE if programs < _FULL else 2 * _SHARE
    return min(1 << (-(-longest // share) - 1).bit_length(), 32)


DecodeStep = Callable[[DecodeShape], None]


class DecodeGraphs:
    """The captured steps of one runner. Does not refer to it: a runner that is let go frees its memory at once."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[DecodeShape, torch.cuda.CUDAGraph] = {}

    def run(self, shape: DecodeShape, step: DecodeStep, idle: DecodeStep) -> None:
        """A step of this shape; `idle` is the same on lanes that nobody sits in."""
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._captured(shape, step, idle)
        graph.replay()

    def _captured(self, shape: DecodeShape, step: DecodeStep, idle: DecodeStep) -> torch.cuda.CUDAGraph:
        idle(shape)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads load weights or train: they must not break a capture, nor be broken by it.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            step(shape)
        finally:
            graph.capture_end()
        return graph
