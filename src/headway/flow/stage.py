"""The stage base class: a small state machine with its own consume/produce loop.

A subclass says what it `consumes` and `produces` and implements `process`; the rest is inherited. Ten lines make
a stage of one's own:

    @register_stage("short_only")
    class ShortOnly(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, group: SampleGroup) -> SampleGroup | None:
            if group.actions <= 8192:
                return group
            self.line.drop(group.group_id, DropReason.FILTERED, who=self.role)
            return None

    flow = AsyncTrainingFlow(..., insert={"short_only": "rollout"})  # behind the rollout stage

Every change of state goes through `to`, which checks that it is legal and emits an event; nothing else measures
time. `width` items are worked on at once; the state is that of the busiest of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from headway.errors import BackendError, ChannelClosed, IllegalTransition
from headway.flow.channel import Channel
from headway.flow.pipeline import Pipeline
from headway.monitor.events import OperationRetry, StateChange
from headway.rollout.concurrency import OrderedTaskGroup

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


class Stage(Generic[In, Out]):
    """One station of the line."""

    role: ClassVar[str] = ""
    """Name in the registry, in events and in the wait-for graph. Set by `register_stage`."""
    consumes: ClassVar[type[Any]]
    produces: ClassVar[type[Any]]
    width: int = 1
    """Items worked on at once."""

    def __init__(self, line: Pipeline) -> None:
        self.line = line
        self.state = StageState.IDLE
        self.inbound: Channel[In] | None = None
        self.outbound: Channel[Out] | None = None
        self._listening = self._running = self._emitting = self._recovering = 0

    # -- what a subclass writes

    async def process(self, item: In) -> Out | None:
        """Turn one item into the next stage's, or into nothing."""
        raise NotImplementedError

    async def loop(self) -> None:
        """Consume, process, produce, until the stream ends."""
        if self.width == 1:
            while (item := await self.next_item()) is not None:
                await self._handle(item)
            return
        room = asyncio.Semaphore(self.width)
        async with OrderedTaskGroup() as tasks:
            while (item := await self.next_item()) is not None:
                await room.acquire()
                task = tasks.create_task(self._handle(item), name=f"{self.role}/item")
                task.add_done_callback(lambda _: room.release())

    # -- the machine

    async def run(self) -> None:
        """The stage's task: `loop` until it ends, then close what it fed."""
        try:
            await self.loop()
            self.to(StageState.STOPPED)
            if self.outbound is not None:
                self.outbound.close()
        except asyncio.CancelledError:
            self.to(StageState.STOPPED)
            raise
        except BaseException:
            self.to(StageState.FAILED)
            raise

    def to(self, state: StageState) -> None:
        """Change state, if that is legal."""
        if state is self.state:
            return
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.role}: {self.state} → {state}")
        old, self.state = self.state, state
        self.line.events.emit(StateChange(who=self.role, old=str(old), new=str(state)))

    def settle(self, *, listening: int = 0, running: int = 0, emitting: int = 0, recovering: int = 0) -> None:
        """Count what is going on and take the state that follows, by legal steps."""
        self._listening += listening
        self._running += running
        self._emitting += emitting
        self._recovering += recovering
        if self._recovering:
            goal = StageState.RECOVERING
        elif self._running:
            goal = StageState.RUNNING
        elif self._emitting:
            goal = StageState.EMITTING
        else:
            goal = StageState.WAITING if self._listening else StageState.IDLE
        if goal is not self.state:
            for state in TRANSITION_PATHS[self.state, goal]:
                self.to(state)

    async def next_item(self) -> In | None:
        """The next thing to consume, or `None` at the end of the stream."""
        assert self.inbound is not None, f"{self.role} has no inbound channel"
        if len(self.inbound):  # nothing to wait for: back-to-back items are one stretch of work
            return await self.inbound.receive()
        self.settle(listening=1)
        try:
            return await self.inbound.receive()
        except ChannelClosed:
            return None
        finally:
            self._listening -= 1

    async def _handle(self, item: In) -> None:
        """One item, from received to sent."""
        self.settle(running=1)
        try:
            made = await self.process(item)
        finally:
            self._running -= 1
        if made is not None and self.outbound is not None:
            if self.outbound.has_room:
                self.outbound.put(made)
            else:
                self.settle(emitting=1)
                try:
                    await self.outbound.send(made)
                finally:
                    self._emitting -= 1
        if self._listening or self.width > 1:
            self.settle()

    async def attempt(
        self, what: str, call: Callable[[], Awaitable[T]], *, retries: int, timeout_s: float | None = None
    ) -> T:
        """`call` until it succeeds; back-end errors that are not fatal are tried again, a bounded number of times."""
        backoff_s = self.line.settings.reliability.restart_backoff_s
        for number in range(retries + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    return await call()
            except (BackendError, TimeoutError) as error:
                late = BackendError(f"{what}: not done after {timeout_s} s")
                failure = error if isinstance(error, BackendError) else late
                self.line.recovery.failure(self.role, failure)
                if failure.fatal or number == retries:
                    raise failure from error
                self.line.events.emit(OperationRetry(who=self.role, attempt=number + 1))
            self.settle(recovering=1)
            try:
                await asyncio.sleep(backoff_s * 2**number)
            finally:
                self.settle(recovering=-1)
        raise AssertionError("unreachable")


StageT = TypeVar("StageT", bound=type[Stage[Any, Any]])
STAGES: dict[str, type[Stage[Any, Any]]] = {}
"""Every stage that can be named in a flow."""


def register_stage(role: str) -> Callable[[StageT], StageT]:
    """Class decorator: make a stage known under `role`. A second class of that name replaces the first."""

    def register(stage: StageT) -> StageT:
        stage.role = role
        STAGES[role] = stage
        return stage

    return register


def create_role_state_machine(role_name: str, *, pipeline: Pipeline, **overrides: object) -> Stage[Any, Any]:
    """One stage by name, for the given line. `overrides` are set on it as attributes (such as `width`)."""
    if role_name not in STAGES:
        raise KeyError(f"no stage {role_name!r}; there are {', '.join(sorted(STAGES))}")
    stage = STAGES[role_name](pipeline)
    for name, value in overrides.items():
        if not hasattr(stage, name):
            raise AttributeError(f"stage {role_name!r} has no {name!r}")
        setattr(stage, name, value)
    return stage


class StageState(StrEnum):
    """What a stage is doing."""

    IDLE = "idle"
    WAITING = "waiting"
    """For something to consume, or for leave to go on."""
    RUNNING = "running"
    EMITTING = "emitting"
    """Done with its item, waiting for room behind it."""
    RECOVERING = "recovering"
    """Something failed and is being tried again."""
    DEGRADED = "degraded"
    """Tried as often as it may be; the run goes on smaller."""
    STOPPED = "stopped"
    FAILED = "failed"


S = StageState
_ENDS = {S.STOPPED, S.FAILED}
LEGAL_TRANSITIONS: dict[StageState, frozenset[StageState]] = {
    S.IDLE: frozenset({S.WAITING} | _ENDS),
    S.WAITING: frozenset({S.RUNNING, S.IDLE} | _ENDS),
    S.RUNNING: frozenset({S.EMITTING, S.IDLE, S.RECOVERING} | _ENDS),
    S.EMITTING: frozenset({S.IDLE, S.RUNNING} | _ENDS),
    S.RECOVERING: frozenset({S.RUNNING, S.DEGRADED} | _ENDS),
    S.DEGRADED: frozenset({S.RUNNING} | _ENDS),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
}


def _shortest_path(start: StageState, goal: StageState) -> tuple[StageState, ...]:
    """The shortest way of legal changes from one state to another, without passing an end."""
    ways: deque[tuple[StageState, ...]] = deque([(start,)])
    seen = {start}
    while ways:
        way = ways.popleft()
        if way[-1] is goal:
            return way[1:]
        for state in S:
            if state in LEGAL_TRANSITIONS[way[-1]] and state not in seen and (state is goal or state not in _ENDS):
                seen.add(state)
                ways.append((*way, state))
    return ()


TRANSITION_PATHS = {(start, goal): _shortest_path(start, goal) for start in S for goal in S if start is not goal}
"""How a stage gets from any state to any other; empty where it cannot."""
