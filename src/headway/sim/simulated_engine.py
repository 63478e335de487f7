"""A simulated replica: continuous batching on the event loop's clock, without a loop per token.

Running requests advance together, one action per decode step. Whatever changes the batch (a request that joins, ends or
is aborted, a pause, a flip of weights) happens at the end of the running step, as in a real engine; the steps between
two such boundaries are a *stretch*, whose end has a closed form (`continuous_batch`).

* Beyond `slots`, and if `kv_tokens` are short, requests wait first in, first out. When the running ones outgrow
  `kv_tokens`, the youngest goes back to the front of the queue and is recomputed later.
* Prefill stops decoding. Members of a group pay once for their prompt while one of them runs here under the same
  weights. Each counts in full against `kv_tokens`; nothing is cached beyond the last member's end.
* Actions are written to `Progress` at boundaries that matter (end, abort, pause, flip, preemption) and, without the
  step in progress, at a cancellation or crash.
* A flip of weights keeps the KV cache, unless `weights.recompute_cache` says that it is prefilled again.
"""

import asyncio
from enum import Enum, auto

from headway.config import simulation_config as costs
from headway.engines.base import Progress, Request
from headway.errors import EngineCrashed, EngineError
from headway.sim.continuous_batch import (
    ContinuousBatch,
    SimulatedSequence,
    SimulatedSequenceState,
    resolve_target_length,
)
from headway.sim.fault_injection import BackendHealth
from headway.sim.simulated_weights import SimulatedReceiver
from headway.types import FinishReason
from headway.weights.base import WeightReceiver


class _Phase(Enum):
    STANDING = auto()
    """Nothing to do, or paused."""
    PREFILLING = auto()
    DECODING = auto()


class SimulatedEngine:
    """One replica. It generates `request.hint` actions, or as many as allowed without a hint."""

    def __init__(
        self,
        name: str,
        cost: costs.SimulatedEngineConfig | None = None,
        weights: costs.SimulatedWeightsConfig | None = None,
        *,
        health: BackendHealth | None = None,
    ) -> None:
        self.name = name
        self._cost = cost or costs.SimulatedEngineConfig()
        self.slots = self._cost.slots
        weights = weights or costs.SimulatedWeightsConfig()
        self._flip_s, self._recomputes = weights.flip_s, bool(weights.recompute_cache)
        self._health = health or BackendHealth(name)
        self._health.listen(self._on_health_change)
        self._receiver = SimulatedReceiver(self._switch_version, weights, health=self._health)
        self.receiver: WeightReceiver = self._receiver
        self._down = False
        self._closed = False
        self._serial = 0
        self._frozen_at: float | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget all requests and stop."""
        self._batch = ContinuousBatch(self._cost)
        self._phase = _Phase.STANDING
        self._timer: asyncio.Handle | None = None
        self._started = 0.0
        """When the phase began."""
        self._due = 0.0
        """When the next boundary comes."""
        self._steps = 0
        """Steps until then."""
        self._holds: set[object] = set()
        """Everything that wants decoding to stand still; `self` stands for `pause`."""
        self._stop_waiters: list[asyncio.Future[None]] = []

    # -- what the hub calls

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        await self._health.deliver(EngineError)
        sequence = self._make_sequence(request, progress)
        if sequence.action_count >= sequence.target_length:
            return sequence.finish_reason
        can_join = self._batch.has_free_slot and not self._batch.queue
        self._batch.add(sequence)
        if can_join:
            self._interrupt()
        try:
            return await sequence.future
        except asyncio.CancelledError:
            self._cancel(sequence)
            raise

    def _make_sequence(self, request: Request, progress: Progress) -> SimulatedSequence:
        """Return the sequence of a request. Raises `EngineError` if it cannot be served."""
        self._check_up()
        if self._receiver.version < 0:
            raise EngineError(f"{self.name} has no weights to serve {request.request_id} with")
        if request.request_id in self._batch.sequences:
            raise EngineError(f"{self.name} already has a request {request.request_id}")
        target, finish = resolve_target_length(request)
        size, capacity = len(request.prompt) + target, self._cost.kv_tokens
        if capacity is not None and size > capacity:
            raise EngineError(f"{request.request_id} needs {size} tokens of context, {self.name} has {capacity}")
        self._serial += 1
        return SimulatedSequence(request, progress, target, finish, self._serial)

    async def abort(self, request_id: str) -> None:
        sequence = self._batch.sequences.get(request_id)
        if sequence is None:
            return
        if sequence.state is SimulatedSequenceState.QUEUED:
            del self._batch.sequences[request_id]
            sequence.finish(FinishReason.ABORTED)
            self._interrupt()
        elif sequence.state is SimulatedSequenceState.RUNNING:
            sequence.state = SimulatedSequenceState.LEAVING
            self._batch.leaving.append(sequence)
            self._interrupt()

    async def pause(self) -> None:
        self._check_up()
        self._holds.add(self)
        await self._wait_until_standing()

    async def resume(self) -> None:
        self._release(self)

    async def start(self) -> None:
        """Do nothing: it is up when it is made."""

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        self._crash(f"{self.name} is restarted")
        await self._health.restart(self.name, self._cost.restart_s, EngineCrashed)
        self._down = False
        self._receiver.reset(gone=False)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end_all(f"{self.name} is closed", FinishReason.ABORTED)

    # -- standing still: pauses and flips

    async def _switch_version(self, version: int) -> None:
        """Serve `version` from the next action on."""
        self._check_up()
        hold = object()
        self._holds.add(hold)
        try:
            await self._wait_until_standing()
            await self._health.spend(self._flip_s, EngineCrashed)
            self._check_up()
            self._receiver.version = version
            if self._recomputes:
                self._batch.forget_cache(version)
        finally:
            self._release(hold)

    async def _wait_until_standing(self) -> None:
        """Return at the boundary where decoding stops."""
        if self._phase is _Phase.STANDING and self._frozen_at is None:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_waiters.append(waiter)
        self._interrupt()
        await waiter

    def _release(self, hold: object) -> None:
        self._holds.discard(hold)
        if not self._holds:
            self._wake_waiters()
            if self._batch.running or self._batch.queue:
                self._interrupt()

    def _wake_waiters(self, error: Exception | None = None) -> None:
        waiters, self._stop_waiters = self._stop_waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()

    # -- the boundary: the only place where the batch changes

    def _at_boundary(self) -> None:
        self._timer = None
        batch, version = self._batch, self._receiver.version
        while True:
            batch.advance(self._steps)
            self._steps = 0
            batch.retire(version)
            if self._holds:
                batch.flush(version)
                self._phase = _Phase.STANDING
                self._wake_waiters()
                return
            batch.preempt(version)
            tokens = batch.admit(version)
            if tokens:
                self._begin_phase(_Phase.PREFILLING, tokens / self._cost.prefill_tokens_per_s * self._health.slow)
                return
            if not batch.running:
                self._phase = _Phase.STANDING
                return
            self._steps = batch.plan(self._health.slow)
            stretch_s = batch.pace.time_of(self._steps)
            if stretch_s > 0:
                self._begin_phase(_Phase.DECODING, stretch_s)
                return

    # -- timers

    def _begin_phase(self, phase: _Phase, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._phase = phase
        self._started = loop.time()
        self._due = self._started + seconds
        self._timer = loop.call_at(self._due, self._at_boundary)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interrupt(self) -> None:
        """Bring the next boundary forward to the end of the running step."""
        if self._frozen_at is not None or self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._phase is _Phase.STANDING:
            if self._timer is None:
                self._timer = loop.call_soon(self._at_boundary)
        elif self._phase is _Phase.DECODING:
            steps = self._batch.pace.next_boundary(loop.time() - self._started)
            if steps < self._steps:
                self._cancel_timer()
                self._steps = steps
                self._due = self._started + self._batch.pace.time_of(steps)
                self._timer = loop.call_at(self._due, self._at_boundary)

    def _read_token_clock(self) -> int:
        """Return the token clock now, without the step in progress."""
        if self._phase is not _Phase.DECODING:
            return self._batch.clock
        now = asyncio.get_running_loop().time() if self._frozen_at is None else self._frozen_at
        return self._batch.clock + min(self._batch.pace.steps_in(now - self._started), self._steps)

    # -- cancellations and faults

    def _cancel(self, sequence: SimulatedSequence) -> None:
        """Keep the whole steps of a request whose task was cancelled, and let it leave at the next boundary."""
        if sequence.state is SimulatedSequenceState.GONE:
            return
        if sequence.state is not SimulatedSequenceState.QUEUED:
            sequence.flush(self._read_token_clock(), self._receiver.version)
            self._batch.leaving.append(sequence)
        del self._batch.sequences[sequence.request_id]
        sequence.state = SimulatedSequenceState.GONE
        self._interrupt()

    def _on_health_change(self, change: str) -> None:
        if self._closed:
            return
        if change == "crash":
            self._crash(f"{self.name} crashed")
        elif self._health.hung and self._frozen_at is None:
            self._cancel_timer()
            self._frozen_at = asyncio.get_running_loop().time()
        elif not self._health.hung and self._frozen_at is not None:
            self._continue_after_hang(asyncio.get_running_loop().time() - self._frozen_at)
        else:
            self._interrupt()

    def _continue_after_hang(self, hung_s: float) -> None:
        self._frozen_at = None
        if self._phase is not _Phase.STANDING:
            self._started += hung_s
            self._due += hung_s
            self._timer = asyncio.get_running_loop().call_at(self._due, self._at_boundary)
        self._interrupt()

    def _crash(self, message: str) -> None:
        self._end_all(message)
        self._frozen_at = None
        self._down = True

    def _end_all(self, message: str, finish: FinishReason | None = None) -> None:
        """End every request with `finish`, or else with `EngineCrashed`; only the actions of whole steps remain."""
        clock = self._read_token_clock()
        for sequence in list(self._batch.sequences.values()):
            if sequence.state is not SimulatedSequenceState.QUEUED:
                sequence.flush(clock, self._receiver.version)
            if finish is None:
                sequence.fail(EngineCrashed(message))
            else:
                sequence.finish(finish)
        self._wake_waiters(EngineCrashed(message))
        self._cancel_timer()
        self._reset()
        self._receiver.reset(gone=True)

    def _check_up(self) -> None:
        if self._down or self._closed:
            raise EngineCrashed(f"{self.name} is {'closed' if self._closed else 'down'}")
