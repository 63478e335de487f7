"""InferenceHub: one non-blocking proxy in front of N engine replicas.

Guarantees: a request ends with all its actions, or raises after its budget; what was generated before a crash,
an interruption or a pause is kept and goes on, on any replica; no request is given to a replica whose weights
are too old for what it makes to be trained. Requests are single and bound late; `routing` says where they go.

Replicas may join and leave; those on lent devices step aside when the devices are wanted.

Does not know groups, rewards or training; does not restart replicas itself (`flow.supervisor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

from headway.config import ReliabilityConfig
from headway.engines.base import Engine, Progress, Request
from headway.errors import BackendError, EngineCrashed, EngineError
from headway.monitor.event_log import EventLog
from headway.monitor.events import BackendDown, BackendUp, ErrorReport, RequestEnd, RequestStart
from headway.monitor.wait_graph import WaitEdge
from headway.rollout.concurrency import Signal
from headway.rollout.replica import Replica, ReplicaHealth, RequestLane
from headway.rollout.request_router import RequestRouter
from headway.types import FinishReason

ERRORS_IN_A_ROW = 8
"""Requests that may fail on a replica, one after the other with none that succeeds, before it is restarted."""


class InferenceHub:
    """Retries, interrupts, pauses. `on_failure` is told of a replica that must be restarted."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        lent: Sequence[Engine] = (),
        events: EventLog,
        reliability: ReliabilityConfig,
        clock: Callable[[], float],
        on_failure: Callable[[Replica, BaseException], None] = lambda replica, error: None,
    ) -> None:
        self._numbers = count()
        self.replicas = [Replica(engine, next(self._numbers)) for engine in engines]
        self.replicas += [Replica(engine, next(self._numbers), lent=True) for engine in lent]
        self._on_failure = on_failure
        self._events = events
        self._reliability = reliability
        self._clock = clock
        self._router = RequestRouter(self.replicas)
        self._halted = False
        self._released = Signal()
        self._router.refresh_all()

    # -- what others may ask

    @property
    def served(self) -> int:
        """The oldest version that a replica in service answers with; −1 while there is none."""
        return self._router.served

    @property
    def up(self) -> int:
        """Replicas that are up."""
        return sum(replica.health is ReplicaHealth.UP for replica in self.replicas)

    def waits(self) -> list[WaitEdge]:
        """For the wait-for graph: requests in flight and requests without a slot."""
        now = self._clock()
        edges = [
            WaitEdge("generate", f"{r.load} requests in flight", r.name, now)
            for r in self.replicas
            if r.load and r.health is ReplicaHealth.UP
        ]
        for lane in RequestLane:
            if waiting := self._router.waiting(lane):
                free = f"a free slot ({self.up} of {len(self.replicas)} up)"
                state = "paused" if lane in self._router.paused else free
                edges.append(WaitEdge("generate", f"{waiting} {lane} requests wait for {state}", "hub", now))
        edges.extend(
            WaitEdge("hub", "restart", r.name, r.last_failure_s)
            for r in self.replicas
            if r.health is ReplicaHealth.DOWN
        )
        return edges

    async def generate(
        self,
        request: Request,
        progress: Progress,
        *,
        lane: RequestLane = RequestLane.TRAIN,
        priority: int = 0,
        bound: int | None = None,
    ) -> FinishReason:
        """Generate to the end, on as many replicas as it takes. `bound` pins the request to one replica.

        Raises `EngineError` when the budget for this request is spent. Cancelling aborts it.
        """
        router, budget = self._router, self._reliability.sample_retries
        errors = crashes = 0
        avoid: Replica | None = None
        while True:
            replica = router.take(request, lane, bound, avoid) or await router.queue(request, lane, priority, bound)
            try:
                finish = await self._run(replica, request, progress, lane)
                if finish is not FinishReason.ABORTED:
                    return finish
            except EngineCrashed as error:
                crashes += 1
                self.fail(replica, error)
                if crashes > budget:
                    raise EngineError(f"{request.request_id}: replicas crashed under it {crashes} times") from error
            except EngineError as error:
                errors += 1
                avoid = replica
                self._complain(replica, request, error)
                if errors > budget:
                    raise
            finally:
                router.release(replica, request)
                self._released.notify()

    def end_session(self, session: str) -> None:
        """Forget where a session ran."""
        self._router.forget(session)

    # -- what the flow tells it

    def require(self, oldest_useful: int) -> None:
        """Give no training work to replicas that serve anything older than this version."""
        self._router.require(oldest_useful)

    def begin_pipeline(self, on_failure: Callable[[Replica, BaseException], None]) -> None:
        """Serve a new pipeline: nothing is paused, and no replica gets work before it has flipped in this pipeline."""
        self._on_failure = on_failure
        self._router.paused.clear()
        for replica in self.replicas:
            replica.flipped_in_pipeline = replica.devices_reclaimed = False
        self._router.refresh_all()

    def version_changed(self, replica: Replica) -> None:
        """A replica has flipped (or was seeded)."""
        replica.flipped_in_pipeline = True
        self._router.refresh(replica)

    def fail(self, replica: Replica, error: BaseException) -> None:
        """Take a replica out of service; whoever supervises it is told once."""
        if replica.health is not ReplicaHealth.UP:
            return
        replica.health = ReplicaHealth.DOWN
        replica.incarnation += 1
        replica.errors = 0
        self._router.withdraw(replica)
        self._events.emit(BackendDown(who=replica.name, reason=f"{type(error).__name__}: {error}"))
        self._on_failure(replica, error)
        replica.last_failure_s = self._clock()  # only now: whoever was told wants to know how long ago the last one was

    def revive(self, replica: Replica) -> None:
        """A restarted and seeded replica is back in service."""
        replica.health = ReplicaHealth.UP
        self._events.emit(BackendUp(who=replica.name, version=replica.version))
        self._router.refresh(replica)

    def check(self) -> None:
        """Take out of service whoever has lost its weights: it died without a request to show for it."""
        for replica in self.replicas:
            if replica.health is ReplicaHealth.UP and replica.flipped_in_pipeline and replica.version < 0:
                self.fail(replica, EngineCrashed(f"{replica.name} has no weights any more"))

    async def interrupt(self, lane: RequestLane) -> None:
        """Stop every request of a lane at an action boundary; each goes on where a slot is free."""
        calls = [
            self._ask(replica, partial(replica.engine.abort, request_id))
            for replica in self.replicas
            for request_id, request_lane in replica.inflight.items()
            if request_lane is lane and replica.health is ReplicaHealth.UP
        ]
        await asyncio.gather(*calls)

    async def pause(self, lane: RequestLane) -> None:
        """Interrupt a lane and hold it until `resume`."""
        self._router.paused.add(lane)
        await self.interrupt(lane)

    def resume(self, lane: RequestLane) -> None:
        """Let a paused lane go on."""
        self._router.paused.discard(lane)
        self._router.refresh_all()

    async def halt_engines(self) -> None:
        """Stop all decoding, keeping every request where it is: the devices are needed for something else."""
        await self._hold_all(True)

    async def continue_engines(self) -> None:
        """Go on after `halt_engines`, and with what stood still on lent devices."""
        await self._hold_all(False)
        for replica in self.replicas:
            await self._keep(replica, False)

    # -- who comes and goes

    def add(self, engine: Engine) -> Replica:
        """A newcomer; it gets its first work when it was seeded and is revived."""
        replica = Replica(engine, next(self._numbers))
        replica.health = ReplicaHealth.DOWN
        replica.pause_count = int(self._halted)
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """It gets no more work and is no longer waited for; `empty` sees to the work that it has."""
        replica.health = ReplicaHealth.LEFT
        replica.incarnation += 1
        self.replicas.remove(replica)
        self._router.withdraw(replica)

    async def empty(self, replica: Replica) -> bool:
        """Stop every request there at an action boundary, to go on elsewhere; whether all did so in time."""
        try:
            async with asyncio.timeout(self._reliability.abort_timeout_s):
                calls = [replica.engine.abort(request_id) for request_id in replica.inflight]
                await asyncio.gather(*calls, return_exceptions=True)  # of a dead engine they end by themselves
                await self._released.until(lambda: not replica.inflight)
        except TimeoutError:
            return False
        return True

    def reclaim(self, replica: Replica) -> None:
        """The devices are wanted: it gets no more work; `free_devices` sees to the work that it has."""
        replica.devices_reclaimed = True
        self._router.withdraw(replica)

    async def free_devices(self, replica: Replica, *, keep: bool) -> None:
        """With `keep` its requests wait where they are (it will not be for long), otherwise they go on elsewhere; a
        replica that does not let go of them is restarted."""
        await self._keep(replica, keep)
        if not keep and replica.health is ReplicaHealth.UP and not await self.empty(replica):
            self.fail(replica, EngineCrashed(f"{replica.name} does not make way for the trainer"))

    async def return_to_service(self, replica: Replica) -> None:
        """The devices are free again. If others serve something newer by now, it works when it does, too."""
        replica.devices_reclaimed = False
        replica.flipped_in_pipeline = replica.flipped_in_pipeline and replica.version >= self.served
        self._router.refresh(replica)
        await self._keep(replica, False)

    # -- inside

    async def _keep(self, replica: Replica, requests_paused: bool) -> None:
        if replica.requests_paused is requests_paused:
            return
        replica.requests_paused = requests_paused
        replica.pause_count += 1 if requests_paused else -1
        self._shift_deadlines(replica, requests_paused)
        if replica.health is ReplicaHealth.UP:
            await self._ask(replica, replica.apply_pause)

    async def _hold_all(self, halted: bool) -> None:
        if self._halted is halted:
            return
        self._halted = halted
        for replica in self.replicas:
            replica.pause_count += 1 if halted else -1
            self._shift_deadlines(replica, halted)
        calls = [
            self._ask(replica, replica.apply_pause) for replica in self.replicas if replica.health is ReplicaHealth.UP
        ]
        await asyncio.gather(*calls)

    def _shift_deadlines(self, replica: Replica, halted: bool) -> None:
        """Time in which the engine has to stand still is not the requests' time."""
        now, limit = self._clock(), self._reliability.request_timeout_s
        for request_id, deadline in replica.deadlines.items():
            if halted:
                replica.remaining_s[request_id] = (deadline.when() or now + limit) - now
                deadline.reschedule(None)
            else:
                deadline.reschedule(now + replica.remaining_s.pop(request_id, limit))

    async def _run(self, replica: Replica, request: Request, progress: Progress, lane: RequestLane) -> FinishReason:
        """One attempt on one replica, bounded in time."""
        if not self._router.serves(replica, lane):  # changed since the slot was granted
            return FinishReason.ABORTED
        if progress.started is None:
            progress.started = replica.version
        self._router.remember(request.session, replica)
        before, began_s = len(progress.actions), self._clock()
        finish = "failed"
        self._events.emit(RequestStart(who=replica.name, request=request.request_id))
        try:
            limit = None if self._halted else self._reliability.request_timeout_s
            async with asyncio.timeout(limit) as replica.deadlines[request.request_id]:
                finish = await replica.engine.generate(request, progress)
            replica.last_success_s, replica.errors = self._clock(), 0
            return FinishReason(finish)
        except TimeoutError:
            late = f"{request.request_id}: no end after {self._reliability.request_timeout_s} s"
            if replica.last_success_s < began_s:
                raise EngineCrashed(f"{late}, and nothing else ended on {replica.name} meanwhile") from None
            await self._ask(replica, partial(replica.engine.abort, request.request_id))
            raise EngineError(late) from None
        except BackendError:
            raise
        except Exception as error:
            raise EngineError(f"{replica.name}: {request.request_id}: {type(error).__name__}: {error}") from error
        finally:
            replica.deadlines.pop(request.request_id, None)
            replica.remaining_s.pop(request.request_id, None)
            made = len(progress.actions) - before
            progress.spent_s += self._clock() - began_s
            self._events.emit(
                RequestEnd(who=replica.name, request=request.request_id, actions=made, finish=str(finish))
            )

    def _complain(self, replica: Replica, request: Request, error: EngineError) -> None:
        """One request failed: try it elsewhere; a replica on which they all fail is sick."""
        self._events.emit(ErrorReport.from_exception(replica.name, error))
        self._router.forget(request.session)
        replica.errors += 1
        if replica.errors >= ERRORS_IN_A_ROW:
            self.fail(replica, EngineCrashed(f"{replica.name}: {replica.errors} requests in a row failed: {error}"))

    async def _ask(self, replica: Replica, call: Callable[[], Awaitable[None]]) -> None:
        """A control call that a healthy engine answers soon; one that does not is taken out of service."""
        try:
            async with asyncio.timeout(self._reliability.abort_timeout_s):
                await call()
        except TimeoutError:
            self.fail(replica, EngineCrashed(f"{replica.name}: no answer for {self._reliability.abort_timeout_s} s"))
        except BackendError as error:
            self.fail(replica, error)
