"""Copies of optimizer state between host and device that run beside the computation.

`load` and `store` only queue copies. A store waits for what was computed before it, and at most three chunks are on the
device: one that arrives, one that is computed, one that leaves. On a CPU everything happens at once.

`StateBackup` keeps what several optimizer steps change as it was before the first of them. It takes no memory of the
device, and its copies run beside the computation of the first gradients.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors of one piece of a parameter by their names."""

_BLOCK_BYTES = 2**30
"""Host memory that is locked at once: torch rounds up to powers of two, which would waste much on single tensors."""


class HostCopies:
    """The copies of one optimizer step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream if device.type == "cuda" else lambda device: None
        self._arriving, self._leaving = make_stream(device), make_stream(device)
        self._stored: Any = None
        """Event after the last store."""

    def load(self, states: Sequence[State]) -> list[State]:
        """Begin to copy `states` to the device."""
        if self._stored is not None:
            self._stored.synchronize()  # else chunks that wait to leave would pile up
        with nullcontext() if self._arriving is None else torch.cuda.stream(self._arriving):
            return [
                {name: tensor.to(self._device, non_blocking=True, copy=True) for name, tensor in state.items()}
                for state in states
            ]

    def wait_for(self, states: list[State]) -> list[State]:
        """Let the computation wait until `states` have arrived, and return them."""
        if self._arriving is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._arriving)
            _record_use(states, stream)
        return states

    def store(self, states: Sequence[State], places: Sequence[State]) -> None:
        """Begin to copy `states` into `places` on the host, after what has been computed so far."""
        if self._leaving is not None:
            self._leaving.wait_stream(torch.cuda.current_stream(self._device))
            _record_use(states, self._leaving)
        with nullcontext() if self._leaving is None else torch.cuda.stream(self._leaving):
            for state, place in zip(states, places, strict=True):
                for name, tensor in state.items():
                    place[name].copy_(tensor, non_blocking=True)
        if self._leaving is not None:
            self._stored = self._leaving.record_event()

    def finish(self) -> None:
        """Wait until everything is on the host."""
        if self._leaving is not None:
            self._leaving.synchronize()


def _record_use(states: Sequence[State], stream: Any) -> None:
    """Keep the memory of tensors from being used again before `stream` is done with them."""
    for state in states:
        for tensor in state.values():
            if tensor.is_cuda:
                tensor.record_stream(stream)


class StateBackup:
    """A copy in host memory of tensors that have the same names and shapes every time."""

    def __init__(self, tensors: State) -> None:
        device = next((one.device for one in tensors.values() if one.is_cuda), torch.device("cpu"))
        self._places = _make_places(tensors, locked=device.type == "cuda")
        self._copies = HostCopies(device)

    def begin(self, tensors: State) -> None:
        """Begin to copy `tensors`, which must not change before `finish`."""
        self.finish()  # else a copy that nobody waited for could be late
        self._copies.store([tensors], [self._places])

    def finish(self) -> None:
        """Wait until the copy is complete."""
        self._copies.finish()

    @torch.no_grad()
    def restore(self, tensors: State) -> None:
        """Give `tensors` the values of the copy."""
        self.finish()
        for name, tensor in tensors.items():
            tensor.copy_(self._places[name])


def _make_places(tensors: State, *, locked: bool) -> State:
    """Return host tensors of the same kinds and shapes, many to a block of memory."""
    places: State = {}
    left, block, used = sum(map(_aligned_bytes, tensors.values())), torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in tensors.items():
        size = _aligned_bytes(tensor)
        if used + size > block.numel():
            block, used = torch.empty(max(min(left, _BLOCK_BYTES), size), dtype=torch.uint8, pin_memory=locked), 0
        places[name] = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        used, left = used + size, left - size
    return places


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64
