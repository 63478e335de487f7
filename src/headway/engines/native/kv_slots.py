"""Which sequence lives in which row of the KV memory.

Guarantees: sequences that decode fill the rows from 0 without a gap, so that their KV is one view and a batch size
says everything about a step's shape. The price is one move of KV when a row in the middle becomes free. Filling
sequences live in any row above. Holds no KV; `KvCacheMoves` carries out what is decided here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from headway.engines.native.native_sequence import NativeSequence


class KvCacheMoves(Protocol):
    """What has to be done to the memory; lengths are in tokens."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Row to row."""
        ...

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        """Two rows change places."""
        ...

    def save(self, prefix: int, row: int, length: int) -> None:
        """Keep the first tokens of a row under a number."""
        ...

    def restore(self, prefix: int, row: int, length: int) -> None:
        """Put the first tokens of what was kept into a row."""
        ...

    def drop(self, prefix: int) -> None:
        """Forget what was kept."""
        ...


class SlotTable:
    """Rows and their owners."""

    def __init__(self, count: int, moves: KvCacheMoves) -> None:
        self.ready: list[NativeSequence] = []
        """Those that decode, by row."""
        self._rows: list[NativeSequence | None] = [None] * count
        self._moves = moves
        self._used = 0
        self.changes = 0
        """Counts changes of `ready`: whoever derives something from it compares."""

    @property
    def free(self) -> bool:
        """Whether one more fits."""
        return self._used < len(self._rows)

    def take(self, sequence: NativeSequence) -> None:
        """A row for a sequence that starts to fill: the lowest, as it is the likeliest to be the one it decodes in."""
        row = self._rows.index(None)
        self._rows[row] = sequence
        sequence.row = row
        self._used += 1

    def promote(self, sequence: NativeSequence) -> None:
        """A sequence starts to decode: it changes places with whatever is behind the last one that does."""
        target, source = len(self.ready), sequence.row
        if source != target:
            other = self._rows[target]
            self._moves.exchange(source, sequence.cached, target, other.cached if other is not None else 0)
            self._rows[source] = other
            if other is not None:
                other.row = source
            self._rows[target] = sequence
            sequence.row = target
        self.ready.append(sequence)
        self.changes += 1

    def release(self, sequence: NativeSequence) -> None:
        """A sequence leaves; the last one that decodes closes the gap."""
        row = sequence.row
        if row < len(self.ready) and self.ready[row] is sequence:
            last = self.ready.pop()
            self.changes += 1
            if last is not sequence:
                self._moves.copy(last.row, row, last.cached)
                self.ready[row] = self._rows[row] = last
                row, last.row = last.row, row
        self._rows[row] = None
        sequence.row = -1
        self._used -= 1


@dataclass(frozen=True, slots=True)
class _Kept:
    """The KV of these tokens lies under this number."""

    number: int
    tokens: Tokens[int]


class PrefixCache:
    """What is kept, and who is filling a prompt that others wait for.

    `held_back`: how many tokens at a prompt's end are never filled, as they are drawn from in another way.
    """

    def __init__(self, budget_tokens: int, moves: KvCacheMoves, held_back: int = 0) -> None:
        self._budget = budget_tokens
        self._moves = moves
        self._held_back = held_back
        self._kept: OrderedDict[tuple[int, ...] | str, _Kept] = OrderedDict()
        """By prompt, or by session."""
        self._tokens = 0
        self._leaders: dict[tuple[int, ...], NativeSequence] = {}
        self._numbers = count()
        self._era = 0
        """How often the weights have changed."""
        self.hits = 0
        self.continued = 0

    def awaited(self, sequence: NativeSequence) -> bool:
        """Whether a sibling is filling this prompt right now, so that waiting is cheaper than filling it again."""
        return sequence.prefix is not None and sequence.prefix in self._leaders

    def leads(self, sequence: NativeSequence) -> bool:
        """Whether it fills a prompt that is to be kept."""
        return sequence.prefix is not None and self._leaders.get(sequence.prefix) is sequence

    def join(self, sequence: NativeSequence) -> None:
        """A sequence has its row: it takes what is kept, or fills the prompt for the others."""
        sequence.era = self._era
        prompt = sequence.prefix
        if prompt is None or not self._held_back < len(prompt) <= self._budget:
            self._continue(sequence)
            return
        kept = self._kept.get(prompt)
        if kept is None:
            self._leaders[prompt] = sequence
            return
        self._kept.move_to_end(prompt)
        self.hits += 1
        self._take(sequence, kept, len(prompt) - self._held_back)

    def filled(self, sequence: NativeSequence) -> None:
        """A step has filled more of a sequence; once that is the whole prompt, it is kept."""
        prompt = sequence.prefix
        if prompt is None or not self.leads(sequence) or sequence.cached < len(prompt) - self._held_back:
            return
        del self._leaders[prompt]
        self._keep(prompt, sequence, prompt, len(prompt) - self._held_back)

    def left(self, sequence: NativeSequence, *, whole: bool) -> None:
        """A sequence goes, its row still its own: what it was filling, somebody else has to; a whole turn is kept."""
        if self.leads(sequence):
            del self._leaders[sequence.prefix or ()]
        if whole and sequence.goes_on and sequence.era == self._era:
            length = min(sequence.cached, len(sequence.tokens) - 1)
            self._forget(sequence.session)
            if 0 < length <= self._budget:
                self._keep(sequence.session, sequence, sequence.tokens[:length], length)

    def clear(self) -> None:
        """Other weights: nothing kept or being filled may be shared any more."""
        self._era += 1
        self._leaders.clear()
        while self._kept:
            self._evict()

    def _continue(self, sequence: NativeSequence) -> None:
        """Begin behind what the turn before has left, as far as it is the same."""
        kept = self._kept.get(sequence.session)
        if kept is None:
            return
        if same := _common(kept.tokens, sequence.tokens):
            self.continued += 1
            self._take(sequence, kept, same)
        self._forget(sequence.session)

    def _take(self, sequence: NativeSequence, kept: _Kept, length: int) -> None:
        # The last token is always computed: its logits are drawn from.
        length = min(length, len(sequence.tokens) - 1)
        self._moves.restore(kept.number, sequence.row, length)
        sequence.cached = length

    def _keep(self, key: tuple[int, ...] | str, sequence: NativeSequence, tokens: Tokens[int], length: int) -> None:
        while self._tokens + len(tokens) > self._budget:
            self._evict()
        kept = _Kept(next(self._numbers), tokens)
        self._kept[key] = kept
        self._tokens += len(tokens)
        self._moves.save(kept.number, sequence.row, length)

    def _forget(self, session: str) -> None:
        if session in self._kept:
            self._kept.move_to_end(session, last=False)
            self._evict()

    def _evict(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._tokens -= len(kept.tokens)
        self._moves.drop(kept.number)


def _common(one: Tokens[int], other: Tokens[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    if list(one[:most]) == list(other[:most]):
        return most
    return next(place for place in range(most) if one[place] != other[place])
