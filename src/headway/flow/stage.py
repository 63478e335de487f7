"""The stage base class: a small state machine with its own consume/produce loop.

A subclass says what it `consumes` and `produces` and implements `process`; the rest is inherited. A stage of your own
takes ten lines. Its constructor's keyword arguments are the `args` of the configuration:

    @register_stage("short_only")
    class ShortOnly(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        def __init__(self, pipeline: Pipeline, *, most_tokens: int = 8192) -> None:
            super().__init__(pipeline)
            self.most_tokens = most_tokens

        async def process(self, group: SampleGroup) -> SampleGroup | None:
            if group.actions <= self.most_tokens:
                return group
            self.pipeline.drop(group.group_id, DropReason.FILTERED, who=self.role)
            return None

    stages: [{name: short_only, after: rollout, args: {most_tokens: 4096}}]    # in the configuration

Every change of state goes through `change_state`, which checks that it is legal and emits an event; nothing else
measures time. A stage works on up to `width` items at once; its state is that of the busiest item.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from headway.errors import BackendError, ChannelClosed, IllegalTransition
from headway.flow.backends import RunContext
from headway.flow.channel import Channel
from headway.flow.pipeline import Pipeline
from headway.monitor.events import OperationRetry, StateChange
from headway.monitor.wait_graph import WaitEdge
from headway.registry import STAGES
from headway.rollout.concurrency import OrderedTaskGroup
from headway.user_code import raise_plugin_error

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


class Stage(Generic[In, Out]):
    """One station of the pipeline."""

    role: ClassVar[str] = ""
    """Name in the registry, in events and in the wait-for graph. Set by `register_stage`."""
    consumes: ClassVar[type[Any]]
    produces: ClassVar[type[Any]]
    width: int = 1
    """How many items are processed at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.state = StageState.IDLE
        self.inbound: Channel[In] | None = None
        self.outbound: Channel[Out] | None = None
        self.since_s = pipeline.waits.clock()
        """Time of the last change of state."""
        self._listening = self._running = self._emitting = self._recovering = 0
        self._kept: dict[int, float] = {}
        """Groups that were taken in and neither passed on nor dropped, and since when."""

    # -- what a subclass overrides

    async def process(self, item: In) -> Out | None:
        """Return the item for the next stage, or `None` if nothing goes on."""
        raise NotImplementedError

    async def loop(self) -> None:
        """Consume, process and produce until the inbound channel is closed."""
        if self.width == 1:
            while (item := await self.next_item()) is not None:
                await self._handle(item)
            return
        free = asyncio.Semaphore(self.width)
        async with OrderedTaskGroup() as tasks:
            while (item := await self.next_item()) is not None:
                await free.acquire()
                task = tasks.create_task(self._handle(item), name=f"{self.role}/item")
                task.add_done_callback(lambda _: free.release())

    # -- the state machine

    async def run(self) -> None:
        """Run `loop` until it ends, then close the outbound channel."""
        try:
            await self.loop()
            self.change_state(StageState.STOPPED)
            if self.outbound is not None:
                self.outbound.close()
        except asyncio.CancelledError:
            self.change_state(StageState.STOPPED)
            raise
        except BaseException as error:
            self.change_state(StageState.FAILED)
            raise_plugin_error("stage", self.role, type(self), error)

    def change_state(self, state: StageState) -> None:
        """Change the state and emit an event. Raise `IllegalTransition` if the change is not legal."""
        if state is self.state:
            return
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.role}: {self.state} → {state}")
        old, self.state, self.since_s = self.state, state, self.pipeline.waits.clock()
        self.pipeline.events.emit(StateChange(who=self.role, old=str(old), new=str(state)))

    def settle(self, *, listening: int = 0, running: int = 0, emitting: int = 0, recovering: int = 0) -> None:
        """Add to the counts of current activities and change to the state that follows from them, by legal steps."""
        self._listening += listening
        self._running += running
        self._emitting += emitting
        self._recovering += recovering
        if self._recovering:
            goal = StageState.RECOVERING
        elif self._running:
            goal = StageState.DEGRADED if self.role in self.pipeline.recovery.degraded_roles else StageState.RUNNING
        elif self._emitting:
            goal = StageState.EMITTING
        else:
            goal = StageState.WAITING if self._listening else StageState.IDLE
        if goal is not self.state:
            for state in TRANSITION_PATHS[self.state, goal]:
                self.change_state(state)

    async def next_item(self) -> In | None:
        """Return the next item, or `None` when the inbound channel is closed."""
        assert self.inbound is not None, f"{self.role} has no inbound channel"
        if len(self.inbound):  # no wait: items that follow each other are one stretch of work
            return await self.inbound.receive()
        self.settle(listening=1)
        try:
            return await self.inbound.receive()
        except ChannelClosed:
            return None
        finally:
            self._listening -= 1

    async def _handle(self, item: In) -> None:
        """Process one item and send the result on."""
        self.settle(running=1)
        try:
            with self.pipeline.waits.waiting(self.role, lambda: describe_item(item), f"{self.role}.process"):
                made = await self.process(item)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise_plugin_error("stage", self.role, type(self), error)
        finally:
            self._running -= 1
        if made is None:
            self._note_kept_group(item)
        elif self.outbound is not None:
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

    def _note_kept_group(self, item: In) -> None:
        """Remember a group that does not go on, unless it was dropped or a member of it is generated again."""
        group_id = getattr(item, "group_id", None)
        if group_id is not None and self.pipeline.is_delivered(group_id):
            self._kept[group_id] = self.pipeline.waits.clock()

    def waits(self) -> list[WaitEdge]:
        """Return edges of the wait-for graph: groups that ended here without having been dropped."""
        self._kept = {group: since_s for group, since_s in self._kept.items() if self.pipeline.is_delivered(group)}
        what, on = "went in and was neither passed on nor dropped", f"{self.role}.process"
        return [WaitEdge(self.role, f"group {group} {what}", on, since_s) for group, since_s in self._kept.items()]

    def degrade(self, error: BackendError) -> None:
        """Go on with less because retries are used up. Raise `RunStopped` if the run is degraded already."""
        self.pipeline.recovery.exhausted(self.role, error)
        self.settle()

    async def attempt(
        self, what: str, call: Callable[[], Awaitable[T]], *, retries: int, timeout_s: float | None = None
    ) -> T:
        """Await `call`; retry back-end errors that are not fatal, at most `retries` times."""
        backoff_s = self.pipeline.settings.reliability.restart_backoff_s
        for number in range(retries + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    return await call()
            except (BackendError, TimeoutError) as error:
                late = BackendError(f"{what}: not done after {timeout_s} s")
                failure = error if isinstance(error, BackendError) else late
                self.pipeline.recovery.failure(self.role, failure)
                if failure.fatal or number == retries:
                    raise failure from error
                self.pipeline.events.emit(OperationRetry(who=self.role, attempt=number + 1))
            self.settle(recovering=1)
            try:
                await asyncio.sleep(backoff_s * 2**number)
            finally:
                self.settle(recovering=-1)
        raise AssertionError("unreachable")


def describe_item(item: object) -> str:
    """Name an item of a channel in the wait-for graph."""
    for name, what in (("group_id", "group"), ("version", "version"), ("position", "task")):
        if (number := getattr(item, name, None)) is not None:
            return f"{what} {number}"
    return type(item).__name__


StageT = TypeVar("StageT", bound=type[Stage[Any, Any]])


def register_stage(role: str) -> Callable[[StageT], StageT]:
    """Class decorator: make a stage known under `role`. A second class of that name replaces the first."""

    def register(stage: StageT) -> StageT:
        stage.role = role
        STAGES.register(role, stage, replace=True)
        return stage

    return register


def create_role_state_machine(
    role_name: str,
    *,
    pipeline: Pipeline,
    trainer: RunContext | None = None,
    use_async_rl: bool | None = None,
    **args: Any,
) -> Stage[Any, Any]:
    """Make the stage registered as `role_name` for a pipeline.

    `args` are keyword arguments of its constructor, or attributes such as `width`. A pipeline has its trainer and its
    staleness bound already: `trainer` and `use_async_rl` may be given for clarity, and must agree with it.
    """
    if role_name not in STAGES:
        raise KeyError(f"no stage {role_name!r}; there are {', '.join(sorted(STAGES.names()))}")
    if trainer is not None and trainer.backends is not pipeline.backends:
        raise ValueError("trainer: the pipeline belongs to another one")
    if use_async_rl is not None and use_async_rl is not (pipeline.settings.async_generation_ratio > 0):
        alpha = pipeline.settings.async_generation_ratio
        raise ValueError(f"use_async_rl={use_async_rl}: the pipeline has α = {alpha:g}")
    stage_class = STAGES.get(role_name)
    known = inspect.signature(stage_class).parameters
    stage: Stage[Any, Any] = stage_class(pipeline, **{name: args[name] for name in args if name in known})
    for name in args.keys() - known.keys():
        if not hasattr(stage, name):
            raise AttributeError(f"stage {role_name!r} has no {name!r}")
        setattr(stage, name, args[name])
    return stage


class StageState(StrEnum):
    """What a stage is doing."""

    IDLE = "idle"
    WAITING = "waiting"
    """Waits for an item, or for permission to go on."""
    RUNNING = "running"
    EMITTING = "emitting"
    """Has processed its item and waits for room in the outbound channel."""
    RECOVERING = "recovering"
    """An operation failed and is retried."""
    DEGRADED = "degraded"
    """Runs, but its retries were used up a while ago, and the run goes on with less until that is over."""
    STOPPED = "stopped"
    FAILED = "failed"


S = StageState
_ENDS = {S.STOPPED, S.FAILED}
LEGAL_TRANSITIONS: dict[StageState, frozenset[StageState]] = {
    S.IDLE: frozenset({S.WAITING} | _ENDS),
    S.WAITING: frozenset({S.RUNNING, S.IDLE} | _ENDS),
    S.RUNNING: frozenset({S.EMITTING, S.IDLE, S.RECOVERING, S.DEGRADED} | _ENDS),
    S.EMITTING: frozenset({S.IDLE, S.RUNNING} | _ENDS),
    S.RECOVERING: frozenset({S.RUNNING, S.DEGRADED} | _ENDS),
    S.DEGRADED: frozenset({S.RUNNING, S.EMITTING, S.IDLE, S.RECOVERING} | _ENDS),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
}


def _shortest_path(start: StageState, goal: StageState) -> tuple[StageState, ...]:
    """Return the shortest sequence of legal changes between two states that passes no end state."""
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
"""Legal changes that lead from any state to any other; empty where there are none."""
