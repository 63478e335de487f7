"""Mixed into the workers of a vLLM that an engine runs in its own process: loads versions from shared memory.

The tensors that a worker is given are views of the segment in which they were verified; vLLM copies what it needs of
them, of each its own part where workers share a model. Imports vLLM nowhere.
"""

from __future__ import annotations

from typing import Any

from headway.engines.servers.beside_vllm.headway_worker import Loading as FromDisk
from headway.weights.base import TensorEntry
from headway.weights.segment import Segment


class Loading(FromDisk):
    """Its methods are called by name."""

    def headway_take(self: Any, segment: str, tensors: list[tuple[str, list[int], str]]) -> None:
        """A whole version: `tensors` lie in `segment` one after the other, each a name, a shape and a type."""
        from headway.weights.flat import layout_of, unpack

        entries = [TensorEntry(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in tensors]
        room = Segment.attach(segment)
        try:
            weights = unpack(room.buffer, layout_of(entries)[0])
            self.reload_weights(weights_iterator=iter(weights.items()))
            self.headway_pack()
        finally:
            room.close()
