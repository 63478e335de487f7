"""Keys and values of all sequences, allocated once: in rows on a CPU, in pages on a GPU.

Shapes: S slots, K key-value heads, L tokens of a slot, D head size, R rows of KV on a GPU, one for each token: token p
of slot s is row `tables[s, p // page_tokens] · page_tokens + p % page_tokens`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engines.native.quantized_products import FP8
from headway.errors import ConfigError

KvRows = NDArray[np.int64]
_PAGE_ROWS_PER_COPY = 2048
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
    if latent := getattr(config, "qk_nope_head_dim", None):  # keys with a part that is not rotated; values are smaller
        head_size = latent + _read_number(config, "qk_rope_head_dim")
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


class PagedKvCache:
    """A cache on a GPU. Implements `PageMoves`; the tables of pages are on the host and, for kernels, on the device.

    Copies and changes of tables are collected and carried out together by `settle`, in the order they were asked for.
    They are queued on `stream`, like all work on this memory, so that the caller need not know what is computed yet.
    Behind the slots the tables have one more row, of page 0: lanes without a sequence write there.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        slots: int,
        slot_tokens: int,
        page_tokens: int,
        pages: int,
        host_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens, self.pages, self.host_pages = page_tokens, pages, host_pages
        # No priority over a trainer on the same card: its products, cut short at any time, would lose more than is won.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        stored = torch.uint8 if dtype == FP8 else dtype  # what is moved; few operations know 8-bit fractions
        self._keys_values = torch.zeros(layers, 2, pages * page_tokens, heads, head_size, dtype=stored, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (layer[0].view(dtype), layer[1].view(dtype)) for layer in self._keys_values
        ]
        """Keys and values by layer, (R, K, D)."""
        self._host_tables = np.zeros((slots + 1, -(-slot_tokens // page_tokens)), dtype=np.int32)
        self.tables = torch.zeros(self._host_tables.shape, dtype=torch.int32, device=device)
        """Pages of each slot, (S + 1, most pages of a slot)."""
        self._copies: list[tuple[int, int]] = []
        self._written: list[KvRows] = []
        """Places in the tables that have changed on the host."""

    @property
    def device(self) -> torch.device:
        return self._keys_values.device

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued behind all work on this cache."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def write_table(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._host_tables[slot, first : first + len(pages)] = pages
        start = slot * self._host_tables.shape[1] + first
        self._written.append(np.arange(start, start + len(pages)))

    def copy_page(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    @torch.inference_mode()
    def save(self, pages: Sequence[int]) -> list[Tensor]:
        self.settle()
        with self.on_stream():
            return [self._copy_to_host(self._keys_values[:, :, rows]) for rows in self._split_rows(pages)]

    @torch.inference_mode()
    def restore(self, saved: list[Tensor], pages: Sequence[int]) -> None:
        self.settle()
        with self.on_stream():
            for rows, part in zip(self._split_rows(pages), saved, strict=True):
                self._keys_values[:, :, rows] = part.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def settle(self) -> None:
        """Carry out the copies and the changes of tables that were asked for."""
        with self.on_stream():
            if self._written:
                places = np.unique(np.concatenate(self._written))
                values = copy_to_device(self._host_tables.reshape(-1)[places], self.device)
                self.tables.view(-1).index_copy_(0, copy_to_device(places, self.device), values)
                self._written.clear()
            if self._copies:
                sources, targets = zip(*self._copies, strict=True)
                for source, target in zip(self._split_rows(sources), self._split_rows(targets), strict=True):
                    self._keys_values[:, :, target] = self._keys_values[:, :, source]
                self._copies.clear()

    def list_rows(self, slot: int, first: int, last: int) -> KvRows:
        """Return the rows of the tokens `first` to `last` of a slot."""
        at = np.arange(first, last)
        rows: KvRows = self._host_tables[slot, at // self.page_tokens].astype(np.int64) * self.page_tokens
        return rows + at % self.page_tokens

    def _split_rows(self, pages: Sequence[int]) -> list[Tensor]:
        """Return the rows of whole pages, as many at a time as are copied together."""
        rows = (np.array(pages)[:, None] * self.page_tokens + np.arange(self.page_tokens)).reshape(-1)
        step = max(1, _PAGE_ROWS_PER_COPY // self.page_tokens) * self.page_tokens
        return [copy_to_device(rows[start : start + step], self.device) for start in range(0, len(rows), step)]

    def _copy_to_host(self, part: Tensor) -> Tensor:
        if self.stream is None:
            return part.clone()
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def copy_to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    on_host = torch.from_numpy(np.ascontiguousarray(numbers))
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
