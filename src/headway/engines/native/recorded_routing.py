"""Experts of all tokens whose KV is in the cache, beside it: what moves KV moves them, and an end reports them.

Whoever shares the KV of a prefix shares its experts, so they are known for tokens that a sequence has never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.engines.engine_thread import RequestUpdate
from headway.engines.native.kv_cache import PagedKvCache
from headway.engines.native.kv_slots import KvCacheMoves, NativeSequence
from headway.engines.native.native_scheduler import NativeScheduler
from headway.models.expert_routing import Mixture, RoutingRecorder, find_mixture
from headway.types import ExpertRouting, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ReadRouting = Callable[[NativeSequence, FinishReason], ExpertRouting | None]
"""Returns the experts of a sequence's tokens that are not reported yet, when it ends in this way."""


class SlotRecorder(RoutingRecorder):
    """Records into the rows of a cache that has `slot_tokens` for each of its slots."""

    def __init__(self, mixture: Mixture, slots: int, slot_tokens: int) -> None:
        super().__init__(mixture)
        self.slot_tokens = slot_tokens
        self.store = self.make_store(slots * slot_tokens)
        self.by_slot = self.store.view(slots, slot_tokens, *self.store.shape[1:])
        """(slots, tokens of a slot, layers, experts of a token)."""
        self.first_rows = torch.arange(slots) * slot_tokens
        """Row of the first token of each slot."""

    def read(self, sequence: NativeSequence, finish: FinishReason) -> ExpertRouting | None:
        """Return the experts of a sequence that are not reported yet; its last token has not been computed."""
        if sequence.row < 0:
            return None
        last = min(sequence.cached, len(sequence.tokens) - 1)
        return self.pack(self.by_slot[sequence.row, sequence.routed : last], sequence.routed)


def make_slot_recorder(model: PreTrainedModel, slots: int, slot_tokens: int) -> SlotRecorder | None:
    """Return a recorder for a mixture, None for other models."""
    mixture = find_mixture(model)
    return None if mixture is None else SlotRecorder(mixture, slots, slot_tokens)


class RecordedKvMoves:
    """A `KvCacheMoves` that moves KV and experts together."""

    def __init__(self, moves: KvCacheMoves, recorder: SlotRecorder) -> None:
        self._moves = moves
        self._by_slot = recorder.by_slot
        self._saved: dict[int, Tensor] = {}

    def copy(self, source: int, target: int, length: int) -> None:
        self._moves.copy(source, target, length)
        self._by_slot[target, :length] = self._by_slot[source, :length]

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        self._moves.exchange(one, one_length, other, other_length)
        before = self._by_slot[other, :other_length].clone()
        self._by_slot[other, :one_length] = self._by_slot[one, :one_length]
        self._by_slot[one, :other_length] = before

    def save(self, prefix: int, row: int, length: int) -> None:
        self._moves.save(prefix, row, length)
        self._saved[prefix] = self._by_slot[row, :length].clone()

    def restore(self, prefix: int, row: int, length: int) -> None:
        self._moves.restore(prefix, row, length)
        self._by_slot[row, :length] = self._saved[prefix][:length]

    def drop(self, prefix: int) -> None:
        self._moves.drop(prefix)
        del self._saved[prefix]


class PageRecorder(RoutingRecorder):
    """Records into the rows of a cache of pages, on its device."""

    def __init__(self, mixture: Mixture, kv: PagedKvCache) -> None:
        super().__init__(mixture)
        self._kv = kv
        self.store = self.make_store(kv.pages * kv.page_tokens, kv.device)
        self.by_page = self.store.view(kv.pages, kv.page_tokens, *self.store.shape[1:])
        """(pages, tokens of a page, layers, experts of a token)."""
        self._side = torch.cuda.Stream(kv.device) if kv.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def read(self, sequence: NativeSequence, finish: FinishReason) -> ExpertRouting | None:
        """Return the experts of a sequence that are not reported yet.

        Blocks that were read have written them, so an end does not wait for the block in flight; an abort does.
        """
        last = min(sequence.cached, len(sequence.tokens) - 1)
        if sequence.row < 0 or last <= sequence.routed:
            return None
        if self._side is not None and self._kv.stream is not None and finish is FinishReason.ABORTED:
            self._side.wait_stream(self._kv.stream)
        rows = torch.from_numpy(self._kv.list_rows(sequence.row, sequence.routed, last))
        with nullcontext() if self._side is None else torch.cuda.stream(self._side), torch.inference_mode():
            return self.pack(self.store[rows.to(self._kv.device)], sequence.routed) if self.store is not None else None


def make_page_recorder(model: PreTrainedModel, kv: PagedKvCache) -> PageRecorder | None:
    """Return a recorder for a mixture, None for other models."""
    mixture = find_mixture(model)
    return None if mixture is None else PageRecorder(mixture, kv)


class RecordedPageMoves:
    """A `PageMoves` that moves KV and experts together."""

    def __init__(self, kv: PagedKvCache, recorder: PageRecorder) -> None:
        self.page_tokens, self.pages, self.host_pages = kv.page_tokens, kv.pages, kv.host_pages
        self._kv = kv
        self._by_page = recorder.by_page

    def write_table(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._kv.write_table(slot, first, pages)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self._kv.copy_page(source, target)
        with self._kv.on_stream():
            self._by_page[target].copy_(self._by_page[source])

    @torch.inference_mode()
    def save(self, pages: Sequence[int]) -> Any:
        saved = self._kv.save(pages)
        with self._kv.on_stream():
            return saved, self._by_page[torch.tensor(pages, device=self._kv.device)]

    @torch.inference_mode()
    def restore(self, saved: Any, pages: Sequence[int]) -> None:
        self._kv.restore(saved[0], pages)
        with self._kv.on_stream():
            self._by_page[torch.tensor(pages, device=self._kv.device)] = saved[1]


class RoutingScheduler(NativeScheduler):
    """A scheduler that reports the experts of a sequence with its end."""

    read_routing: ReadRouting

    def _end(self, sequence: NativeSequence, finish: FinishReason) -> RequestUpdate:
        routing = self.read_routing(sequence, finish)
        return replace(super()._end(sequence, finish), routing=routing)
