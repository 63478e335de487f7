"""Keys and values of all slots, allocated once.

Shapes: S slots, K key-value heads, L tokens of a slot, D head size, N layers. Rows are contiguous, so rows from 0 to
the batch size are one view. Memory of the operating system is taken when a row is first written, not before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import ConfigError


class RowKvCache:
    """Implements `KvMoves`."""

    def __init__(
        self, *, layers: int, slots: int, heads: int, slot_tokens: int, head_size: int, dtype: torch.dtype
    ) -> None:
        # Zeros, not garbage: what a mask hides is multiplied by 0, and 0 · NaN is NaN. Costs nothing until written.
        self._both = torch.zeros(layers, 2, slots, heads, slot_tokens, head_size, dtype=dtype)
        self.keys: tuple[Tensor, ...] = tuple(layer[0] for layer in self._both)
        """By layer, (S, K, L, D)."""
        self.values: tuple[Tensor, ...] = tuple(layer[1] for layer in self._both)
        self._kept: dict[int, Tensor] = {}

    def copy(self, source: int, target: int, length: int) -> None:
        self._both[:, :, target, :, :length] = self._both[:, :, source, :, :length]

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        held = self._both[:, :, other, :, :other_length].clone() if other_length else None
        self.copy(one, other, one_length)
        if held is not None:
            self._both[:, :, one, :, :other_length] = held

    def save(self, prefix: int, row: int, length: int) -> None:
        self._kept[prefix] = self._both[:, :, row, :, :length].clone()

    def restore(self, prefix: int, row: int, length: int) -> None:
        self._both[:, :, row, :, :length] = self._kept[prefix][..., :length, :]

    def drop(self, prefix: int) -> None:
        del self._kept[prefix]


def make_kv_cache(config: object, *, slots: int, slot_tokens: int, dtype: torch.dtype) -> RowKvCache:
    """The memory that a model's configuration asks for."""
    return RowKvCache(**read_kv_shape(config, slot_tokens), slots=slots, slot_tokens=slot_tokens, dtype=dtype)


def read_kv_shape(config: object, slot_tokens: int) -> dict[str, int]:
    """Layers, key-value heads and head size of a model that knows as many positions as a slot has."""
    heads = _number(config, "num_attention_heads")
    head_size = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and slot_tokens > limit:
        raise ConfigError(f"the model knows {limit} positions", key="slot_tokens", value=slot_tokens)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"layers": _number(config, "num_hidden_layers"), "heads": kv_heads, "head_size": head_size}


def _number(config: object, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError("the native engine needs it", key=f"model.{name}", value=value)
    return value


KvRows = NDArray[np.int64]
_AT_ONCE = 8192
"""Rows copied by one operation: its memory is bounded."""


class LaneKvCache:
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
        self._free: KvRows = np.arange(own, own + kept_tokens)
        self._kept: dict[int, KvRows] = {}
        self._saves: list[tuple[KvRows, KvRows]] = []
        """From and to."""
        self._restores: list[tuple[KvRows, KvRows]] = []

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

    def _copy(self, sources: KvRows, targets: KvRows) -> None:
        for start in range(0, len(sources), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            taken = self._both[:, :, copy_to_device(sources[part], self.device)]
            self._both[:, :, copy_to_device(targets[part], self.device)] = taken

    def _of(self, lane: int, length: int) -> KvRows:
        first = self.slot_of[lane] * self.slot_tokens
        return np.arange(first, first + length)


def copy_to_device(numbers: KvRows, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
