"""What a hostile reading found: environments, verdicts, requests and halts that used to end or wedge a run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from benchmarks.instant_engine import InstantEngine

from headway.engines.base import Progress
from headway.environments.base import Environment, Observation
from headway.monitor.event_log import EventLog
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import QueuedRequest
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_weights import SimulatedReceiver
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import DropReason, Episode, Generation, Score, Task, concatenate_actions
from tests.flow.factory import RELIABILITY, make_engine_cost
from tests.rollout.factory import Rollout
from tests.sim.factory import request, serve


def play(main: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]]) -> None:
    """A test inside a task group, as a line has one."""

    async def outer() -> None:
        async with asyncio.TaskGroup() as tasks:
            await main(tasks)

    run_on_virtual_clock(outer(), max_time_s=10_000)


# -- environments


class Mean:
    """Environments of which the first one made does one thing wrong; the others are as they should be."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.made = 0

    def __call__(self, task: Task) -> Environment:
        self.made += 1
        if self.made == 1 and self.wrong == "cannot be made":
            raise OSError("no container to be had")
        return MeanEnvironment(self.wrong if self.made == 1 else "")


class MeanEnvironment:
    def __init__(self, wrong: str) -> None:
        self._wrong = wrong

    async def reset(self, task: Task) -> Observation:
        return Observation(hint=10)

    async def step(self, generation: Generation) -> Observation:
        if self._wrong == "cancels itself":
            raise asyncio.CancelledError
        info = {"seen": {1, 2}} if self._wrong == "says what JSON cannot" else {}
        return Observation(done=True, reward=1.0, info=info)

    async def close(self) -> None:
        if self._wrong == "does not let itself be closed":
            raise OSError("the container is gone")
        if self._wrong == "hangs when it is closed":
            await asyncio.get_running_loop().create_future()
        if self._wrong == "cancels its own closing":
            raise asyncio.CancelledError


@pytest.mark.parametrize("wrong", ["cannot be made", "cancels itself", "says what JSON cannot"])
def test_an_environment_that_plays_foul_costs_one_member_which_is_replaced(wrong: str) -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=Mean(wrong), group_size=2).begin()
        rollout.start()
        await asyncio.wait_for(rollout.full.wait(), 100)
        assert rollout.book.finished == ["0.1", "0.2"]
        assert rollout.book.dropped["0.0"][0] is DropReason.ENVIRONMENT_FAILED
        assert len(rollout.times("error", error="EnvironmentFailed")) == 1

    play(main)


@pytest.mark.parametrize(
    "wrong", ["does not let itself be closed", "hangs when it is closed", "cancels its own closing"]
)
def test_an_environment_that_cannot_be_closed_is_complained_of_and_its_episode_counts(wrong: str) -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=Mean(wrong), group_size=2).begin()
        rollout.start()
        await asyncio.wait_for(rollout.full.wait(), 100)
        assert sorted(rollout.book.finished) == ["0.0", "0.1"] and not rollout.book.dropped
        assert len(rollout.times("error", error="EnvironmentFailed")) == 1
        assert rollout.event_loop.time() <= 1.0 + RELIABILITY.abort_timeout_s

    play(main)


# -- verdicts


class Foul:
    """A reward with one bad verdict."""

    def __init__(self, verdict: float | BaseException) -> None:
        self.verdicts: list[float | BaseException] = [verdict]

    async def score(self, episode: Episode) -> Score:
        verdict = self.verdicts.pop() if self.verdicts else 0.5
        if isinstance(verdict, BaseException):
            raise verdict
        return Score(value=verdict)


@pytest.mark.parametrize("verdict", [float("nan"), float("inf"), asyncio.CancelledError()], ids=repr)
def test_a_verdict_that_is_no_number_is_asked_for_again(verdict: float | BaseException) -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, reward=Foul(verdict)).begin()
        group = rollout.start()
        await rollout.full.wait()
        (future,) = group.scores.values()
        assert await asyncio.wait_for(asyncio.shield(future), 100) == Score(value=0.5)
        assert len(rollout.times("error", error="RewardError")) == 1

    play(main)


# -- requests


def test_requests_bound_to_a_replica_and_cancelled_while_they_wait_are_forgotten() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, slots=1).begin()
        running = asyncio.ensure_future(rollout.hub.generate(request("first", 100), Progress(), bound=0))
        await asyncio.sleep(0)
        names = {f"waits {number}" for number in range(20)}
        waiting = [tasks.create_task(rollout.hub.generate(request(n, 9), Progress(), bound=0)) for n in names]
        await asyncio.sleep(1)
        for task in waiting:
            task.cancel()
        await running
        del waiting, task
        gc.collect()
        assert not [item for item in gc.get_objects() if isinstance(item, QueuedRequest) and item.request_id in names]
        assert rollout.hub.waits() == []

    play(main)


class Counting(SimulatedReceiver):
    """Counts how often anybody asks for its version."""

    asked = 0

    @property
    def version(self) -> int:  # type: ignore[override]
        Counting.asked += 1
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version


def looks_per_update(count: int) -> int:
    """How often versions are looked at while `count` replicas change theirs, each told and asked as in a line."""

    async def main() -> int:
        clock = asyncio.get_running_loop().time
        engines = [InstantEngine(f"engine/{number}") for number in range(count)]
        for engine in engines:
            engine.receiver = engine._receiver = Counting(engine._switch)
        hub = InferenceHub(engines, events=EventLog(clock), reliability=RELIABILITY, clock=clock)
        before = 0
        for version in (0, 1):
            before = Counting.asked
            for replica in hub.replicas:
                await serve(replica.engine, version)
                hub.version_changed(replica)
                hub.require(version)
                assert hub.served in (0, version)
        return Counting.asked - before

    return run_on_virtual_clock(main())


def test_the_work_of_an_update_grows_with_the_replicas_and_not_with_their_square() -> None:
    assert looks_per_update(80) <= 2.5 * looks_per_update(40)


# -- halts


def make_hub(kind: type[SimulatedEngine] = SimulatedEngine) -> InferenceHub:
    clock = asyncio.get_running_loop().time
    engine = kind("engine/0", make_engine_cost())
    return InferenceHub([engine], events=EventLog(clock), reliability=RELIABILITY, clock=clock)


async def cut_off(call: Coroutine[Any, Any, None], after_s: float | None = None) -> None:
    """Cancelled after so long; `None`: before its first step."""
    task = asyncio.ensure_future(call)
    if after_s is not None:
        await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])


async def made_in(hub: InferenceHub, seconds: float, name: str) -> int:
    """Actions that a request gets in so much time."""
    progress = Progress()
    task = asyncio.ensure_future(hub.generate(request(name, 1000), progress))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
    return len(progress.actions)


class SlowToPause(SimulatedEngine):
    async def pause(self) -> None:
        await super().pause()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", [SimulatedEngine, SlowToPause])
@pytest.mark.parametrize("after_s", [None, 0.0, 0.05], ids=["before it began", "in the same tick", "half-way"])
def test_a_halt_that_is_cut_off_leaves_the_engine_as_it_should_be(
    after_s: float | None, kind: type[SimulatedEngine]
) -> None:
    async def main() -> None:
        hub = make_hub(kind)
        await serve(hub.replicas[0].engine, 0)
        hub.version_changed(hub.replicas[0])

        async def hold() -> None:
            try:
                await hub.halt_engines()
                await asyncio.sleep(1)
            finally:
                await hub.continue_engines()

        await cut_off(hold(), after_s)
        assert await made_in(hub, 1.0, "a") >= 99, "goes on"
        await hub.halt_engines()
        assert await made_in(hub, 1.0, "b") == 0, "stands still"
        await hub.continue_engines()
        assert await made_in(hub, 1.0, "c") >= 99, "goes on"

    run_on_virtual_clock(main(), max_time_s=100)


# -- sequences


def stretches(*items: int) -> list[Any]:
    return [list(items), tuple(items), range(items[0], items[-1] + 1), np.array(items)]


@pytest.mark.parametrize("left", stretches(1, 2, 3), ids=lambda stretch: type(stretch).__name__)
@pytest.mark.parametrize("right", stretches(4, 5, 6), ids=lambda stretch: type(stretch).__name__)
def test_two_stretches_of_any_kind_are_put_one_behind_the_other(left: Any, right: Any) -> None:
    both = concatenate_actions(left, right)
    assert [int(both[index]) for index in range(len(both))] == [1, 2, 3, 4, 5, 6]
