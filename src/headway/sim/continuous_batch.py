"""The batch of a simulated replica: which requests wait, which run, and how long the next stretch of steps takes.

This is pure bookkeeping on a *token clock* that counts decode steps. A running request knows the reading at which it
ends, so joining and leaving cost O(log n), and all counts are whole numbers. Everything here happens at a boundary
between two steps; time, pauses and faults belong to the engine.

A step with b requests and K tokens of context costs `s + r·b + c·K`, and K grows by b each step. The first n steps of
a stretch in which the batch does not change therefore take `n·first + growth·n·(n−1)/2`, with `first` the cost of the
first step and `growth = c·b`.
"""

import asyncio
from collections import deque
from enum import Enum, auto
from heapq import heappop, heappush
from math import sqrt
from typing import NamedTuple

from headway.config.simulation_config import SimulatedEngineConfig
from headway.engines.base import Progress, Request
from headway.types import FinishReason, RepeatedValue

TOLERANCE_S = 1e-9
"""Points in time closer than this are the same."""


class DecodePace(NamedTuple):
    """Speed of one stretch of decode steps."""

    first_s: float
    """Cost of its first step."""
    growth_s: float
    """Difference in cost between one step and the next."""

    def time_of(self, steps: int) -> float:
        """Return when the first `steps` steps have ended, from the start of the stretch."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_in(self, elapsed_s: float) -> int:
        """Return the number of whole steps that have ended by `elapsed_s`. The stretch must take time."""
        elapsed_s += TOLERANCE_S
        half = self.growth_s / 2
        linear = self.first_s - half
        if half > 0:
            # The root of half·n² + linear·n = t, in the form that does not cancel for a small `half`.
            guess = 2 * elapsed_s / (linear + sqrt(linear * linear + 4 * half * elapsed_s))
        else:
            guess = elapsed_s / self.first_s
        steps = int(guess)
        while steps > 0 and self.time_of(steps) > elapsed_s:
            steps -= 1
        while self.time_of(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def next_boundary(self, elapsed_s: float) -> int:
        """Return the step at whose end the batch may next change: the one running, or the last if it just ended."""
        steps = self.steps_in(elapsed_s)
        return steps if self.time_of(steps) >= elapsed_s - TOLERANCE_S else steps + 1


class SimulatedSequenceState(Enum):
    """State of a request inside the replica."""

    QUEUED = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Aborted: leaves at the next boundary."""
    GONE = auto()


class SimulatedSequence:
    """One request inside the replica."""

    __slots__ = (
        "action_count", "context_offset", "end_clock", "finish_reason", "flushed_clock", "future", "prefix",
        "prefix_key", "progress", "prompt_length", "request_id", "serial", "state", "target_length",
    )  # fmt: skip

    def __init__(self, request: Request, progress: Progress, target: int, finish: FinishReason, serial: int) -> None:
        self.request_id = request.request_id
        self.progress = progress
        self.prompt_length = len(request.prompt)
        self.prefix_key = request.prefix_key
        self.prefix: tuple[int, int] | None = None
        self.target_length = target
        self.finish_reason = finish
        self.serial = serial
        self.action_count = len(progress.actions)
        """Actions in `progress`."""
        self.flushed_clock = 0
        """Token clock up to which `progress` has been filled."""
        self.end_clock = -1
        """Token clock at which it ends."""
        self.context_offset = 0
        """Its context is this plus the token clock."""
        self.state = SimulatedSequenceState.QUEUED
        self.future: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def flush(self, clock: int, version: int) -> None:
        """Write to `progress` what was generated up to `clock`."""
        count = clock - self.flushed_clock
        if count > 0:
            self.flushed_clock = clock
            self.action_count += count
            self.progress.extend(RepeatedValue(0, count), RepeatedValue(-1.0, count), version)

    def finish(self, reason: FinishReason) -> None:
        self.state = SimulatedSequenceState.GONE
        if not self.future.done():
            self.future.set_result(reason)

    def fail(self, error: Exception) -> None:
        self.state = SimulatedSequenceState.GONE
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as retrieved: the waiting task may be cancelled before it looks


class ContinuousBatch:
    """Queue and running requests of one replica. Methods take the version that is served."""

    def __init__(self, cost: SimulatedEngineConfig) -> None:
        self._cost = cost
        self.clock = 0
        """Steps done."""
        self.pace = DecodePace(0.0, 0.0)
        """Pace of the stretch planned last."""
        self.sequences: dict[str, SimulatedSequence] = {}
        """All that queue or run, by request id."""
        self.queue: deque[SimulatedSequence] = deque()
        """First in, first out; may hold some that are gone."""
        self.running: dict[SimulatedSequence, None] = {}
        """Running requests, in the order they joined."""
        self.leaving: list[SimulatedSequence] = []
        """Running, and to leave at the next boundary."""
        self._context = 0
        """Tokens of context held by the running requests."""
        self._ends: list[tuple[int, int, SimulatedSequence]] = []
        self._prefixes: dict[tuple[int, int], list[int]] = {}
        """(key, version) → [running members, tokens]."""

    @property
    def has_free_slot(self) -> bool:
        return len(self.running) < self._cost.slots

    def add(self, sequence: SimulatedSequence) -> None:
        """Put a request at the end of the queue."""
        self.sequences[sequence.request_id] = sequence
        self.queue.append(sequence)

    def advance(self, steps: int) -> None:
        """Count the steps of a stretch that ended."""
        self.clock += steps
        self._context += steps * len(self.running)

    def retire(self, version: int) -> None:
        """Remove the requests that have ended and those that are to leave."""
        ends, clock = self._ends, self.clock
        while ends and ends[0][0] <= clock:
            end_clock, _, sequence = heappop(ends)
            if sequence.end_clock == end_clock and sequence.state is not SimulatedSequenceState.GONE:
                self._leave(sequence)
                self._end(sequence, sequence.finish_reason, version)
        for sequence in self.leaving:
            if sequence in self.running:
                self._leave(sequence)
            if sequence.state is SimulatedSequenceState.LEAVING:
                self._end(sequence, FinishReason.ABORTED, version)
        self.leaving.clear()

    def flush(self, version: int) -> None:
        """Write out what all running requests have generated."""
        for sequence in self.running:
            sequence.flush(self.clock, version)

    def preempt(self, version: int) -> None:
        """Move the youngest requests back to the front of the queue until another step of all others fits."""
        capacity = self._cost.kv_tokens
        while capacity is not None and self._context + len(self.running) > capacity:
            sequence = next(reversed(self.running))
            sequence.flush(self.clock, version)
            self._leave(sequence)
            sequence.state = SimulatedSequenceState.QUEUED
            self.queue.appendleft(sequence)

    def admit(self, version: int) -> int:
        """Let requests join while they fit; return the number of tokens to prefill for them."""
        queue, running, tokens = self.queue, self.running, 0
        capacity = self._cost.kv_tokens
        while queue and len(running) < self._cost.slots:
            sequence = queue[0]
            if sequence.state is SimulatedSequenceState.QUEUED:
                context = sequence.prompt_length + sequence.action_count
                if capacity is not None and self._context + context + len(running) + 1 > capacity:
                    break
                tokens += self._join(sequence, context, version)
            queue.popleft()
        return tokens

    def forget_cache(self, version: int) -> None:
        """Send the running requests back to the front of the queue, in their order: new weights have no KV cache yet.

        They join again at the next boundary, where their whole context is prefilled; shared prompts only once.
        """
        for sequence in reversed(list(self.running)):
            sequence.flush(self.clock, version)
            self._leave(sequence)
            if sequence.state is SimulatedSequenceState.RUNNING:
                sequence.state = SimulatedSequenceState.QUEUED
                self.queue.appendleft(sequence)
            elif sequence.state is SimulatedSequenceState.LEAVING:
                self._end(sequence, FinishReason.ABORTED, version)

    def plan(self, slow: float) -> int:
        """Return the steps until a request ends or the context no longer fits, and set `pace`. Some request runs."""
        cost, batch = self._cost, len(self.running)
        per_token = cost.step_per_context_token_s * slow
        first = (cost.step_s + cost.step_per_request_s * batch) * slow + per_token * self._context
        self.pace = DecodePace(first, per_token * batch)
        ends = self._ends
        while ends[0][2].end_clock != ends[0][0]:
            heappop(ends)
        steps = ends[0][0] - self.clock
        return steps if cost.kv_tokens is None else min(steps, (cost.kv_tokens - self._context) // batch)

    def _join(self, sequence: SimulatedSequence, context: int, version: int) -> int:
        """Add a request to the running ones; return the number of tokens to prefill for it."""
        clock = self.clock
        sequence.state = SimulatedSequenceState.RUNNING
        sequence.flushed_clock = clock
        sequence.end_clock = clock + sequence.target_length - sequence.action_count
        sequence.context_offset = context - clock
        self._context += context
        self.running[sequence] = None
        heappush(self._ends, (sequence.end_clock, sequence.serial, sequence))
        if sequence.prefix_key < 0:
            return context
        sequence.prefix = (sequence.prefix_key, version)
        shared = self._prefixes.setdefault(sequence.prefix, [0, 0])
        cached = min(shared[1], sequence.prompt_length)
        shared[0] += 1
        shared[1] = max(shared[1], sequence.prompt_length)
        return context - cached

    def _leave(self, sequence: SimulatedSequence) -> None:
        """Remove a request from the running ones, with its context."""
        del self.running[sequence]
        self._context -= sequence.context_offset + self.clock
        sequence.end_clock = -1
        if sequence.prefix is not None:
            shared = self._prefixes[sequence.prefix]
            shared[0] -= 1
            if not shared[0]:
                del self._prefixes[sequence.prefix]
            sequence.prefix = None

    def _end(self, sequence: SimulatedSequence, reason: FinishReason, version: int) -> None:
        del self.sequences[sequence.request_id]
        sequence.flush(self.clock, version)
        sequence.finish(reason)


def resolve_target_length(request: Request) -> tuple[int, FinishReason]:
    """Return how many actions a request will have in all, and how it ends then."""
    limit = request.params.max_new_tokens
    if request.hint is None or request.hint > limit:
        return limit, FinishReason.LENGTH
    return int(request.hint), FinishReason.STOP
