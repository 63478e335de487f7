"""Prompts whose KV is kept for the members of a group that come later.

Guarantees: what was filled under one version of the weights is never given to a sequence that starts under another
one; the tokens kept stay within a budget, least recently used first out. Holds no KV: `KvMoves` does.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from headway.engines.native.sequence import Sequence
from headway.engines.native.slots import KvMoves


class Prefixes:
    """Kept prompts, and who is filling one that others wait for.

    `held_back`: how many tokens at a prompt's end are never filled, as they are drawn from in another way.
    """

    def __init__(self, budget_tokens: int, moves: KvMoves, held_back: int = 0) -> None:
        self._budget = budget_tokens
        self._moves = moves
        self._held_back = held_back
        self._kept: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._tokens = 0
        self._leaders: dict[tuple[int, ...], Sequence] = {}
        self._numbers = count()
        self.hits = 0

    def awaited(self, sequence: Sequence) -> bool:
        """Whether a sibling is filling this prompt right now, so that waiting is cheaper than filling it again."""
        return sequence.prefix is not None and sequence.prefix in self._leaders

    def leads(self, sequence: Sequence) -> bool:
        """Whether it fills a prompt that is to be kept."""
        return sequence.prefix is not None and self._leaders.get(sequence.prefix) is sequence

    def join(self, sequence: Sequence) -> None:
        """A sequence has its row: it takes what is kept, or fills the prompt for the others."""
        prompt = sequence.prefix
        if prompt is None or not self._held_back < len(prompt) <= self._budget:
            return
        number = self._kept.get(prompt)
        if number is None:
            self._leaders[prompt] = sequence
            return
        self._kept.move_to_end(prompt)
        self.hits += 1
        # The last token is always computed: its logits are drawn from.
        length = min(len(prompt) - self._held_back, len(sequence.tokens) - 1)
        self._moves.restore(number, sequence.row, length)
        sequence.cached = length

    def filled(self, sequence: Sequence) -> None:
        """A step has filled more of a sequence; once that is the whole prompt, it is kept."""
        prompt = sequence.prefix
        if prompt is None or not self.leads(sequence) or sequence.cached < len(prompt) - self._held_back:
            return
        del self._leaders[prompt]
        while self._tokens + len(prompt) > self._budget:
            self._evict()
        number = next(self._numbers)
        self._kept[prompt] = number
        self._tokens += len(prompt)
        self._moves.save(number, sequence.row, len(prompt) - self._held_back)

    def left(self, sequence: Sequence) -> None:
        """A sequence has gone; what it was filling, somebody else has to."""
        if sequence.prefix is not None and self.leads(sequence):
            del self._leaders[sequence.prefix]

    def clear(self) -> None:
        """Other weights: nothing kept or being filled may be shared any more."""
        self._leaders.clear()
        while self._kept:
            self._evict()

    def _evict(self) -> None:
        prompt, number = self._kept.popitem(last=False)
        self._tokens -= len(prompt)
        self._moves.drop(number)
