"""Sequences that decode together on a GPU, and the pages that their KV lives in.

A sequence is admitted when there are pages for what it has and for the next block of steps, beside one page for every
sequence that runs. It takes more pages as it grows. When there are none, prefixes that nobody uses are given up, then
the youngest sequence is preempted: its KV waits in host memory and comes back bit by bit the same, or is computed again
where host memory is short. The oldest sequence is never preempted, so all of them come to their end.

A *slot* is a sequence's row of the block tables, a *lane* its place in the batch. Knows no tensor: `PageMoves` carries
out what is decided here, in the order in which it was asked for and behind all that was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.engines.native.kv_pages import PagePool, PrefixTree
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.settings import NativeSettings


class PageMoves(Protocol):
    """What has to be done to the memory of the pages."""

    page_tokens: int
    pages: int
    host_pages: int
    """Pages that may wait in host memory."""

    def write_table(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Say which pages a slot has, from its page number `first` on."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page to another."""

    def save(self, pages: Sequence[int]) -> Any:
        """Return a copy of these pages in host memory."""

    def restore(self, saved: Any, pages: Sequence[int]) -> None:
        """Put a saved copy back into these pages."""


class PagedSlots:
    """The sequences of one replica that hold pages. Those that decode are `ready`, by lane."""

    def __init__(self, settings: NativeSettings, moves: PageMoves, *, held_back_tokens: int) -> None:
        self._moves = moves
        self._page_tokens = moves.page_tokens
        self._steps, self._held_back_tokens = settings.steps_per_sync, held_back_tokens
        self.pool = PagePool(moves.pages)
        self._tree = PrefixTree(self.pool, moves.page_tokens)
        self.ready: list[NativeSequence] = []
        self.changes = 0
        """Number of changes of `ready`: what was derived from it is valid while this stays the same."""
        self._lanes: dict[int, int] = {}
        """Lane of each ready sequence, by its number."""
        self._running: dict[int, NativeSequence] = {}
        """All that hold pages, by slot."""
        self._free_slots = list(range(settings.slots - 1, -1, -1))
        self._ready_slots, self._ready_changes = np.empty(0, dtype=np.int64), 0
        self._lengths = np.zeros(settings.slots, dtype=np.int64)
        """Tokens that a slot may have after all blocks that are planned."""
        self._limits = np.zeros(settings.slots, dtype=np.int64)
        self._room = np.zeros(settings.slots, dtype=np.int64)
        """Tokens that fit into the pages of a slot."""
        self._leaders: dict[bytes, NativeSequence] = {}
        """The sequence that prefills a prompt for the others, by prompt."""
        self._stays = count()
        self._era = 0
        """How often the weights have changed."""
        self.saved_pages = 0
        """Pages that wait in host memory."""
        self.reused_tokens = 0
        """Tokens that were not computed because pages held them."""
        self.preemptions = 0

    def is_being_prefilled(self, sequence: NativeSequence) -> bool:
        """Return whether a sibling prefills this prompt right now, so that waiting is cheaper than doing it again."""
        return sequence.prefix is not None and sequence.prefix in self._leaders and sequence.saved is None

    def is_leader(self, sequence: NativeSequence) -> bool:
        """Return whether a sequence prefills a prompt that others wait for."""
        return sequence.prefix is not None and self._leaders.get(sequence.prefix) is sequence

    def admit(self, sequence: NativeSequence) -> bool:
        """Give a slot and pages to a sequence that is to prefill; returns whether there were enough."""
        if not self._free_slots:
            return False
        tokens = sequence.tokens
        most = 0 if sequence.saved is not None else len(tokens) - 1  # the last token's logits are drawn from
        pages, partial, common = self._tree.match(tokens, most) if most else ([], 0, 0)
        held = [*pages, partial] if common else pages
        self.pool.share(held)
        lacking = -(-min(len(tokens) + self._steps, sequence.limit) // self._page_tokens) - len(pages)
        if not self._find_pages(lacking + len(self._running)):
            self.pool.release(held)
            return False
        new = self.pool.take(lacking)
        if common:
            self._moves.copy_page(partial, new[0])
            self.pool.release((partial,))
        self._place(sequence, pages + new)
        if sequence.saved is not None:
            self._restore(sequence)
        else:
            sequence.era, sequence.cached = self._era, len(pages) * self._page_tokens + common
            self.reused_tokens += sequence.cached
            if sequence.prefix is not None and sequence.cached < sequence.prompt_length - self._held_back_tokens:
                self._leaders[sequence.prefix] = sequence
        return True

    def promote(self, sequence: NativeSequence) -> None:
        """Let a sequence decode."""
        slot = sequence.row
        self._limits[slot] = sequence.limit
        self._lengths[slot] = len(sequence.tokens)
        self._lanes[sequence.number] = len(self.ready)
        self.ready.append(sequence)
        self.changes += 1

    def reserve(self) -> list[NativeSequence]:
        """Take pages for the next block of steps; returns the sequences that had to make room for older ones."""
        slots, preempted = self._list_ready_slots(), list[NativeSequence]()
        short = slots[np.minimum(self._lengths[slots] + self._steps, self._limits[slots]) > self._room[slots]].tolist()
        for sequence in sorted((self._running[slot] for slot in short), key=_get_number):
            if sequence.row >= 0:
                preempted += self._extend(sequence)
        return preempted

    def advance(self, steps: int) -> None:
        """Count the steps of a block that is planned: every ready sequence may grow by as many tokens."""
        slots = self._list_ready_slots()
        self._lengths[slots] = np.minimum(self._lengths[slots] + steps, self._limits[slots])

    def record_prefill(self, sequence: NativeSequence) -> None:
        """Share what a sequence has prefilled, once that is all it has to."""
        if sequence.missing <= self._held_back_tokens:
            if self.is_leader(sequence):
                del self._leaders[sequence.prefix or b""]
            if sequence.era == self._era:
                self._tree.insert(sequence.tokens, sequence.cached, sequence.pages)

    def release(self, sequence: NativeSequence, *, completed: bool) -> None:
        """Let a sequence go; a completed turn stays in the tree for the next one of its session."""
        if self.is_leader(sequence):
            del self._leaders[sequence.prefix or b""]
        if sequence.row >= 0:
            if completed and sequence.continues and sequence.era == self._era:
                length = min(sequence.cached, len(sequence.tokens) - 1)
                self._tree.insert(sequence.tokens, length, sequence.pages)
            self._leave(sequence)
        elif sequence.saved is not None:
            self._forget_saved(sequence)

    def clear(self) -> None:
        """Share nothing computed so far with sequences that start later: the weights have changed."""
        self._era += 1
        self._leaders.clear()
        self._tree.clear()

    def _list_ready_slots(self) -> NDArray[np.int64]:
        if self._ready_changes != self.changes:
            self._ready_changes = self.changes
            self._ready_slots = np.array([sequence.row for sequence in self.ready], dtype=np.int64)
        return self._ready_slots

    def _find_pages(self, wanted: int) -> bool:
        if wanted > self.pool.free:
            self._tree.evict(wanted - self.pool.free)
        return wanted <= self.pool.free

    def _extend(self, sequence: NativeSequence) -> list[NativeSequence]:
        """Give a sequence the pages that it lacks; returns those that were preempted for it, itself perhaps."""
        slot, preempted = sequence.row, list[NativeSequence]()
        length = min(int(self._lengths[slot]) + self._steps, sequence.limit)
        lacking = -(-length // self._page_tokens) - len(sequence.pages)
        while not self._find_pages(lacking):
            youngest = max(self._running.values(), key=_get_number)
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return preempted
        new = self.pool.take(lacking)
        self._moves.write_table(slot, len(sequence.pages), new)
        sequence.pages += new
        self._room[slot] = len(sequence.pages) * self._page_tokens
        return preempted

    def _preempt(self, sequence: NativeSequence) -> None:
        """Take slot and pages from a sequence. What a block in flight draws for it is still entered."""
        self.preemptions += 1
        if self.is_leader(sequence):
            del self._leaders[sequence.prefix or b""]
        decodes, pages = sequence.number in self._lanes, sequence.pages
        if self.saved_pages + len(pages) <= self._moves.host_pages:
            self.saved_pages += len(pages)
            sequence.saved = (self._moves.save(pages), len(pages), decodes)
        else:
            sequence.cached = 0
        self._leave(sequence)

    def _restore(self, sequence: NativeSequence) -> None:
        """Bring the KV of a preempted sequence back; blocks may have drawn for it after it was preempted."""
        saved, pages, decodes = sequence.saved
        self._moves.restore(saved, sequence.pages[:pages])
        self._forget_saved(sequence)
        if decodes:
            sequence.cached = len(sequence.tokens) - 1

    def _forget_saved(self, sequence: NativeSequence) -> None:
        self.saved_pages -= sequence.saved[1]
        sequence.saved = None

    def _place(self, sequence: NativeSequence, pages: list[int]) -> None:
        slot = sequence.row = self._free_slots.pop()
        sequence.stay = next(self._stays)
        sequence.pages = pages
        self._running[slot] = sequence
        self._room[slot] = len(pages) * self._page_tokens
        self._moves.write_table(slot, 0, pages)

    def _leave(self, sequence: NativeSequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        lane = self._lanes.pop(sequence.number, None)
        if lane is not None:  # the last lane closes the gap
            last = self.ready.pop()
            self.changes += 1
            if last is not sequence:
                self.ready[lane] = last
                self._lanes[last.number] = lane
        del self._running[sequence.row]
        self._free_slots.append(sequence.row)
        sequence.row = -1


def _get_number(sequence: NativeSequence) -> int:
    """Return the order of arrival."""
    return sequence.number
