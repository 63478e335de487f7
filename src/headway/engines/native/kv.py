"""Keys and values of all slots, allocated once.

Shapes: S slots, K key-value heads, L tokens of a slot, D head size, N layers. Rows are contiguous, so rows from 0 to
the batch size are one view. Memory of the operating system is taken when a row is first written, not before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ConfigError


class KvMemory:
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


def kv_memory(config: object, *, slots: int, slot_tokens: int, dtype: torch.dtype) -> KvMemory:
    """The memory that a model's configuration asks for."""
    return KvMemory(**kv_shape(config, slot_tokens), slots=slots, slot_tokens=slot_tokens, dtype=dtype)


def kv_shape(config: object, slot_tokens: int) -> dict[str, int]:
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
