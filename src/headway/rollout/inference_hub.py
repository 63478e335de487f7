"""InferenceHub: one non-blocking proxy in front of N engine replicas.

Guarantees: a request ends with all its actions, or raises after its retries. Tokens from before a crash, an
interruption or a pause are kept, and the request continues on any replica. No request runs on a replica whose weights
are too old for its tokens to be trained. Each request is routed by itself, as late as possible (`request_router`).

Replicas may join and leave; replicas on lent devices stop when the trainer needs the devices.

The hub does not know groups, rewards or training, and does not restart replicas (`flow.replica_supervisor` does).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

from headway.config import ReliabilityConfig
from headway.engines.base import Engine, Progress, Request, SleepingEngine
from headway.errors import BackendError, EngineCrashed, EngineError
from headway.monitor.event_log import EventLog
from headway.monitor.events import BackendDown, BackendUp, ErrorReport, RequestEnd, RequestStart, SpanBegin, SpanEnd
from headway.monitor.step_phases import HALTED_ENGINES
from headway.monitor.wait_graph import WaitEdge
from headway.rollout.concurrency import Signal
from headway.rollout.replica import Replica, ReplicaHealth, RequestLane, RunningRequest
from headway.rollout.request_router import RequestRouter
from headway.types import FinishReason

ERRORS_IN_A_ROW = 8
"""A replica is restarted after this many failed requests in a row."""
_LANE_OWNERS = {RequestLane.TRAIN: "generate", RequestLane.VALIDATE: "validate"}
"""Who waits for the requests of a lane, in the wait-for graph."""


class InferenceHub:
    """Routes, retries, interrupts and pauses requests. Calls `on_failure` for a replica that must be restarted."""

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
        self._halts = 0
        self._released = Signal()
        self._router.refresh_all()

    # -- requests

    @property
    def served(self) -> int:
        """Oldest version that a replica in service answers with; −1 if none is in service."""
        return self._router.served

    @property
    def up(self) -> int:
        return sum(replica.health is ReplicaHealth.UP for replica in self.replicas)

    def waits(self) -> list[WaitEdge]:
        """Return edges of the wait-for graph: the oldest request of each replica, and requests without a slot."""
        edges = []
        for replica in (one for one in self.replicas if one.health is ReplicaHealth.UP):
            halted = self._halted or replica.requests_paused
            pausing = "" if not replica.pause_count else "train" if halted else "param_update"
            for lane, (number, request_id, request) in replica.find_oldest_requests().items():
                what = f"request {request_id}, {len(request.progress.actions)} tokens so far, the oldest of {number}"
                what = f"{what}; {replica.name} is paused" if pausing else what
                edges.append(WaitEdge(_LANE_OWNERS[lane], what, pausing or replica.name, request.since_s))
        for lane in RequestLane:
            if waiting := self._router.waiting(lane):
                edges += self._explain_queue(lane, waiting, self._router.waiting_since_s(lane))
        return edges

    def _explain_queue(self, lane: RequestLane, waiting: int, since_s: float) -> list[WaitEdge]:
        """Return why the queued requests of a lane have no slot."""
        owner, serving = _LANE_OWNERS[lane], [one for one in self.replicas if self._router.serves(one, lane)]
        if lane in self._router.paused:
            return [WaitEdge(owner, f"{waiting} {lane} requests are paused", "validate", since_s)]
        if serving:
            free = f"{waiting} {lane} requests wait for a free slot ({self.up} of {len(self.replicas)} up)"
            return [WaitEdge(owner, free, replica.name, since_s) for replica in serving if replica.load]
        if self.up:
            what = f"{waiting} {lane} requests wait for newer weights ({self.up} of {len(self.replicas)} up)"
            return [WaitEdge(owner, what, "param_update", since_s)]
        down = f"{waiting} {lane} requests wait for an engine (0 of {len(self.replicas)} up)"
        restarts = [
            WaitEdge("hub", f"restart after {one.failures} failures", one.name, max(one.last_failure_s, 0.0))
            for one in self.replicas
        ]
        return [WaitEdge(owner, down, "hub", since_s), *restarts]

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

        Raise `EngineError` when the retries of this request are used up. Cancellation aborts the request.
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
                self._report_failed_request(replica, request, error)
                if errors > budget:
                    raise
            finally:
                router.release(replica, request)
                self._released.notify()

    def end_session(self, session: str) -> None:
        self._router.forget(session)

    # -- called by the flow

    def require(self, oldest_useful: int) -> None:
        """Give no training work to replicas that serve anything older than this version."""
        self._router.require(oldest_useful)

    def pin_validation(self, version: int | None) -> None:
        """Let validation requests run only on replicas that serve exactly `version`; on any, if it is `None`."""
        self._router.validated = version
        self._router.refresh_all()

    def holds(self, version: int) -> bool:
        """Return whether a healthy replica has the weights of `version`, even if it gets no work at the moment."""
        healthy = (one for one in self.replicas if one.health is ReplicaHealth.UP and one.flipped_in_pipeline)
        return any(replica.version == version for replica in healthy)

    def begin_pipeline(self, on_failure: Callable[[Replica, BaseException], None]) -> None:
        """Serve a new pipeline: nothing is paused, and no replica gets work before it has flipped in this pipeline."""
        self._on_failure = on_failure
        self._router.paused.clear()
        self._router.validated = None
        for replica in self.replicas:
            replica.flipped_in_pipeline = replica.devices_reclaimed = False
        self._router.refresh_all()

    def version_changed(self, replica: Replica) -> None:
        """Note that a replica has flipped to another version, or was seeded."""
        replica.flipped_in_pipeline = True
        self._router.refresh(replica)

    def fail(self, replica: Replica, error: BaseException) -> None:
        """Take a replica out of service and call `on_failure`, once per failure."""
        if replica.health is not ReplicaHealth.UP:
            return
        replica.health = ReplicaHealth.DOWN
        replica.incarnation += 1
        replica.errors = 0
        self._router.withdraw(replica)
        self._events.emit(BackendDown(who=replica.name, reason=f"{type(error).__name__}: {error}"))
        self._on_failure(replica, error)
        replica.last_failure_s = self._clock()  # after the call: `on_failure` reads the time of the previous failure

    def revive(self, replica: Replica) -> None:
        """Return a restarted and seeded replica to service."""
        replica.health = ReplicaHealth.UP
        self._events.emit(BackendUp(who=replica.name, version=replica.version))
        self._router.refresh(replica)

    def check(self) -> None:
        """Take replicas out of service that have lost their weights: they died while idle."""
        for replica in self.replicas:
            if replica.health is ReplicaHealth.UP and replica.flipped_in_pipeline and replica.version < 0:
                self.fail(replica, EngineCrashed(f"{replica.name} has no weights any more"))

    async def interrupt(self, lane: RequestLane) -> None:
        """Stop every request of a lane at a token boundary; each continues where a slot is free."""
        healthy = [replica for replica in self.replicas if replica.health is ReplicaHealth.UP]
        running = [(one, name) for one in healthy for name, its_lane in one.inflight.items() if its_lane is lane]
        await asyncio.gather(*(self._call_engine(one, partial(one.engine.abort, name)) for one, name in running))

    async def pause(self, lane: RequestLane) -> None:
        """Interrupt a lane and hold it until `resume`."""
        self._router.paused.add(lane)
        await self.interrupt(lane)

    def resume(self, lane: RequestLane) -> None:
        """Let a paused lane go on."""
        self._router.paused.discard(lane)
        self._router.refresh_all()

    async def halt_engines(self) -> None:
        """Pause decoding on all engines, so that something else can use the devices. Requests stay."""
        await self._pause_all(True)

    async def continue_engines(self) -> None:
        """Resume decoding after `halt_engines`, also on lent devices."""
        await self._pause_all(False)
        for replica in self.replicas:
            await self._pause_requests(replica, False)

    async def put_engines_to_sleep(self) -> None:
        """Let halted engines free the memory of their devices. Their requests wait for the next weights."""
        healthy = [replica for replica in self.replicas if replica.health is ReplicaHealth.UP]
        await asyncio.gather(*map(self._put_to_sleep, healthy))

    async def _put_to_sleep(self, replica: Replica) -> None:
        engine = replica.engine
        if isinstance(engine, SleepingEngine):
            replica.flipped_in_pipeline = False
            self._router.withdraw(replica)
            if not await self.empty(replica):
                self.fail(replica, EngineCrashed(f"{replica.name} does not make way for the trainer"))
            else:
                await self._call_engine(replica, engine.sleep)

    # -- replicas that join and leave

    def add(self, engine: Engine) -> Replica:
        """Add a replica. It gets work once it was seeded and `revive` was called."""
        replica = Replica(engine, next(self._numbers))
        replica.health = ReplicaHealth.DOWN
        replica.pause_count = int(self._halted)
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Give a replica no more work and stop waiting for it. `empty` moves its requests elsewhere."""
        replica.health = ReplicaHealth.LEFT
        replica.incarnation += 1
        self.replicas.remove(replica)
        self._router.withdraw(replica)

    async def empty(self, replica: Replica) -> bool:
        """Stop every request of a replica at a token boundary, to continue elsewhere. Return whether all did."""
        try:
            async with asyncio.timeout(self._reliability.abort_timeout_s):
                calls = [replica.engine.abort(request_id) for request_id in replica.inflight]
                await asyncio.gather(*calls, return_exceptions=True)  # requests of a dead engine end by themselves
                await self._released.until(lambda: not replica.inflight)
        except TimeoutError:
            return False
        return True

    def reclaim(self, replica: Replica) -> None:
        """Give a replica on lent devices no more work. `free_devices` handles the requests that it has."""
        replica.devices_reclaimed = True
        self._router.withdraw(replica)

    async def free_devices(self, replica: Replica, *, keep: bool) -> None:
        """Pause the requests of a replica (`keep`), or move them elsewhere; restart one that does not comply."""
        await self._pause_requests(replica, keep)
        if not keep and replica.health is ReplicaHealth.UP and not await self.empty(replica):
            self.fail(replica, EngineCrashed(f"{replica.name} does not make way for the trainer"))

    async def return_to_service(self, replica: Replica) -> None:
        """Let a replica work on lent devices again, once it serves what the others serve."""
        replica.devices_reclaimed = False
        replica.flipped_in_pipeline = replica.flipped_in_pipeline and replica.version >= self.served
        self._router.refresh(replica)
        await self._pause_requests(replica, False)

    # -- internals

    async def _pause_requests(self, replica: Replica, paused: bool) -> None:
        if replica.requests_paused is paused:
            return
        replica.requests_paused = paused
        replica.pause_count += 1 if paused else -1
        self._shift_deadlines(replica, paused)
        if replica.health is ReplicaHealth.UP:
            await self._call_engine(replica, replica.apply_pause)

    async def _pause_all(self, halted: bool) -> None:
        if self._halted is halted:
            return
        self._halted = halted
        self._halts += halted
        event = SpanBegin if halted else SpanEnd
        self._events.emit(event(who=HALTED_ENGINES, span=self._halts))
        for replica in self.replicas:
            replica.pause_count += 1 if halted else -1
            self._shift_deadlines(replica, halted)
        healthy = [replica for replica in self.replicas if replica.health is ReplicaHealth.UP]
        await asyncio.gather(*(self._call_engine(replica, replica.apply_pause) for replica in healthy))

    def _shift_deadlines(self, replica: Replica, halted: bool) -> None:
        """Stop the deadlines of requests while their engine is paused, and continue them afterwards."""
        now, limit = self._clock(), self._reliability.request_timeout_s
        for request_id, request in replica.running.items():
            deadline = request.deadline
            if halted:
                replica.remaining_s[request_id] = (deadline.when() or now + limit) - now
                deadline.reschedule(None)
            else:
                deadline.reschedule(now + replica.remaining_s.pop(request_id, limit))

    async def _run(self, replica: Replica, request: Request, progress: Progress, lane: RequestLane) -> FinishReason:
        """Run one attempt on one replica inside its deadline."""
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
            async with asyncio.timeout(limit) as deadline:
                replica.running[request.request_id] = RunningRequest(deadline, progress, began_s)
                finish = await replica.engine.generate(request, progress)
            replica.last_success_s, replica.errors = self._clock(), 0
            return FinishReason(finish)
        except TimeoutError:
            late = f"{request.request_id}: no end after {self._reliability.request_timeout_s} s"
            if replica.last_success_s < began_s:
                raise EngineCrashed(f"{late}, and nothing else ended on {replica.name} meanwhile") from None
            await self._call_engine(replica, partial(replica.engine.abort, request.request_id))
            raise EngineError(late) from None
        except BackendError:
            raise
        except Exception as error:
            raise EngineError(f"{replica.name}: {request.request_id}: {type(error).__name__}: {error}") from error
        finally:
            replica.running.pop(request.request_id, None)
            replica.remaining_s.pop(request.request_id, None)
            made = len(progress.actions) - before
            progress.spent_s += self._clock() - began_s
            ended = RequestEnd(who=replica.name, request=request.request_id, actions=made, finish=str(finish))
            self._events.emit(ended)

    def _report_failed_request(self, replica: Replica, request: Request, error: EngineError) -> None:
        """Record a failed request, which is retried elsewhere. Fail a replica on which all requests fail."""
        self._events.emit(ErrorReport.from_exception(replica.name, error))
        self._router.forget(request.session)
        replica.errors += 1
        if replica.errors >= ERRORS_IN_A_ROW:
            self.fail(replica, EngineCrashed(f"{replica.name}: {replica.errors} requests in a row failed: {error}"))

    async def _call_engine(self, replica: Replica, call: Callable[[], Awaitable[None]]) -> None:
        """Await a control call that a healthy engine answers soon. Fail the replica if it does not."""
        try:
            async with asyncio.timeout(self._reliability.abort_timeout_s):
                await call()
        except TimeoutError:
            self.fail(replica, EngineCrashed(f"{replica.name}: no answer for {self._reliability.abort_timeout_s} s"))
        except BackendError as error:
            self.fail(replica, error)
