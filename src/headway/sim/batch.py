"""The batch of a simulated replica: who waits, who runs, and how long the next stretch of steps takes.

Pure bookkeeping on a *token clock* that counts steps. A running request knows the reading at which it ends, so joining
and leaving cost O(log n), and all counts are whole numbers. Everything here happens at a boundary between two steps;
time, pauses and faults are the engine's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum, auto
from heapq import heappop, heappush

from headway.config import simulation as costs
from headway.engines.base import Progress, Request
from headway.sim.pace import Pace
from headway.types import FinishReason, Repeated


class Place(Enum):
    """Where a request is."""

    QUEUED = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Aborted: goes at the next boundary."""
    GONE = auto()


class Sequence:
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
        self.place = Place.QUEUED
        self.future: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def flush(self, clock: int, version: int) -> None:
        """Write what was made up to `clock`."""
        count = clock - self.flushed
        if count > 0:
            self.flushed = clock
            self.made += count
            self.progress.extend(Repeated(0, count), Repeated(-1.0, count), version)

    def finish(self, reason: FinishReason) -> None:
        self.place = Place.GONE
        if not self.future.done():
            self.future.set_result(reason)

    def fail(self, error: Exception) -> None:
        self.place = Place.GONE
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # Seen: the awaiting task may be cancelled before it can look.


class ContinuousBatch:
    """Queue and running requests of one replica under the weights `version`."""

    def __init__(self, cost: costs.SimulatedEngine) -> None:
        self._cost = cost
        self.clock = 0
        """Steps done."""
        self.pace = Pace(0.0, 0.0)
        """Of the stretch planned last."""
        self.sequences: dict[str, Sequence] = {}
        """All that queue or run, by request id."""
        self.queue: deque[Sequence] = deque()
        """First in, first out; may hold some that are gone."""
        self.running: dict[Sequence, None] = {}
        """In the order they joined."""
        self.leaving: list[Sequence] = []
        """Running, and to go at the next boundary."""
        self._context = 0
        """Tokens of context held by the running requests."""
        self._ends: list[tuple[int, int, Sequence]] = []
        self._prefixes: dict[tuple[int, int], list[int]] = {}
        """(key, version) → [running members, tokens]."""

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return len(self.running) < self._cost.slots

    def add(self, sequence: Sequence) -> None:
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
            if sequence.mark == mark and sequence.place is not Place.GONE:
                self._leave(sequence)
                self._end(sequence, sequence.end, version)
        for sequence in self.leaving:
            if sequence in self.running:
                self._leave(sequence)
            if sequence.place is Place.LEAVING:
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
            sequence.place = Place.QUEUED
            self.queue.appendleft(sequence)

    def admit(self, version: int) -> int:
        """Let requests join while they fit; the tokens to prefill for them."""
        queue, running, tokens = self.queue, self.running, 0
        capacity = self._cost.kv_tokens
        while queue and len(running) < self._cost.slots:
            sequence = queue[0]
            if sequence.place is Place.QUEUED:
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
        self.pace = Pace(first, per_token * batch)
        ends = self._ends
        while ends[0][2].mark != ends[0][0]:
            heappop(ends)
        steps = ends[0][0] - self.clock
        return steps if cost.kv_tokens is None else min(steps, (cost.kv_tokens - self._context) // batch)

    def _join(self, sequence: Sequence, context: int, version: int) -> int:
        """Add it to the running ones; the tokens to prefill for it."""
        clock = self.clock
        sequence.place = Place.RUNNING
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

    def _leave(self, sequence: Sequence) -> None:
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

    def _end(self, sequence: Sequence, reason: FinishReason, version: int) -> None:
        del self.sequences[sequence.request_id]
        sequence.flush(self.clock, version)
        sequence.finish(reason)


def target_of(request: Request) -> tuple[int, FinishReason]:
    """How many actions it will have in all, and how it ends then."""
    limit = request.params.max_new_tokens
    if request.hint is None or request.hint > limit:
        return limit, FinishReason.LENGTH
    return int(request.hint), FinishReason.STOP
