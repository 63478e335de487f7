"""Decides which sequences run in the next step, and records what each step made.

Guarantees: a free slot takes the next request at the next step; a finished sequence leaves at once. Requests start
first in, first out, but a member of a group lets others pass while a sibling prefills their prompt. A sequence that
had to make room waits in its place of arrival and goes on with all it has. Every step decodes one token of each ready
sequence and prefills at most `prefill_tokens` of the others. Never sees a tensor.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.engines.engine_thread import RequestUpdate
from headway.engines.native.kv_slots import NativeSequence, SequenceSlots
from headway.engines.native.settings import NativeSettings
from headway.types import FinishReason

HasStopped = Callable[[NativeSequence], bool]
"""Tells whether the last action of a sequence completes a stop string."""
DrawnTokens = tuple[list[int], list[float]]
"""Tokens and log-probabilities that one sequence got in a block of steps."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of a prompt whose KV is to be computed."""

    sequence: NativeSequence
    count: int
    draws: bool
    """Whether it reaches the end of the prompt, so that the next token is drawn."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: all ready sequences by row, then pieces of prompts."""

    ready: Sequence[NativeSequence]
    prefills: tuple[PrefillChunk, ...]
    changes: int
    """Equal in two plans with the same `ready`."""
    steps: int = 1
    """Decode steps until the host looks again, where it does not look after each."""

    @property
    def drawing(self) -> list[NativeSequence]:
        """The sequences that get a token, in the order of their logits."""
        return [*self.ready, *(chunk.sequence for chunk in self.prefills if chunk.draws)]


class NativeScheduler:
    """Queue, slots and ends of one replica. The last `held_back_tokens` of a prompt are decoded, not prefilled."""

    def __init__(
        self,
        settings: NativeSettings,
        slots: SequenceSlots,
        *,
        eos: frozenset[int],
        has_stopped: HasStopped = lambda sequence: False,
        held_back_tokens: int = 0,
    ) -> None:
        self._settings = settings
        self.slots = slots
        self._held_back_tokens = held_back_tokens
        self._eos = eos
        self._has_stopped = has_stopped
        self._waiting: list[NativeSequence] = []
        self._prefilling: list[NativeSequence] = []
        self._all: dict[int, NativeSequence] = {}

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._all)

    def add(self, sequence: NativeSequence) -> None:
        """Take in a new request, or one that continues."""
        self._all[sequence.number] = sequence
        self._waiting.append(sequence)

    def remove(self, number: int) -> RequestUpdate | None:
        """Abort a sequence; returns what was not yet reported of it."""
        sequence = self._all.get(number)
        return None if sequence is None else self._end(sequence, FinishReason.ABORTED)

    def plan(self) -> StepPlan:
        """Admit the sequences that fit, and share out the next step."""
        preempted = self.slots.reserve()
        for sequence in preempted:
            insort(self._waiting, sequence, key=lambda waiting: waiting.number)
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
        joining = 0
        if not preempted:  # what is in flight for them is not known yet
            joining = self._admit()
        self._promote()
        # A short block where most could join after it: they would wait for few.
        steps = 1 if joining + len(self._prefilling) > len(self.slots.ready) else self._settings.steps_per_sync
        self.slots.advance(steps)
        budget = self._settings.prefill_step_tokens
        prefills: list[PrefillChunk] = []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            count = min(budget, sequence.missing - self._held_back_tokens)
            prefills.append(PrefillChunk(sequence, count, draws=count == sequence.missing))
            budget -= count
        return StepPlan(tuple(self.slots.ready), tuple(prefills), self.slots.changes, steps)

    def commit(self, plan: StepPlan, tokens: Sequence[int], logps: Sequence[float]) -> list[RequestUpdate]:
        """Record what a step has made."""
        drawing = plan.drawing
        for sequence in plan.ready:
            sequence.cached += 1
        self.commit_prefill(plan)
        updates = []
        for sequence, token, logp in zip(drawing, tokens, logps, strict=True):
            sequence.append(token, logp)
            finish = sequence.find_finish(self._eos)
            if finish is not FinishReason.STOP and sequence.stops and self._has_stopped(sequence):
                finish = FinishReason.STOP
            updates += self._make_updates(sequence, finish)
        return updates

    def commit_prefill(self, plan: StepPlan) -> None:
        """Record that the pieces of prompts of a plan are computed, or will be before anything planned later."""
        for chunk in plan.prefills:
            chunk.sequence.cached += chunk.count
            self.slots.record_prefill(chunk.sequence)

    def commit_block(self, ready: Sequence[NativeSequence], drawn: Sequence[DrawnTokens]) -> list[RequestUpdate]:
        """Record what a block of steps has drawn; sequences that have left meanwhile are passed over."""
        updates = []
        for sequence, (tokens, logps) in zip(ready, drawn, strict=True):
            if not tokens or self._all.get(sequence.number) is not sequence:
                continue
            if sequence.row >= 0:
                sequence.cached += len(tokens)
            if sequence.stops:
                finish = self._append_until_stop(sequence, tokens, logps)
            else:
                sequence.extend(tokens, logps)
                finish = sequence.find_finish(self._eos)
            updates += self._make_updates(sequence, finish)
        return updates

    def _append_until_stop(
        self, sequence: NativeSequence, tokens: list[int], logps: list[float]
    ) -> FinishReason | None:
        """Append up to the token that completes a stop string: the device cannot read text and may have gone on."""
        for token, logp in zip(tokens, logps, strict=True):
            sequence.append(token, logp)
            if self._has_stopped(sequence):
                return FinishReason.STOP
        return sequence.find_finish(self._eos)

    def _make_updates(self, sequence: NativeSequence, finish: FinishReason | None) -> list[RequestUpdate]:
        if finish is not None:
            return [self._end(sequence, finish)]
        least = max(self._settings.stream_tokens, sequence.least_report)
        return [_report(sequence)] if len(sequence.unreported) >= least else []

    def flush(self) -> list[RequestUpdate]:
        """Return everything not yet reported."""
        return [_report(sequence) for sequence in self._all.values() if sequence.unreported]

    def forget_shared_prefixes(self) -> None:
        """Share nothing computed so far with sequences that start later; running ones keep their KV."""
        self.slots.clear()

    def _admit(self) -> int:
        """Admit those that fit; returns how many wait for a sibling only."""
        waiting: list[NativeSequence] = []
        siblings = 0
        for number, sequence in enumerate(self._waiting):
            if self.slots.is_being_prefilled(sequence):
                waiting.append(sequence)
                siblings += 1
                continue
            if not self.slots.admit(sequence):
                waiting.extend(self._waiting[number:])
                siblings = 0
                break
            self._prefilling.append(sequence)
        self._waiting = waiting
        return siblings

    def _promote(self) -> None:
        prefilling = []
        for sequence in self._prefilling:
            if sequence.missing == 1 and not self.slots.is_leader(sequence):
                self.slots.promote(sequence)
            else:
                prefilling.append(sequence)
        self._prefilling = prefilling

    def _end(self, sequence: NativeSequence, finish: FinishReason) -> RequestUpdate:
        del self._all[sequence.number]
        if sequence.row < 0:
            self._waiting.remove(sequence)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.slots.release(sequence, completed=finish is not FinishReason.ABORTED)
        return _report(sequence, finish)


def _report(sequence: NativeSequence, finish: FinishReason | None = None) -> RequestUpdate:
    update = RequestUpdate(sequence.number, sequence.unreported, sequence.unreported_logps, finish)
    sequence.unreported, sequence.unreported_logps = [], []
    return update
