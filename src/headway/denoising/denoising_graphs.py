"""Forward passes of fixed sizes, captured once as CUDA graphs and replayed without Python.

A step of a denoiser is hundreds of small kernels. Launched one by one, they take longer than they run, and the thread
that launches them holds the interpreter. So batches are padded to a few sizes, on buffers that stay in place, and each
size is captured when it is first needed. The content of padding rows does not matter: a row's velocity depends on that
row alone. The next call overwrites the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.denoising.models.denoiser import Conditioning
from headway.engines.native.decode_graphs import round_up_lanes

ForwardPass = Callable[[], Tensor]
ForwardCapture = Callable[[ForwardPass], ForwardPass]
"""Turns a forward pass into a faster one with the same result."""


class FixedSizeModel:
    """Replaces a model for batches of at most `max_rows` rows."""

    def __init__(self, model: Any, capture: ForwardCapture, *, max_rows: int) -> None:
        self._model, self._capture, self._max_rows = model, capture, max_rows
        self._sizes: dict[int, tuple[Tensor, Tensor, Conditioning, ForwardPass]] = {}

    def __call__(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        rows, size = len(x), round_up_lanes(len(x), self._max_rows)
        if size not in self._sizes:
            self._sizes[size] = self._prepare(size, x, s, conditioning)
        x_buffer, s_buffer, conditioning_buffer, forward = self._sizes[size]
        x_buffer[:rows].copy_(x)
        s_buffer[:rows].copy_(s)
        for name, tensor in conditioning.tensors.items():
            conditioning_buffer[name][:rows].copy_(tensor)
        return forward()[:rows]

    def _prepare(
        self, size: int, x: Tensor, s: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor, Conditioning, ForwardPass]:
        """Allocate buffers of one size, filled with valid rows, and capture the forward pass on them."""
        x_buffer, s_buffer = _repeat_first_row(x, size), _repeat_first_row(s, size)
        tensors = {name: _repeat_first_row(tensor, size) for name, tensor in conditioning.tensors.items()}
        buffer = Conditioning(tensors)
        return x_buffer, s_buffer, buffer, self._capture(lambda: self._model(x_buffer, s_buffer, buffer))


def _repeat_first_row(rows: Tensor, size: int) -> Tensor:
    return rows[:1].expand(size, *rows.shape[1:]).contiguous()


def make_cuda_graph_capture(device: torch.device) -> ForwardCapture:
    """Return a capture as CUDA graphs. They share one memory pool, so no two of them may run at once."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def capture(forward: ForwardPass) -> ForwardPass:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are chosen and loaded outside of the capture
                forward()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads load weights or train: they must not break a capture, nor be broken by it.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = forward()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
