"""Forward passes of fixed sizes: captured once on a GPU, replayed without Python.

A denoiser's step is hundreds of small kernels; launched one by one they take longer than they run, and the thread that
launches them keeps the interpreter from others. So batches are filled up to the sizes of a ladder, on buffers that stay
where they are, and each size is captured the first time it is needed. What stands in rows that nobody sits in does not
matter: a row's velocity depends on that row alone. The result is overwritten by the next call.
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
"""From a step to something that does the same, faster."""


class FixedSizeModel:
    """Stands where a model stands. At most `most` rows."""

    def __init__(self, model: Any, capture: ForwardCapture, *, most: int) -> None:
        self._model, self._capture, self._most = model, capture, most
        self._sizes: dict[int, tuple[Tensor, Tensor, Conditioning, ForwardPass]] = {}

    def __call__(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        rows, size = len(x), round_up_lanes(len(x), self._most)
        if size not in self._sizes:
            self._sizes[size] = self._prepared(size, x, s, conditioning)
        x_held, s_held, held, step = self._sizes[size]
        x_held[:rows].copy_(x)
        s_held[:rows].copy_(s)
        for name, tensor in conditioning.tensors.items():
            held[name][:rows].copy_(tensor)
        return step()[:rows]

    def _prepared(
        self, size: int, x: Tensor, s: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor, Conditioning, ForwardPass]:
        """Buffers of a size, and the step on them. They begin with something that the model has seen: its first row."""
        x_held, s_held = _filled(x, size), _filled(s, size)
        held = Conditioning({name: _filled(tensor, size) for name, tensor in conditioning.tensors.items()})
        return x_held, s_held, held, self._capture(lambda: self._model(x_held, s_held, held))


def _filled(rows: Tensor, size: int) -> Tensor:
    return rows[:1].expand(size, *rows.shape[1:]).contiguous()


def make_cuda_graph_capture(device: torch.device) -> ForwardCapture:
    """Captures as CUDA graphs, which share their memory: no two of them run at once."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def captured(step: ForwardPass) -> ForwardPass:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are chosen and loaded outside of the capture
                step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads load weights or train: they must not break a capture, nor be broken by it.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

        def replayed() -> Tensor:
            graph.replay()
            return made

        return replayed

    return captured
