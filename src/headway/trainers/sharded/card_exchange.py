"""Memory of a card that all ranks on it can read, through which they gather weights and reduce gradients.

Each rank has two buffers, which the others open by CUDA IPC. A rank copies what it sends into one of them, waits until
all have done so, and reads those of the others. The next call uses the other buffer: a rank that comes to it has read
all of the call before, so that a call waits only once. What is larger than a buffer goes in parts.

Guarantees: what ranks have sent arrives unchanged, and is added in their order. Those who wait for a rank notice if it
is lost. Only `ShareableMemory` uses CUDA; shared memory of the host will do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.codec import decode, encode
from headway.errors import TransferError
from headway.weights.device_memory import ShareableMemory

_BUFFER_BYTES = 64 << 20
_HANDLE_BYTES = 4096
"""Room for the handles of a rank's buffers, as bytes."""


class CardExchange:
    """The buffers of all ranks of `group`. Ranks make it at the same time, and call it in the same order."""

    def __init__(self, memory: ShareableMemory, group: Any, size: int = _BUFFER_BYTES) -> None:
        self._memory, self._group, self._size = memory, group, size
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        own = [memory.empty(size) for _ in range(2)]
        words = encode([memory.export(buffer) for buffer in own]).ljust(_HANDLE_BYTES, b"\0")
        told = torch.empty(self._ranks, _HANDLE_BYTES, dtype=torch.uint8)
        dist.all_gather_into_tensor(told.view(-1), torch.frombuffer(bytearray(words), dtype=torch.uint8), group=group)
        self._buffers = [own if rank == self._rank else self._open_buffers(told[rank]) for rank in range(self._ranks)]
        self.is_open = self._wait(int(all(self._buffers))) == self._ranks
        """Whether every rank can read the buffers of all."""
        self._turn = 0

    def all_gather(self, output: Tensor, found: Tensor) -> None:
        """Fill `output` with what all ranks have passed, in their order."""
        rows, flat = output.view(self._ranks, -1), found.reshape(-1)
        step = self._size // flat.element_size()
        for start in range(0, flat.numel(), step):
            for rank, part in enumerate(self._share(flat[start : start + step])):
                rows[rank, start : start + step].copy_(part)

    def reduce_scatter(self, output: Tensor, found: Tensor) -> None:
        """Fill `output` with the sum over all ranks of this rank's part of what they have passed."""
        rows, flat = found.view(self._ranks, -1), output.view(-1)
        step = self._size // self._ranks // flat.element_size()
        for start in range(0, flat.numel(), step):
            parts = self._share(rows[:, start : start + step])
            torch.sum(torch.stack([part[self._rank] for part in parts]), 0, out=flat[start : start + step])

    def _share(self, data: Tensor) -> list[Tensor]:
        """Return what each rank has passed; it stays there until the call after the next one begins."""
        here = [pair[self._turn][: data.nbytes].view(data.dtype).view(data.shape) for pair in self._buffers]
        self._turn = 1 - self._turn
        here[self._rank].copy_(data)
        self._memory.synchronize()  # also what was read in the call before
        self._wait()
        return here

    def _wait(self, number: int = 0) -> int:
        """Wait until all ranks have come here. Return the sum of their numbers."""
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, group=self._group)
        return int(numbers)

    def _open_buffers(self, words: Tensor) -> list[Tensor]:
        """Return the buffers of another rank; none if this process cannot read them."""
        try:
            return [self._memory.open(handle) for handle in decode(words.numpy().tobytes())]
        except TransferError:
            return []
