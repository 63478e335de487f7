"""Decode steps as CUDA graphs: captured once for each shape, replayed without Python.

A shape is a number of lanes from a fixed series, the number of shares in which long slots are read, and whether any
sequence truncates. A step is run once before it is captured, so that kernels are compiled and loaded outside of the
capture; the caller makes sure that such a run has no effect. All graphs share one pool of memory, because no two run
at once; so no tensor made inside a step may be used after it. What a step reads and writes must outlive the graphs:
their owner holds it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from headway.models.model_checks import print_once

_BUSY_PROGRAMS = 512
"""Number of programs that keeps a GPU of 132 multiprocessors busy."""


class DecodeShape(NamedTuple):
    """What a captured step depends on."""

    lanes: int
    splits: int
    truncates: bool


def round_up_lanes(lanes: int, most: int) -> int:
    """Return the next number of lanes that is captured: powers of 2 to 16, then steps of an eighth or less.

    Between 128 and 256 they are those for which the library multiplies fastest (7B on an H200).
    """
    if lanes <= 16:
        size = 1 << (lanes - 1).bit_length()
    elif 128 < lanes <= 256:
        size = next(each for each in (144, 176, 208, 224, 256) if lanes <= each)
    else:
        step = max(16, 1 << max(0, (lanes - 1).bit_length() - 3))
        size = -(-lanes // step) * step
    return min(size, most)


def choose_shortest_share(programs: int) -> int:
    """Return the fewest tokens that a share has, where so many lanes and heads are read."""
    return 256 if programs < _BUSY_PROGRAMS else 2048


def choose_splits(lanes: int, kv_heads: int, longest: int) -> int:
    """Return in how many shares slots are read, a power of 2. All wait for the longest; summing costs a kernel."""
    programs = lanes * kv_heads
    share = choose_shortest_share(programs)
    if programs < _BUSY_PROGRAMS <= 8 * programs:
        share *= 2
    wanted = 1 << (-(-longest // share) - 1).bit_length()
    return min(wanted, max(32, min(_BUSY_PROGRAMS // 2 // programs, 128)))


DecodeStep = Callable[[DecodeShape], None]


class DecodeGraphs:
    """The captured steps of one runner. Does not refer to the runner, whose memory is freed with its last reference."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[DecodeShape, torch.cuda.CUDAGraph] = {}
        self._captures = True
        """Whether steps can be captured: some models talk to the host inside of them."""

    def run(self, shape: DecodeShape, step: DecodeStep, empty_step: DecodeStep) -> None:
        """Run a step of this shape; `empty_step` is the same on lanes without sequences."""
        if shape not in self._graphs and self._captures:
            self._try_capture(shape, step, empty_step)
        if self._captures:
            self._graphs[shape].replay()
        else:
            step(shape)

    def _try_capture(self, shape: DecodeShape, step: DecodeStep, empty_step: DecodeStep) -> None:
        """Capture a step, or run all steps as they are from now on and say so."""
        try:
            self._graphs[shape] = self._capture(shape, step, empty_step)
        except RuntimeError as error:
            if "captur" not in str(error).lower():
                raise
            self._captures = False  # the pool of memory is not valid any more, too
            torch.cuda.synchronize()
            print_once(f"decode steps run slowly, without CUDA graphs: {str(error).splitlines()[0]}")

    def _capture(self, shape: DecodeShape, step: DecodeStep, empty_step: DecodeStep) -> torch.cuda.CUDAGraph:
        empty_step(shape)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads load weights or train: they must not break a capture, nor be broken by it.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            step(shape)
        finally:
            graph.capture_end()
        return graph
