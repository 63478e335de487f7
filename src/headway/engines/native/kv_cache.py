"""Keys and values of all slots, allocated once: in rows on a CPU, in lanes on a GPU. Both implement `KvCacheMoves`.

Shapes: S slots, K key-value heads, L tokens of a slot, D head size, R rows of KV on a GPU, one for each token: token p
of slot s is row `s · slot_tokens + p`.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import ConfigError

KvRows = NDArray[np.int64]
_ROWS_PER_COPY = 8192
"""Rows copied by one operation, to bound its memory."""


class RowKvCache:
    """A cache on the CPU. Rows are contiguous, so rows from 0 to the batch size are one view.

    The operating system gives memory to a row when it is first written, not before.
    """

    def __init__(
        self, *, layers: int, slots: int, heads: int, slot_tokens: int, head_size: int, dtype: torch.dtype
    ) -> None:
        # Zeros, not garbage: what a mask hides is multiplied by 0, and 0 · NaN is NaN. Costs nothing until written.
        self._keys_values = torch.zeros(layers, 2, slots, heads, slot_tokens, head_size, dtype=dtype)
        self.keys: tuple[Tensor, ...] = tuple(layer[0] for layer in self._keys_values)
        """Keys of each layer, (S, K, L, D)."""
        self.values: tuple[Tensor, ...] = tuple(layer[1] for layer in self._keys_values)
        self._saved: dict[int, Tensor] = {}

    def copy(self, source: int, target: int, length: int) -> None:
        self._keys_values[:, :, target, :, :length] = self._keys_values[:, :, source, :, :length]

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        before = self._keys_values[:, :, other, :, :other_length].clone() if other_length else None
        self.copy(one, other, one_length)
        if before is not None:
            self._keys_values[:, :, one, :, :other_length] = before

    def save(self, prefix: int, row: int, length: int) -> None:
        self._saved[prefix] = self._keys_values[:, :, row, :, :length].clone()

    def restore(self, prefix: int, row: int, length: int) -> None:
        self._keys_values[:, :, row, :, :length] = self._saved[prefix][..., :length, :]

    def drop(self, prefix: int) -> None:
        del self._saved[prefix]


def read_kv_shape(config: object, slot_tokens: int) -> dict[str, int]:
    """Return layers, key-value heads and head size of a model that knows as many positions as a slot has."""
    heads = _read_number(config, "num_attention_heads")
    head_size = getattr(config, "head_dim", None) or _read_number(config, "hidden_size") // heads
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and slot_tokens > limit:
        raise ConfigError(f"the model knows {limit} positions", key="slot_tokens", value=slot_tokens)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"layers": _read_number(config, "num_hidden_layers"), "heads": kv_heads, "head_size": head_size}


def _read_number(config: object, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError("the native engine needs it", key=f"model.{name}", value=value)
    return value


class LaneKvCache:
    """A cache on a GPU: slots are never moved, and saved prefixes lie behind them.

    Rows of the scheduler are *lanes*, places in the batch. Which slot is in which lane is a list here, so that closing
    a gap between lanes swaps two numbers and copies nothing. Saved prefixes are copies, wherever there is room.

    Copies are collected and carried out together by `settle`, in the order they were asked for. They are queued on
    `stream`, like all work on this memory, so that the caller need not know what is computed yet. Behind the slots is
    one more row, slot `slots` with a single token: lanes without a sequence write there.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        slot_tokens: int,
        prefix_cache_tokens: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slot_tokens = slot_tokens
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        slot_rows = slots * slot_tokens + 1
        self._keys_values = torch.zeros(
            layers, 2, slot_rows + prefix_cache_tokens, heads, head_size, dtype=dtype, device=device
        )
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._keys_values]
        """Keys and values by layer, (R, K, D)."""
        self.slot_of = list(range(slots))
        """The slot of each lane."""
        self._free: KvRows = np.arange(slot_rows, slot_rows + prefix_cache_tokens)
        self._saved: dict[int, KvRows] = {}
        self._saves: list[tuple[KvRows, KvRows]] = []
        """Sources and targets of copies that were asked for."""
        self._restores: list[tuple[KvRows, KvRows]] = []

    @property
    def device(self) -> torch.device:
        return self._keys_values.device

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued behind all work on this cache."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def copy(self, source: int, target: int, length: int) -> None:
        self.exchange(source, length, target, 0)

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        slots = self.slot_of
        slots[one], slots[other] = slots[other], slots[one]

    def save(self, prefix: int, row: int, length: int) -> None:
        if self._restores:
            self.settle()
        saved, self._free = self._free[:length], self._free[length:]
        self._saved[prefix] = saved
        self._saves.append((self._list_rows(row, length), saved))

    def restore(self, prefix: int, row: int, length: int) -> None:
        if self._saves:
            self.settle()
        self._restores.append((self._saved[prefix][:length], self._list_rows(row, length)))

    def drop(self, prefix: int) -> None:
        if self._saves:  # free rows may be saved to again, which must not happen in one copy with this
            self.settle()
        self._free = np.concatenate((self._free, self._saved.pop(prefix)))

    @torch.inference_mode()
    def settle(self) -> None:
        """Carry out the copies that were asked for."""
        with self.on_stream():
            for moves in (self._saves, self._restores):  # never both: each settles the other first
                if moves:
                    sources = np.concatenate([source for source, _ in moves])
                    self._copy_rows(sources, np.concatenate([target for _, target in moves]))
                    moves.clear()

    def _copy_rows(self, sources: KvRows, targets: KvRows) -> None:
        for start in range(0, len(sources), _ROWS_PER_COPY):
            part = slice(start, start + _ROWS_PER_COPY)
            taken = self._keys_values[:, :, copy_to_device(sources[part], self.device)]
            self._keys_values[:, :, copy_to_device(targets[part], self.device)] = taken

    def _list_rows(self, lane: int, length: int) -> KvRows:
        first = self.slot_of[lane] * self.slot_tokens
        return np.arange(first, first + length)


def copy_to_device(numbers: KvRows, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    on_host = torch.from_numpy(np.ascontiguousarray(numbers))
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
