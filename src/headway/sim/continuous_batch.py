"""The closed form of continuous batching: when step n of a batch that does not change ends.

A step with b requests and K tokens of context costs `s + r·b + c·K`, and K grows by b each step. The first n steps
of a stretch therefore take `n·first + growth·n·(n−1)/2` with `first` the cost of its first step and `growth = c·b`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum, auto
from heapq import heappop, heappush
from math import sqrt
from typing import NamedTuple

from headway.config import simulation_config as costs
from headway.engines.base import Progress, Request
from headway.types import FinishReason, RepeatedValue

TOLERANCE_S = 1e-9
"""Instants closer than this are one."""


class DecodePace(NamedTuple):
    """How fast one stretch goes."""

    first_s: float
    """Cost of its first step."""
    growth_s: float
    """By how much each step costs more than the one before."""

    def time_of(self, steps: int) -> float:
        """When the first `steps` steps have ended, from the start of the stretch."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_in(self, elapsed_s: float) -> int:
        """Whole steps that have ended by `elapsed_s`. The stretch must take time."""
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
        """The step at whose end the batch may next change: the one running, or the last if it just ended."""
        steps = self.steps_in(elapsed_s)
        return steps if self.time_of(steps) >= elapsed_s - TOLERANCE_S else steps + 1


class SimulatedSequenceState(Enum):
    """Where a request is."""

    QUEUED = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Aborted: goes at the next boundary."""
    GONE = auto()


class SimulatedSequence:
    """One request inside the replica."""

    __slots__ = ("end", "flushed", "future", "key", "made", "mark", "offset", "place", "prefix", "progress", "prompt",
                 "request_id", "serial", "target")  # fmt: skip

    def __init__(self, request: Request, progress: Progress, target: int, end: FinishReason, serial: int) -> None:
        self.request_id = request.request_id
        self.progress = progress
        self.prompt = len(request.prompt)
        self.key = request.prefix_key
        self.prefix: tuple[int, int] | None = None
        self.target = target
        self.end = end
        self.serial = serial
        self.made = len(progress.actions)
        """Actions in `progress`."""
        self.flushed = 0
        """Token clock up to which `progress` has been filled."""
        self.mark = -1
        """Token clock at which it ends."""
        self.offset = 0
        """Its context is `offset` plus the token clock."""
        self.place = SimulatedSequenceState.QUEUED
        self.future: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def flush(self, clock: int, version: int) -> None:
        """Write what was made up to `clock`."""
        count = clock - self.flushed
        if count > 0:
            self.flushed = clock
            self.made += count
            self.progress.extend(RepeatedValue(0, count), RepeatedValue(-1.0, count), version)

    def finish(self, reason: FinishReason) -> None:
        self.place = SimulatedSequenceState.GONE
        if not self.future.done():
            self.future.set_result(reason)

    def fail(self, error: Exception) -> None:
        self.place = SimulatedSequenceState.GONE
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # Seen: the awaiting task may be cancelled before it can look.


class ContinuousBatch:
    """Queue and running requests of one replica under the weights `version`."""

    def __init__(self, cost: costs.SimulatedEngineConfig) -> None:
        self._cost = cost
        self.clock = 0
        """Steps done."""
        self.pace = DecodePace(0.0, 0.0)
        """Of the stretch planned last."""
        self.sequences: dict[str, SimulatedSequence] = {}
        """All that queue or run, by request id."""
        self.queue: deque[SimulatedSequence] = deque()
        """First in, first out; may hold some that are gone."""
        self.running: dict[SimulatedSequence, None] = {}
        """In the order they joined."""
        self.leaving: list[SimulatedSequence] = []
        """Running, and to go at the next boundary."""
        self._context = 0
        """Tokens of context held by the running requests."""
        self._ends: list[tuple[int, int, SimulatedSequence]] = []
        self._prefixes: dict[tuple[int, int], list[int]] = {}
        """(key, version) → [running members, tokens]."""

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return len(self.running) < self._cost.slots

    def add(self, sequence: SimulatedSequence) -> None:
        """Put it at the end of the queue."""
        self.sequences[sequence.request_id] = sequence
        self.queue.append(sequence)

    def settle(self, steps: int) -> None:
        """Count the steps of a stretch that ended."""
        self.clock += steps
        self._context += steps * len(self.running)

    def retire(self, version: int) -> None:
        """Let go of those that have ended, and of those that want to leave."""
        ends, clock = self._ends, self.clock
        while ends and ends[0][0] <= clock:
            mark, _, sequence = heappop(ends)
            if sequence.mark == mark and sequence.place is not SimulatedSequenceState.GONE:
                self._leave(sequence)
                self._end(sequence, sequence.end, version)
        for sequence in self.leaving:
            if sequence in self.running:
                self._leave(sequence)
            if sequence.place is SimulatedSequenceState.LEAVING:
                self._end(sequence, FinishReason.ABORTED, version)
        self.leaving.clear()

    def flush(self, version: int) -> None:
        """Write out what all running requests have made."""
        for sequence in self.running:
            sequence.flush(self.clock, version)

    def make_room(self, version: int) -> None:
        """Preempt the youngest until another step of all fits; it is the next to join again."""
        capacity = self._cost.kv_tokens
        while capacity is not None and self._context + len(self.running) > capacity:
            sequence = next(reversed(self.running))
            sequence.flush(self.clock, version)
            self._leave(sequence)
            sequence.place = SimulatedSequenceState.QUEUED
            self.queue.appendleft(sequence)

    def admit(self, version: int) -> int:
        """Let requests join while they fit; the tokens to prefill for them."""
        queue, running, tokens = self.queue, self.running, 0
        capacity = self._cost.kv_tokens
        while queue and len(running) < self._cost.slots:
            sequence = queue[0]
            if sequence.place is SimulatedSequenceState.QUEUED:
                context = sequence.prompt + sequence.made
                if capacity is not None and self._context + context + len(running) + 1 > capacity:
                    break
                tokens += self._join(sequence, context, version)
            queue.popleft()
        return tokens

    def plan(self, slow: float) -> int:
        """Steps until the first request ends or the context no longer fits; sets `pace`. Something must run."""
        cost, batch = self._cost, len(self.running)
        per_token = cost.step_per_context_token_s * slow
        first = (cost.step_s + cost.step_per_request_s * batch) * slow + per_token * self._context
        self.pace = DecodePace(first, per_token * batch)
        ends = self._ends
        while ends[0][2].mark != ends[0][0]:
            heappop(ends)
        steps = ends[0][0] - self.clock
        return steps if cost.kv_tokens is None else min(steps, (cost.kv_tokens - self._context) // batch)

    def _join(self, sequence: SimulatedSequence, context: int, version: int) -> int:
        """Add it to the running ones; the tokens to prefill for it."""
        clock = self.clock
        sequence.place = SimulatedSequenceState.RUNNING
        sequence.flushed = clock
        sequence.mark = clock + sequence.target - sequence.made
        sequence.offset = context - clock
        self._context += context
        self.running[sequence] = None
        heappush(self._ends, (sequence.mark, sequence.serial, sequence))
        if sequence.key < 0:
            return context
        sequence.prefix = (sequence.key, version)
        shared = self._prefixes.setdefault(sequence.prefix, [0, 0])
        cached = min(shared[1], sequence.prompt)
        shared[0] += 1
        shared[1] = max(shared[1], sequence.prompt)
        return context - cached

    def _leave(self, sequence: SimulatedSequence) -> None:
        """Take it out of the running ones, with its context."""
        del self.running[sequence]
        self._context -= sequence.offset + self.clock
        sequence.mark = -1
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
    """How many actions it will have in all, and how it ends then."""
    limit = request.params.max_new_tokens
    if request.hint is None or request.hint > limit:
        return limit, FinishReason.LENGTH
    return int(request.hint), FinishReason.STOP
