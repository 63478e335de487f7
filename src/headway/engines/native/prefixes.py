"""KV that is kept for later: prompts for the members of a group, whole turns for the next turn of their episode.

Guarantees: what was filled under one version of the weights is never given to a sequence that starts under another
one; the tokens kept stay within a budget, least recently used first out. A turn that is taken up is no longer kept:
its episode leaves the next one. Holds no KV: `KvMoves` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import count

from headway.engines.native.sequence import Sequence
from headway.engines.native.slots import KvMoves


@dataclass(frozen=True, slots=True)
class _Kept:
    """The KV of these tokens lies under this number."""

    number: int
    tokens: Tokens[int]


class Prefixes:
    """What is kept, and who is filling a prompt that others wait for.

    `held_back`: how many tokens at a prompt's end are never filled, as they are drawn from in another way.
    """

    def __init__(self, budget_tokens: int, moves: KvMoves, held_back: int = 0) -> None:
        self._budget = budget_tokens
        self._moves = moves
        self._held_back = held_back
        self._kept: OrderedDict[tuple[int, ...] | str, _Kept] = OrderedDict()
        """By prompt, or by session."""
        self._tokens = 0
        self._leaders: dict[tuple[int, ...], Sequence] = {}
        self._numbers = count()
        self._era = 0
        """How often the weights have changed."""
        self.hits = 0
        self.continued = 0

    def awaited(self, sequence: Sequence) -> bool:
        """Whether a sibling is filling this prompt right now, so that waiting is cheaper than filling it again."""
        return sequence.prefix is not None and sequence.prefix in self._leaders

    def leads(self, sequence: Sequence) -> bool:
        """Whether it fills a prompt that is to be kept."""
        return sequence.prefix is not None and self._leaders.get(sequence.prefix) is sequence

    def join(self, sequence: Sequence) -> None:
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

    def filled(self, sequence: Sequence) -> None:
        """A step has filled more of a sequence; once that is the whole prompt, it is kept."""
        prompt = sequence.prefix
        if prompt is None or not self.leads(sequence) or sequence.cached < len(prompt) - self._held_back:
            return
        del self._leaders[prompt]
        self._keep(prompt, sequence, prompt, len(prompt) - self._held_back)

    def left(self, sequence: Sequence, *, whole: bool) -> None:
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

    def _continue(self, sequence: Sequence) -> None:
        """Begin behind what the turn before has left, as far as it is the same."""
        kept = self._kept.get(sequence.session)
        if kept is None:
            return
        if same := _common(kept.tokens, sequence.tokens):
            self.continued += 1
            self._take(sequence, kept, same)
        self._forget(sequence.session)

    def _take(self, sequence: Sequence, kept: _Kept, length: int) -> None:
        # The last token is always computed: its logits are drawn from.
        length = min(length, len(sequence.tokens) - 1)
        self._moves.restore(kept.number, sequence.row, length)
        sequence.cached = length

    def _keep(self, key: tuple[int, ...] | str, sequence: Sequence, tokens: Tokens[int], length: int) -> None:
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
