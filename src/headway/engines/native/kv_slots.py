"""Sequences of the native engine; on a CPU the rows of the KV cache they live in, and the KV saved for later ones.

Guarantees: ready sequences fill the rows from 0 without a gap, so that their KV is one view and a batch size says
everything about a step's shape. The price is one move of KV when a row in the middle becomes free. Prefilling sequences
live in any row above. What was computed under one version of the weights is never given to a sequence that starts under
another one; saved tokens stay within a budget, least recently used first out. Holds no KV itself: `KvCacheMoves`
carries out what is decided here.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any, Protocol

from headway.engines.base import Request
from headway.engines.native.settings import NativeSettings
from headway.types import FinishReason

_MASK = (1 << 64) - 1


class NativeSequence:
    """One request: its tokens so far, how many of them have KV, its row, and when it ends.

    It is *ready* when just its last token lacks KV: it computes one token and draws one in each step. Before that it is
    *prefilling*. Made by `generate`, then touched by the engine's thread only.
    """

    __slots__ = (
        "cached", "continues", "era", "key", "least_report", "limit", "number", "pages", "params", "prefix",
        "prompt_length", "routed", "row", "saved", "session", "stay", "stops", "tokens", "unreported",
        "unreported_logps",
    )  # fmt: skip

    def __init__(
        self, request: Request, actions: Sequence[int], *, number: int = 0, slot_tokens: int, seed: int = 0
    ) -> None:
        prompt = [int(token) for token in request.prompt]
        self.number = number
        """Unique in the engine: a request may come back under the same id before its first attempt is gone."""
        self.params = request.params
        self.prompt_length = len(prompt)
        self.tokens = [*prompt, *(int(action) for action in actions)]
        """Prompt and actions."""
        self.limit = min(self.prompt_length + self.params.max_new_tokens, slot_tokens)
        """Number of tokens at which it ends by length."""
        self.prefix = _digest(prompt) if request.prefix_key >= 0 else None
        """Stands for the prompt, where others may share it: comparing long prompts at every step would take long."""
        self.session, self.continues = request.session, request.continues
        self.era = -1
        """The weights it began under: how often they had changed."""
        self.stops = self.params.stop
        self.key = int.from_bytes(blake2b(f"{seed}/{request.request_id}".encode(), digest_size=8).digest(), "big")
        self.row = -1
        """Its row or slot while it has one."""
        self.pages: list[int] = []
        self.stay = -1
        """Unique for each time that it gets a slot."""
        self.saved: Any = None
        """Its KV in host memory, the number of pages, and whether it decoded, while it is preempted."""
        self.cached = 0
        """Tokens whose KV is in the slot."""
        self.routed = 0
        """Tokens whose experts are reported, or not wanted, where the model is a mixture."""
        self.unreported: list[int] = []
        """Actions not yet reported."""
        self.unreported_logps: list[float] = []
        self.least_report = 1
        """Fewest actions that a report is made for before it ends."""

    @property
    def missing(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.cached

    def next_uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw: a hash of seed, request and position only."""
        z = (self.key + (len(self.tokens) - self.prompt_length + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def append(self, token: int, logp: float) -> None:
        """Add an action."""
        self.tokens.append(token)
        self.unreported.append(token)
        self.unreported_logps.append(logp)

    def extend(self, tokens: list[int], logps: list[float]) -> None:
        """Add several actions."""
        self.tokens += tokens
        self.unreported += tokens
        self.unreported_logps += logps

    def find_finish(self, eos: frozenset[int]) -> FinishReason | None:
        """Return how it has ended by its last action or its length, if it has. Does not look for stop strings."""
        if len(self.tokens) > self.prompt_length and self.tokens[-1] in eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


class KvCacheMoves(Protocol):
    """What has to be done to the KV cache; lengths are in tokens."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy one row to another."""

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None:
        """Swap two rows."""

    def save(self, prefix: int, row: int, length: int) -> None:
        """Keep the first tokens of a row under a number."""

    def restore(self, prefix: int, row: int, length: int) -> None:
        """Put the first tokens of a saved prefix into a row."""

    def drop(self, prefix: int) -> None:
        """Forget a saved prefix."""


class SequenceSlots(Protocol):
    """The sequences that hold KV: `RowSlots` on a CPU, `PagedSlots` on a GPU."""

    ready: list[NativeSequence]
    """The sequences that decode, in the order of a step."""
    changes: int
    """Number of changes of `ready`: what was derived from it is valid while this stays the same."""

    def is_being_prefilled(self, sequence: NativeSequence) -> bool:
        """Return whether a sibling prefills this prompt right now, so that waiting is cheaper than doing it again."""

    def is_leader(self, sequence: NativeSequence) -> bool:
        """Return whether a sequence prefills a prompt that others wait for."""

    def admit(self, sequence: NativeSequence) -> bool:
        """Give memory to a sequence that is to prefill, with the KV that is there; returns whether there was enough."""

    def promote(self, sequence: NativeSequence) -> None:
        """Let a sequence decode."""

    def reserve(self) -> list[NativeSequence]:
        """Take memory for the next steps; returns the sequences that had to make room."""

    def advance(self, steps: int) -> None:
        """Count the steps of a plan: every ready sequence may grow by as many tokens."""

    def record_prefill(self, sequence: NativeSequence) -> None:
        """Share a prompt once a step has prefilled the whole of it."""

    def release(self, sequence: NativeSequence, *, completed: bool) -> None:
        """Let a sequence go; what a completed turn has computed is saved for the next one of its session."""

    def clear(self) -> None:
        """Share nothing computed so far with sequences that start later: the weights have changed."""


class RowSlots:
    """Rows and the sequences that live in them. A row has room for the longest sequence, so nobody makes room."""

    def __init__(self, settings: NativeSettings, moves: KvCacheMoves) -> None:
        self.ready: list[NativeSequence] = []
        self.prefixes = PrefixCache(settings.prefix_cache_tokens, moves)
        self.is_being_prefilled = self.prefixes.is_being_prefilled
        self.is_leader = self.prefixes.is_leader
        self.record_prefill = self.prefixes.record_prefill
        self.clear = self.prefixes.clear
        self._rows: list[NativeSequence | None] = [None] * settings.slots
        self._moves = moves
        self._used = 0
        self.changes = 0

    def admit(self, sequence: NativeSequence) -> bool:
        """Give a row to a sequence that starts to prefill: the lowest, as that is the likeliest it will decode in."""
        if self._used == len(self._rows):
            return False
        row = self._rows.index(None)
        self._rows[row] = sequence
        sequence.row = row
        self._used += 1
        self.prefixes.join(sequence)
        return True

    def reserve(self) -> list[NativeSequence]:
        """Take nothing: a row is long enough."""
        return []

    def advance(self, steps: int) -> None:
        """Count nothing."""

    def promote(self, sequence: NativeSequence) -> None:
        """Let a sequence decode: swap it with whatever is behind the last sequence that decodes."""
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

    def release(self, sequence: NativeSequence, *, completed: bool) -> None:
        """Free the row of a sequence that leaves; the last sequence that decodes closes the gap."""
        self.prefixes.release(sequence, completed=completed)
        row = sequence.row
        if row < 0:
            return
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
class _SavedPrefix:
    """The KV of these tokens is saved under this number."""

    number: int
    tokens: Sequence[int]


class PrefixCache:
    """Saved KV: prompts for the members of a group, and whole turns for the next turn of their episode.

    A saved turn that is continued is dropped: its episode saves the next one.
    """

    def __init__(self, budget_tokens: int, moves: KvCacheMoves) -> None:
        self._budget = budget_tokens
        self._moves = moves
        self._saved: OrderedDict[bytes | str, _SavedPrefix] = OrderedDict()
        """Saved KV of each prompt, or of each session."""
        self._tokens = 0
        self._leaders: dict[bytes, NativeSequence] = {}
        """The sequence that prefills a prompt for the others, by prompt."""
        self._numbers = count()
        self._era = 0
        """How often the weights have changed."""
        self.shared_prompts = 0
        """Prompts that were not prefilled because a sibling had prefilled them."""
        self.continued_turns = 0
        """Turns that were not prefilled from the beginning of their episode."""

    def is_being_prefilled(self, sequence: NativeSequence) -> bool:
        """Return whether a sibling prefills this prompt right now, so that waiting is cheaper than doing it again."""
        return sequence.prefix is not None and sequence.prefix in self._leaders

    def is_leader(self, sequence: NativeSequence) -> bool:
        """Return whether a sequence prefills a prompt that is to be saved."""
        return sequence.prefix is not None and self._leaders.get(sequence.prefix) is sequence

    def join(self, sequence: NativeSequence) -> None:
        """Give saved KV to a sequence that has just got its row, or make it prefill the prompt for the others."""
        sequence.era = self._era
        prompt = sequence.prefix
        if prompt is None or sequence.prompt_length > self._budget:
            self._continue_turn(sequence)
            return
        saved = self._saved.get(prompt)
        if saved is None:
            self._leaders[prompt] = sequence
            return
        self._saved.move_to_end(prompt)
        self.shared_prompts += 1
        self._restore(sequence, saved, sequence.prompt_length)

    def record_prefill(self, sequence: NativeSequence) -> None:
        """Save the prompt once a step has prefilled the whole of it."""
        prompt, length = sequence.prefix, sequence.prompt_length
        if prompt is None or not self.is_leader(sequence) or sequence.cached < length:
            return
        del self._leaders[prompt]
        self._save(prompt, sequence, sequence.tokens[:length], length)

    def release(self, sequence: NativeSequence, *, completed: bool) -> None:
        """Let a sequence go that still has its row: another one must prefill its prompt; a completed turn is saved."""
        if self.is_leader(sequence):
            del self._leaders[sequence.prefix or b""]
        if completed and sequence.continues and sequence.era == self._era:
            length = min(sequence.cached, len(sequence.tokens) - 1)
            self._forget_session(sequence.session)
            if 0 < length <= self._budget:
                self._save(sequence.session, sequence, sequence.tokens[:length], length)

    def clear(self) -> None:
        """Forget everything saved or being prefilled, because the weights have changed."""
        self._era += 1
        self._leaders.clear()
        while self._saved:
            self._evict()

    def _continue_turn(self, sequence: NativeSequence) -> None:
        """Begin behind what the turn before has left, as far as the tokens are the same."""
        saved = self._saved.get(sequence.session)
        if saved is None:
            return
        if length := _count_common_prefix(saved.tokens, sequence.tokens):
            self.continued_turns += 1
            self._restore(sequence, saved, length)
        self._forget_session(sequence.session)

    def _restore(self, sequence: NativeSequence, saved: _SavedPrefix, length: int) -> None:
        # The last token is always computed: its logits are drawn from.
        length = min(length, len(sequence.tokens) - 1)
        self._moves.restore(saved.number, sequence.row, length)
        sequence.cached = length

    def _save(self, key: bytes | str, sequence: NativeSequence, tokens: Sequence[int], length: int) -> None:
        while self._tokens + len(tokens) > self._budget:
            self._evict()
        saved = _SavedPrefix(next(self._numbers), tokens)
        self._saved[key] = saved
        self._tokens += len(tokens)
        self._moves.save(saved.number, sequence.row, length)

    def _forget_session(self, session: str) -> None:
        if session in self._saved:
            self._saved.move_to_end(session, last=False)
            self._evict()

    def _evict(self) -> None:
        _, saved = self._saved.popitem(last=False)
        self._tokens -= len(saved.tokens)
        self._moves.drop(saved.number)


def _count_common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    most = min(len(one), len(other))
    if list(one[:most]) == list(other[:most]):
        return most
    return next(place for place in range(most) if one[place] != other[place])
