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
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from headway.errors import BackendError, ChannelClosed, IllegalTransition
from headway.flow.channel import Channel
from headway.flow.line import Line
from headway.flow.states import LEGAL, PATHS, StageState
from headway.rollout.tasks import OrderedTaskGroup

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

    def __init__(self, line: Line) -> None:
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
        if state not in LEGAL[self.state]:
            raise IllegalTransition(f"{self.role}: {self.state} → {state}")
        old, self.state = self.state, state
        self.line.events.emit("state", self.role, old=str(old), new=str(state))

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
            for state in PATHS[self.state, goal]:
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
                self.line.events.emit("retry", self.role, attempt=number + 1)
            self.settle(recovering=1)
            try:
                await asyncio.sleep(backoff_s * 2**number)
            finally:
                self.settle(recovering=-1)
        raise AssertionError("unreachable")


StageT = TypeVar("StageT", bound=type[Stage[Any, Any]])
REGISTRY: dict[str, type[Stage[Any, Any]]] = {}
"""Every stage that can be named in a flow."""


def register_stage(role: str) -> Callable[[StageT], StageT]:
    """Class decorator: make a stage known under `role`. A second class of that name replaces the first."""

    def register(stage: StageT) -> StageT:
        stage.role = role
        REGISTRY[role] = stage
        return stage

    return register


def create_role_state_machine(role_name: str, *, pipeline: Line, **overrides: object) -> Stage[Any, Any]:
    """One stage by name, for the given line. `overrides` are set on it as attributes (such as `width`)."""
    if role_name not in REGISTRY:
        raise KeyError(f"no stage {role_name!r}; there are {', '.join(sorted(REGISTRY))}")
    stage = REGISTRY[role_name](pipeline)
    for name, value in overrides.items():
        if not hasattr(stage, name):
            raise AttributeError(f"stage {role_name!r} has no {name!r}")
        setattr(stage, name, value)
    return stage
