"""Who runs in the next step, and what became of them after it.

Guarantees: a free slot takes the next request at the next step; a finished row leaves at once; requests start first
in, first out, but a member of a group lets others pass while a sibling fills their prompt; every step decodes one token
for each ready sequence and fills at most `prefill_tokens` of the others. Never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from headway.engines.native.kv_slots import KvCacheMoves, PrefixCache, SlotTable
from headway.engines.native.native_sequence import NativeSequence
from headway.engines.native.settings import NativeSettings
from headway.types import FinishReason


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of a prompt to be computed."""

    sequence: NativeSequence
    count: int
    draws: bool
    """It reaches the end: the next token is drawn."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: all ready sequences by row, then pieces of prompts."""

    ready: Listing[NativeSequence]
    fills: tuple[PrefillChunk, ...]
    changes: int
    """Equal in two plans with the same `ready`."""

    @property
    def drawn(self) -> list[NativeSequence]:
        """Those that get a token, in the order of their logits."""
        return [*self.ready, *(fill.sequence for fill in self.fills if fill.draws)]


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """News of one sequence."""

    number: int
    actions: list[int]
    logps: list[float]
    finish: FinishReason | None = None


DrawnTokens = tuple[list[int], list[float]]
"""Tokens and log-probabilities that one sequence got in a block of steps."""


class NativeScheduler:
    """Queue, slots and ends of one replica. `held_back`: tokens of a prompt that are not filled but decoded."""

    def __init__(
        self,
        settings: NativeSettings,
        moves: KvCacheMoves,
        *,
        eos: frozenset[int],
        stopped: Callable[[NativeSequence], bool] = lambda sequence: False,
        held_back: int = 0,
    ) -> None:
        self._settings = settings
        self._slots = SlotTable(settings.slots, moves)
        self._prefixes = PrefixCache(settings.kept_tokens, moves, held_back)
        self._held_back = held_back
        self._eos = eos
        self._stopped = stopped
        self._waiting: list[NativeSequence] = []
        self._filling: list[NativeSequence] = []
        self._all: dict[int, NativeSequence] = {}

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._all)

    @property
    def shared(self) -> int:
        """Prompts that were not filled because a sibling had filled them."""
        return self._prefixes.hits

    @property
    def continued(self) -> int:
        """Turns that were not filled from their episode's beginning."""
        return self._prefixes.continued

    def add(self, sequence: NativeSequence) -> None:
        """A new request, or one that goes on."""
        self._all[sequence.number] = sequence
        self._waiting.append(sequence)

    def remove(self, number: int) -> RequestUpdate | None:
        """Take a sequence out, with what it has not reported."""
        sequence = self._all.get(number)
        return None if sequence is None else self._end(sequence, FinishReason.ABORTED)

    def plan(self) -> StepPlan:
        """Let in who fits and share out the step."""
        self._admit()
        self._promote()
        room = self._settings.fill_tokens
        fills: list[PrefillChunk] = []
        for sequence in self._filling:
            if room <= 0:
                break
            count = min(room, sequence.missing - self._held_back)
            fills.append(PrefillChunk(sequence, count, draws=count == sequence.missing))
            room -= count
        return StepPlan(tuple(self._slots.ready), tuple(fills), self._slots.changes)

    def commit(self, plan: StepPlan, tokens: Listing[int], logps: Listing[float]) -> list[RequestUpdate]:
        """Enter what a step has made."""
        drawn = plan.drawn
        for sequence in plan.ready:
            sequence.cached += 1
        self.filled(plan)
        deliveries = []
        for sequence, token, logp in zip(drawn, tokens, logps, strict=True):
            sequence.append(token, logp)
            finish = sequence.finish(self._eos)
            if finish is not FinishReason.STOP and sequence.stops and self._stopped(sequence):
                finish = FinishReason.STOP
            deliveries += self._news(sequence, finish)
        return deliveries

    def filled(self, plan: StepPlan) -> None:
        """The pieces of prompts of a plan are computed, or will be before anything planned later."""
        for fill in plan.fills:
            fill.sequence.cached += fill.count
            self._prefixes.filled(fill.sequence)

    def landed(self, ready: Listing[NativeSequence], runs: Listing[DrawnTokens]) -> list[RequestUpdate]:
        """Enter what a block of steps has drawn; those who have left meanwhile are passed over."""
        deliveries = []
        for sequence, (tokens, logps) in zip(ready, runs, strict=True):
            if not tokens or self._all.get(sequence.number) is not sequence:
                continue
            sequence.cached += len(tokens)
            if sequence.stops:
                finish = self._step_by_step(sequence, tokens, logps)
            else:
                sequence.extend(tokens, logps)
                finish = sequence.finish(self._eos)
            deliveries += self._news(sequence, finish)
        return deliveries

    def _step_by_step(self, sequence: NativeSequence, tokens: list[int], logps: list[float]) -> FinishReason | None:
        """Up to the token that completes a stop string: the device knows nothing of text and may have gone on."""
        for token, logp in zip(tokens, logps, strict=True):
            sequence.append(token, logp)
            if self._stopped(sequence):
                return FinishReason.STOP
        return sequence.finish(self._eos)

    def _news(self, sequence: NativeSequence, finish: FinishReason | None) -> list[RequestUpdate]:
        if finish is not None:
            return [self._end(sequence, finish)]
        return [_report(sequence)] if len(sequence.fresh) >= self._settings.stream_tokens else []

    def flush(self) -> list[RequestUpdate]:
        """Everything not yet reported."""
        return [_report(sequence) for sequence in self._all.values() if sequence.fresh]

    def other_weights(self) -> None:
        """From the next step on other weights are served: running sequences keep their KV, nothing else is shared."""
        self._prefixes.clear()

    def _admit(self) -> None:
        held: list[NativeSequence] = []
        for number, sequence in enumerate(self._waiting):
            if not self._slots.free:
                held.extend(self._waiting[number:])
                break
            if self._prefixes.awaited(sequence):
                held.append(sequence)
                continue
            self._slots.take(sequence)
            self._prefixes.join(sequence)
            self._filling.append(sequence)
        self._waiting = held

    def _promote(self) -> None:
        filling = []
        for sequence in self._filling:
            if sequence.missing == 1 and not self._prefixes.leads(sequence):
                self._slots.promote(sequence)
            else:
                filling.append(sequence)
        self._filling = filling

    def _end(self, sequence: NativeSequence, finish: FinishReason) -> RequestUpdate:
        del self._all[sequence.number]
        self._prefixes.left(sequence, whole=finish is not FinishReason.ABORTED)
        if sequence.row >= 0:
            self._slots.release(sequence)
            if sequence in self._filling:
                self._filling.remove(sequence)
        else:
            self._waiting.remove(sequence)
        return _report(sequence, finish)


def _report(sequence: NativeSequence, finish: FinishReason | None = None) -> RequestUpdate:
    delivery = RequestUpdate(sequence.number, sequence.fresh, sequence.fresh_logps, finish)
    sequence.fresh, sequence.fresh_logps = [], []
    return delivery
