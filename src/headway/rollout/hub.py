"""InferenceHub: one non-blocking proxy in front of N engine replicas.

Guarantees: a request ends with all its actions, or raises after its budget; what was generated before a crash,
an interruption or a pause is kept and goes on, on any replica; no request is given to a replica whose weights
are too old for what it makes to be trained. Requests are single, bound late (a free slot takes the next one) and
routed by session affinity, then least load.

Does not know groups, rewards or training; does not restart replicas itself (`supervisor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from headway.engines.base import Engine, Progress, Request
from headway.errors import BackendError, EngineCrashed, EngineError
from headway.monitor.events import EventLog
from headway.monitor.waits import Wait
from headway.rollout.replica import Health, Lane, LoadIndex, Queued, Replica, WaitingLine
from headway.rollout.signal import Signal
from headway.settings import Reliability
from headway.types import FinishReason


class InferenceHub:
    """Routes, retries, interrupts, pauses. `on_failure` is told of a replica that must be restarted."""

    def __init__(
        self, engines: Sequence[Engine], *, events: EventLog, reliability: Reliability, clock: Callable[[], float]
    ) -> None:
        self.replicas = [Replica(engine, number) for number, engine in enumerate(engines)]
        self.changed = Signal()
        """Notified when a replica goes up or down or serves another version."""
        self.on_failure: Callable[[Replica, BaseException], None] = lambda replica, error: None
        self._events = events
        self._reliability = reliability
        self._clock = clock
        self._index = LoadIndex()
        self._lines = {lane: WaitingLine() for lane in Lane}
        self._paused: set[Lane] = set()
        self._halted = False
        self._numbers = count()
        self._oldest_useful = -1
        self._sessions: dict[str, Replica] = {}
        for replica in self.replicas:
            self._refresh(replica)

    # -- what others may ask

    @property
    def served(self) -> int:
        """The oldest version that a replica in service answers with; −1 while there is none."""
        return min((r.version for r in self.replicas if r.health is Health.UP and r.version >= 0), default=-1)

    @property
    def up(self) -> int:
        """Replicas in service."""
        return sum(replica.health is Health.UP for replica in self.replicas)

    def waits(self) -> list[Wait]:
        """For the wait-for graph: requests in flight and requests without a slot."""
        now = self._clock()
        edges = [
            Wait("generate", f"{r.load} requests in flight", r.name, now)
            for r in self.replicas
            if r.load and r.health is Health.UP
        ]
        for lane, line in self._lines.items():
            if waiting := len(line) + sum(q.lane is lane and not q.slot.done() for r in self.replicas for q in r.bound):
                state = "paused" if lane in self._paused else f"a free slot ({self.up} of {len(self.replicas)} up)"
                edges.append(Wait("generate", f"{waiting} {lane} requests wait for {state}", "hub", now))
        edges.extend(Wait("hub", "restart", r.name, r.last_failure_s) for r in self.replicas if r.health is Health.DOWN)
        return edges

    async def generate(
        self,
        request: Request,
        progress: Progress,
        *,
        lane: Lane = Lane.TRAIN,
        priority: int = 0,
        bound: int | None = None,
    ) -> FinishReason:
        """Generate to the end, on as many replicas as it takes. `bound` pins the request to one replica.

        Raises `EngineError` when the budget for this request is spent. Cancelling aborts it.
        """
        errors = crashes = 0
        while True:
            replica = self._take(request, lane, bound) or await self._queue(request, lane, priority, bound)
            try:
                finish = await self._run(replica, request, progress, lane)
                if finish is not FinishReason.ABORTED:
                    return finish
            except EngineCrashed as error:
                crashes += 1
                self.fail(replica, error)
                if crashes > self._reliability.sample_retries + self._reliability.replica_restarts:
                    raise EngineError(f"{request.request_id}: replicas crashed under it {crashes} times") from error
            except EngineError as error:
                errors += 1
                self._events.emit("error", replica.name, error=type(error).__name__, message=str(error))
                if errors > self._reliability.sample_retries:
                    raise
            finally:
                self._release(replica, request)

    def end_session(self, session: str) -> None:
        """Forget where a session ran."""
        self._sessions.pop(session, None)

    # -- what the flow tells it

    def require(self, oldest_useful: int) -> None:
        """Give no work to replicas that serve anything older than this version."""
        if oldest_useful != self._oldest_useful:
            self._oldest_useful = oldest_useful
            for replica in self.replicas:
                self._refresh(replica)

    def version_changed(self, replica: Replica) -> None:
        """A replica has flipped (or was seeded)."""
        self._refresh(replica)
        self.changed.notify()

    def fail(self, replica: Replica, error: BaseException) -> None:
        """Take a replica out of service; whoever supervises it is told once."""
        if replica.health is not Health.UP:
            return
        replica.health = Health.DOWN
        self._index.discard(replica)
        self._unbind(replica)
        self._events.emit("down", replica.name, reason=f"{type(error).__name__}: {error}")
        self.changed.notify()
        self.on_failure(replica, error)
        replica.last_failure_s = self._clock()  # only now: whoever was told wants to know how long ago the last one was

    def revive(self, replica: Replica) -> None:
        """A restarted and seeded replica is back in service."""
        replica.health = Health.UP
        self._events.emit("up", replica.name, version=replica.version)
        self._refresh(replica)
        self.changed.notify()

    def check(self) -> None:
        """Take out of service whoever has lost its weights: it died without a request to show for it."""
        for replica in self.replicas:
            if replica.health is Health.UP and replica.version < 0:
                self.fail(replica, EngineCrashed(f"{replica.name} has no weights any more"))

    async def interrupt(self, lane: Lane) -> None:
        """Stop every request of a lane at an action boundary; each goes on where a slot is free."""
        for replica in self.replicas:
            for request_id, request_lane in list(replica.inflight.items()):
                if request_lane is lane and replica.health is Health.UP:
                    await self._ask(replica, replica.engine.abort(request_id))

    async def pause(self, lane: Lane) -> None:
        """Interrupt a lane and hold it until `resume`."""
        self._paused.add(lane)
        await self.interrupt(lane)

    def resume(self, lane: Lane) -> None:
        """Let a paused lane go on."""
        self._paused.discard(lane)
        for replica in self.replicas:
            self._refresh(replica)

    async def halt_engines(self) -> None:
        """Stop all decoding, keeping every request where it is: the devices are needed for something else."""
        if not self._halted:
            self._halted = True
            await asyncio.gather(*(self._ask(replica, replica.hold()) for replica in self.replicas))

    async def continue_engines(self) -> None:
        """Go on after `halt_engines`."""
        if self._halted:
            self._halted = False
            await asyncio.gather(*(self._ask(replica, replica.let_go()) for replica in self.replicas))

    # -- routing

    def _serves(self, replica: Replica, lane: Lane) -> bool:
        """Whether a request of `lane` may run there; only what is trained has to be fresh."""
        oldest = self._oldest_useful if lane is Lane.TRAIN else 0
        return replica.health is Health.UP and 0 <= replica.version >= oldest

    def _refresh(self, replica: Replica) -> None:
        """Put a replica where it belongs in the index and give its free slots away."""
        if replica.health is not Health.UP or replica.version < 0:
            self._index.discard(replica)
            return
        self._index.put(replica)
        while replica in self._index:
            queued = self._next_for(replica)
            if queued is None:
                return
            self._occupy(replica, queued.request_id, queued.lane)
            queued.slot.set_result(replica)

    def _next_for(self, replica: Replica) -> Queued | None:
        """The first request that may run on `replica`: bound to it, or bound to nothing; training after others."""
        for number, queued in enumerate(replica.bound):
            if not queued.slot.done() and self._may_run(replica, queued.lane):
                return replica.bound.pop(number)
        for lane in (Lane.VALIDATE, Lane.TRAIN):
            if self._may_run(replica, lane) and (waiting := self._lines[lane].pop()) is not None:
                return waiting
        return None

    def _may_run(self, replica: Replica, lane: Lane) -> bool:
        return lane not in self._paused and self._serves(replica, lane)

    def _occupy(self, replica: Replica, request_id: str, lane: Lane) -> None:
        replica.inflight[request_id] = lane
        self._index.put(replica)

    def _take(self, request: Request, lane: Lane, bound: int | None) -> Replica | None:
        """A free slot right now, if there is one and nobody is before us."""
        if lane in self._paused:
            return None
        pinned = self._pinned(bound)
        replica = pinned or self._sessions.get(request.session)
        if pinned is None and (replica is None or not self._free(replica, lane)):
            replica = self._index.least(lambda candidate: self._serves(candidate, lane))
        if replica is None or not self._free(replica, lane):
            return None
        self._occupy(replica, request.request_id, lane)
        return replica

    def _pinned(self, bound: int | None) -> Replica | None:
        """The one replica that a bound request may run on; none while that one is out of service."""
        replica = None if bound is None else self.replicas[bound % len(self.replicas)]
        return replica if replica is not None and replica.health is Health.UP else None

    def _free(self, replica: Replica, lane: Lane) -> bool:
        return replica in self._index and self._serves(replica, lane)

    async def _queue(self, request: Request, lane: Lane, priority: int, bound: int | None) -> Replica:
        """Wait for a slot."""
        slot: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        queued = Queued(priority, next(self._numbers), lane, request.request_id, slot)
        pinned = self._pinned(bound)
        if pinned is not None:
            pinned.bound.append(queued)
        else:
            self._lines[lane].push(queued)
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():  # the slot was granted in the very tick of the cancellation
                self._release(slot.result(), request)
            raise

    def _unbind(self, replica: Replica) -> None:
        """What waited for this replica alone may now run anywhere."""
        for queued in replica.bound:
            self._lines[queued.lane].push(queued)
        replica.bound = []
        for other in self.replicas:
            if other is not replica:
                self._refresh(other)

    def _release(self, replica: Replica, request: Request) -> None:
        replica.inflight.pop(request.request_id, None)
        self._refresh(replica)

    # -- one attempt

    async def _run(self, replica: Replica, request: Request, progress: Progress, lane: Lane) -> FinishReason:
        """One attempt on one replica, bounded in time."""
        if not self._may_run(replica, lane):  # changed since the slot was granted
            return FinishReason.ABORTED
        if progress.started < 0:
            progress.started = replica.version
        self._sessions[request.session] = replica
        before, began_s = len(progress.actions), self._clock()
        finish = "failed"
        self._events.emit("request.start", replica.name, request=request.request_id)
        try:
            async with asyncio.timeout(self._reliability.request_timeout_s):
                finish = await replica.engine.generate(request, progress)
            replica.last_success_s = self._clock()
            return FinishReason(finish)
        except TimeoutError:
            late = f"{request.request_id}: no end after {self._reliability.request_timeout_s} s"
            if replica.last_success_s < began_s:
                raise EngineCrashed(f"{late}, and nothing else ended on {replica.name} meanwhile") from None
            await self._ask(replica, replica.engine.abort(request.request_id))
            raise EngineError(late) from None
        finally:
            made = len(progress.actions) - before
            progress.spent_s += self._clock() - began_s
            self._events.emit("request.end", replica.name, request=request.request_id, actions=made, finish=str(finish))

    async def _ask(self, replica: Replica, call: Awaitable[None]) -> None:
        """A control call that a healthy engine answers soon; one that does not is taken out of service."""
        try:
            async with asyncio.timeout(self._reliability.abort_timeout_s):
                await call
        except TimeoutError:
            self.fail(replica, EngineCrashed(f"{replica.name}: no answer for {self._reliability.abort_timeout_s} s"))
        except BackendError as error:
            self.fail(replica, error)
