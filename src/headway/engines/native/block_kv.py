"""Keys and values on a GPU: slots that are never moved, and prompts that are kept beside them.

Rows of the scheduler are *lanes*, places in the batch. Which slot is in which lane is a list here, so that closing a
gap between rows exchanges two numbers and copies nothing. Kept prompts are copies, wherever there is room.

Copies are collected and carried out together by `settle`, in the order they were asked for. They are queued on
`stream`, as all work on this memory is: whoever asks for one need not know what has been computed yet.

Shapes: R rows of KV, one a token; K key-value heads, D head size. Token p of slot s is row `s · slot_tokens + p`.
Behind the slots is one more row, slot `slots` with a single token: lanes that nobody sits in write there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]
_AT_ONCE = 8192
"""Rows copied by one operation: its memory is bounded."""


class BlockKv:
    """Implements `KvMoves`."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        slot_tokens: int,
        kept_tokens: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slot_tokens = slot_tokens
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        own = slots * slot_tokens + 1
        self._both = torch.zeros(layers, 2, own + kept_tokens, heads, head_size, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._both]
        """Keys and values by layer, (R, K, D)."""
        self.slot_of = list(range(slots))
        """By lane."""
        self._free: Rows = np.arange(own, own + kept_tokens)
        self._kept: dict[int, Rows] = {}
        self._saves: list[tuple[Rows, Rows]] = []
        """From and to."""
        self._restores: list[tuple[Rows, Rows]] = []

    @property
    def device(self) -> torch.device:
        return self._both.device

    def on_stream(self) -> AbstractContextManager[object]:
        """What is asked of the device inside happens after everything before it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def copy(self, source: int, target: int, length: int) -> None:
        self.exchange(source, length, target, 0)

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        slots = self.slot_of
        slots[one], slots[other] = slots[other], slots[one]

    def save(self, prefix: int, row: int, length: int) -> None:
        if self._restores:
            self.settle()
        kept, self._free = self._free[:length], self._free[length:]
        self._kept[prefix] = kept
        self._saves.append((self._of(row, length), kept))

    def restore(self, prefix: int, row: int, length: int) -> None:
        if self._saves:
            self.settle()
        self._restores.append((self._kept[prefix][:length], self._of(row, length)))

    def drop(self, prefix: int) -> None:
        if self._saves:  # what is free may be saved to again: not in one copy with this
            self.settle()
        self._free = np.concatenate((self._free, self._kept.pop(prefix)))

    @torch.inference_mode()
    def settle(self) -> None:
        """Carry out what was asked for."""
        with self.on_stream():
            for moves in (self._saves, self._restores):  # never both: each settles the other first
                if moves:
                    sources = np.concatenate([source for source, _ in moves])
                    self._copy(sources, np.concatenate([target for _, target in moves]))
                    moves.clear()

    def _copy(self, sources: Rows, targets: Rows) -> None:
        for start in range(0, len(sources), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            taken = self._both[:, :, sent(sources[part], self.device)]
            self._both[:, :, sent(targets[part], self.device)] = taken

    def _of(self, lane: int, length: int) -> Rows:
        first = self.slot_of[lane] * self.slot_tokens
        return np.arange(first, first + length)


def sent(numbers: Rows, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
