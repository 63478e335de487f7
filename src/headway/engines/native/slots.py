"""Which sequence lives in which row of the KV memory.

Guarantees: sequences that decode fill the rows from 0 without a gap, so that their KV is one view and a batch size
says everything about a step's shape. The price is one move of KV when a row in the middle becomes free. Filling
sequences live in any row above. Holds no KV; `KvMoves` carries out what is decided here.
"""

from __future__ import annotations

from typing import Protocol

from headway.engines.native.sequence import Sequence


class KvMoves(Protocol):
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


class Slots:
    """Rows and their owners."""

    def __init__(self, count: int, moves: KvMoves) -> None:
        self.ready: list[Sequence] = []
        """Those that decode, by row."""
        self._rows: list[Sequence | None] = [None] * count
        self._moves = moves
        self._used = 0
        self.changes = 0
        """Counts changes of `ready`: whoever derives something from it compares."""

    @property
    def free(self) -> bool:
        """Whether one more fits."""
        return self._used < len(self._rows)

    def take(self, sequence: Sequence) -> None:
        """A row for a sequence that starts to fill: the lowest, as it is the likeliest to be the one it decodes in."""
        row = self._rows.index(None)
        self._rows[row] = sequence
        sequence.row = row
        self._used += 1

    def promote(self, sequence: Sequence) -> None:
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

    def release(self, sequence: Sequence) -> None:
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
