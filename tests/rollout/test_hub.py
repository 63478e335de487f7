"""The hub in front of simulated replicas: where requests go, and what becomes of them when something happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headway.config import ReliabilityConfig
from headway.config.simulation_config import FaultConfig
from headway.engines.base import Progress
from headway.errors import EngineError
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica, ReplicaHealth, RequestLane
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import FinishReason
from tests.flow.factory import RELIABILITY, make_engine_cost
from tests.sim.factory import request, serve


class World:
    """A hub, its replicas (ten actions a second each) and everything that has happened."""

    def __init__(
        self, engines: int, *faults: FaultConfig, reliability: ReliabilityConfig = RELIABILITY, **cost: Any
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.injector = FaultInjector(faults, engines=engines)
        price = make_engine_cost(**{"step_s": 0.1, "slots": 2, **cost})
        names = [f"engine/{number}" for number in range(engines)]
        self.engines = [SimulatedEngine(name, price, health=self.injector.health(name)) for name in names]
        self.events: list[LoggedEvent] = []
        log = EventLog(self.loop.time, self.events.append)
        self.hub = InferenceHub(self.engines, events=log, reliability=reliability, clock=self.loop.time)
        self.failed: list[tuple[str, float]] = []
        self.hub.begin_pipeline(lambda replica, error: self.failed.append((replica.name, self.loop.time())))
        self.progress: dict[str, Progress] = {}

    async def begin(self, *versions: int) -> World:
        """Serve something everywhere: version 0, or one version for each replica."""
        for replica, version in zip(self.hub.replicas, versions or [0] * len(self.engines), strict=True):
            await self.serve(replica, version)
        self.injector.start()
        return self

    async def serve(self, replica: Replica, version: int) -> None:
        await serve(replica.engine, version)
        self.hub.version_changed(replica)

    async def revive(self, replica: Replica) -> None:
        await replica.engine.restart()
        await serve(replica.engine, 0)
        self.hub.revive(replica)

    def ask(self, name: str, length: int = 10, *, session: str = "", **how: Any) -> asyncio.Task[FinishReason]:
        """One request, on its way when this returns to the loop."""
        self.progress[name] = Progress()
        wanted = replace(request(name, length), session=session or name)
        return self.loop.create_task(self.hub.generate(wanted, self.progress[name], **how))

    def ran_on(self, name: str) -> list[tuple[str, float]]:
        """Every attempt at a request: where and when it began."""
        starts = [event for event in self.events if event.kind == "request.start" and event.data["request"] == name]
        return [(event.who, round(event.time_s, 3)) for event in starts]

    def ended(self, name: str) -> list[tuple[str, int]]:
        """How every attempt ended, and with how many actions."""
        ends = [event for event in self.events if event.kind == "request.end" and event.data["request"] == name]
        return [(event.data["finish"], event.data["actions"]) for event in ends]


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_on_virtual_clock(main(), max_time_s=10_000)


# -- routing


def test_a_request_goes_to_the_least_loaded_replica() -> None:
    async def main() -> None:
        world = await World(3).begin()
        tasks = [world.ask(name) for name in "abcdef"]
        await asyncio.wait(tasks)
        places = [world.ran_on(name)[0][0] for name in "abcdef"]
        assert places == ["engine/0", "engine/1", "engine/2"] * 2

    play(main)


def test_turns_of_a_session_stay_on_one_replica_while_it_has_room() -> None:
    async def main() -> None:
        world = await World(3).begin()
        await world.ask("s/0", session="s")
        busy = [world.ask(name, 1000) for name in ("x", "y", "z")]
        home = world.ran_on("s/0")[0][0]
        await asyncio.sleep(1)
        await world.ask("s/1", session="s")
        assert world.ran_on("s/1")[0][0] == home
        world.hub.end_session("s")
        others = [world.ask("u"), world.ask("v")]
        await asyncio.sleep(0.05)
        await world.ask("s/2", session="s")
        places = {world.ran_on(name)[0][0] for name in ("u", "v", "s/2")}
        assert len(places) == 3, "without the session it goes where the load is least"
        for task in (*busy, *others):
            task.cancel()

    play(main)


def test_a_session_whose_replica_is_full_goes_elsewhere() -> None:
    async def main() -> None:
        world = await World(2, slots=1).begin()
        await world.ask("s/0", session="s")
        blocking = world.ask("x", 1000, bound=0)
        await asyncio.sleep(1)
        await world.ask("s/1", session="s")
        assert [world.ran_on(name)[0][0] for name in ("s/0", "s/1")] == ["engine/0", "engine/1"]
        blocking.cancel()

    play(main)


def test_a_free_slot_takes_the_next_request_at_that_very_time() -> None:
    async def main() -> None:
        world = await World(2, slots=1).begin()
        tasks = [world.ask("short", 10), world.ask("long", 100), world.ask("a", 20), world.ask("b", 10)]
        await asyncio.wait(tasks)
        assert world.ran_on("a") == [("engine/0", 1.0)]
        assert world.ran_on("b") == [("engine/0", 3.0)], "no request waits for the long one"

    play(main)


def test_requests_of_older_groups_go_first_whenever_they_came() -> None:
    async def main() -> None:
        world = await World(1, slots=1).begin()
        tasks = [world.ask("running", priority=9)]
        tasks += [world.ask("young", priority=5), world.ask("old", priority=1), world.ask("older", priority=0)]
        await asyncio.wait(tasks)
        order = [event.data["request"] for event in world.events if event.kind == "request.start"]
        assert order == ["running", "older", "old", "young"]

    play(main)


def test_validation_goes_before_training() -> None:
    async def main() -> None:
        world = await World(1, slots=1).begin()
        tasks = [world.ask("running"), world.ask("train"), world.ask("validate", priority=7, lane=RequestLane.VALIDATE)]
        await asyncio.wait(tasks)
        assert world.ran_on("validate") == [("engine/0", 1.0)] and world.ran_on("train") == [("engine/0", 2.0)]

    play(main)


def test_members_of_a_group_spread_over_replicas_and_those_of_a_bound_group_do_not() -> None:
    async def main() -> None:
        world = await World(2).begin()
        free = [world.ask(f"free.{n}", priority=1) for n in range(2)]
        await asyncio.wait(free)
        bound = [world.ask(f"bound.{n}", priority=1, bound=1) for n in range(4)]
        await asyncio.wait(bound)
        assert {world.ran_on(f"free.{n}")[0][0] for n in range(2)} == {"engine/0", "engine/1"}
        assert {world.ran_on(f"bound.{n}")[0][0] for n in range(4)} == {"engine/1"}
        assert [world.ran_on(f"bound.{n}")[0][1] for n in range(4)] == [1, 1, 2, 2], "they wait for their own"

    play(main)


def test_what_waits_for_a_replica_that_goes_out_of_service_runs_elsewhere_at_once() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="crash", target="engine/0", at_s=3), slots=1).begin()
        tasks = [world.ask("a", 50, bound=0), world.ask("b", 10, bound=0)]
        await asyncio.wait(tasks)
        assert world.ran_on("b") == [("engine/1", 3.0)]

    play(main)


def test_what_is_bound_to_a_replica_out_of_service_takes_a_free_slot_elsewhere_at_once() -> None:
    async def main() -> None:
        world = await World(2, slots=1).begin()
        world.hub.fail(world.hub.replicas[0], EngineError("gone"))
        await world.ask("a", bound=0)
        assert world.ran_on("a") == [("engine/1", 0.0)]

    play(main)


# -- interruption


def test_a_paused_lane_keeps_what_it_made_and_goes_on_where_a_slot_is_free() -> None:
    async def main() -> None:
        world = await World(2, slots=1).begin()
        task, other = world.ask("a", 100), world.ask("v", 20, lane=RequestLane.VALIDATE)
        await asyncio.sleep(1)
        await world.hub.pause(RequestLane.TRAIN)
        await asyncio.sleep(2)
        assert len(world.progress["a"].actions) == 10, "stopped at an action boundary"
        assert other.done(), "the other lane was not touched"
        first = world.ran_on("a")[0][0]
        world.ask("w", 1000, lane=RequestLane.VALIDATE, bound=int(first[-1]))
        await asyncio.sleep(0)
        world.hub.resume(RequestLane.TRAIN)
        assert await task is FinishReason.STOP
        assert len(world.ran_on("a")) == 2 and world.ran_on("a")[1][0] != first, "it went on on the other replica"
        assert world.ended("a") == [("aborted", 10), ("stop", 90)]
        assert [(run_.version, run_.count) for run_ in world.progress["a"].runs] == [(0, 100)]

    play(main)


def test_a_request_of_a_paused_lane_does_not_begin() -> None:
    async def main() -> None:
        world = await World(1).begin()
        await world.hub.pause(RequestLane.TRAIN)
        task = world.ask("a")
        await asyncio.sleep(5)
        assert world.ran_on("a") == []
        world.hub.resume(RequestLane.TRAIN)
        await task
        assert world.ran_on("a") == [("engine/0", 5.0)]

    play(main)


def test_an_interruption_without_a_pause_goes_on_at_once() -> None:
    async def main() -> None:
        world = await World(1).begin()
        task = world.ask("a", 100)
        await asyncio.sleep(3)
        await world.hub.interrupt(RequestLane.TRAIN)
        await task
        assert world.loop.time() == pytest.approx(10.0, abs=0.2)
        assert sum(made for _, made in world.ended("a")) == 100 and len(world.ended("a")) == 2

    play(main)


def test_halted_engines_make_nothing_and_keep_every_request_where_it_is() -> None:
    async def main() -> None:
        world = await World(2).begin()
        tasks = [world.ask("a", 20), world.ask("b", 20)]
        await asyncio.sleep(1)
        await world.hub.halt_engines()
        before = {name: len(progress.actions) for name, progress in world.progress.items()}
        await asyncio.sleep(30)
        assert (
            {name: len(progress.actions) for name, progress in world.progress.items()} == before == {"a": 10, "b": 10}
        )
        await world.hub.continue_engines()
        await asyncio.wait(tasks)
        assert world.loop.time() == pytest.approx(32.0)
        assert len(world.ran_on("a")) == len(world.ran_on("b")) == 1

    play(main)


def test_cancelling_a_request_aborts_it_and_frees_its_slot_at_once() -> None:
    async def main() -> None:
        world = await World(1, slots=1).begin()
        task, following = world.ask("a", 1000), world.ask("b", 10)
        await asyncio.sleep(2)
        task.cancel()
        await following
        assert world.ran_on("b") == [("engine/0", 2.0)]
        assert world.hub.replicas[0].load == 0

    play(main)


def test_a_request_cancelled_in_the_tick_of_its_grant_gives_the_slot_back() -> None:
    async def main() -> None:
        world = await World(1, slots=1).begin()
        running, granted, following = world.ask("a", 1000), world.ask("b"), world.ask("c")
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.sleep(0)  # the slot is given to b, which has not run yet
        granted.cancel()
        await following
        assert world.ran_on("b") == [] and world.hub.replicas[0].load == 0

    play(main)


# -- failure


def test_a_crash_under_a_request_goes_on_elsewhere_with_what_was_made() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="crash", target="engine/0", at_s=3.05)).begin()
        task = world.ask("a", 100)
        assert await task is FinishReason.STOP
        assert world.ran_on("a") == [("engine/0", 0.0), ("engine/1", 3.05)]
        assert world.ended("a") == [("failed", 30), ("stop", 70)]
        progress = world.progress["a"]
        assert len(progress.actions) == len(progress.logps) == sum(part.count for part in progress.runs) == 100
        assert world.failed == [("engine/0", 3.05)]
        assert world.hub.replicas[0].health is ReplicaHealth.DOWN and world.hub.up == 1

    play(main)


def test_one_crash_is_reported_once_whatever_ran_there() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="crash", target="engine/0", at_s=2), slots=4).begin()
        await asyncio.wait([world.ask(f"{n}", 50) for n in range(8)])
        assert world.failed == [("engine/0", 2.0)]
        assert [event.who for event in world.events if event.kind == "down"] == ["engine/0"]

    play(main)


def test_a_revived_replica_takes_what_waits() -> None:
    async def main() -> None:
        world = await World(1, FaultConfig(kind="crash", target="engine/0", at_s=1)).begin()
        task = world.ask("a", 20)
        await asyncio.sleep(5)
        assert world.hub.up == 0 and world.hub.served == -1
        await world.revive(world.hub.replicas[0])
        await task
        assert world.ran_on("a") == [("engine/0", 0.0), ("engine/0", 7.0)]
        assert [part.count for part in world.progress["a"].runs] == [20]

    play(main)


def test_a_replica_that_hangs_under_a_request_is_found_at_the_deadline() -> None:
    async def main() -> None:
        reliability = replace(RELIABILITY, request_timeout_s=20)
        world = await World(2, FaultConfig(kind="hang", target="engine/0", at_s=3), reliability=reliability).begin()
        assert await world.ask("a", 50) is FinishReason.STOP
        assert world.failed == [("engine/0", 20.0)]
        assert [place for place, _ in world.ran_on("a")] == ["engine/0", "engine/1"]
        assert world.ended("a") == [("failed", 30), ("stop", 20)]

    play(main)


def test_a_long_request_on_a_replica_that_works_is_only_moved_on() -> None:
    async def main() -> None:
        reliability = replace(RELIABILITY, request_timeout_s=20)
        world = await World(1, reliability=reliability).begin()
        long = world.ask("long", 500)
        for _ in range(6):
            await world.ask("short", 50)
        assert await long is FinishReason.STOP
        assert world.failed == [] and sum(made for _, made in world.ended("long")) == 500
        errors = [event.data for event in world.events if event.kind == "error"]
        assert errors[0] == {"error": "EngineError", "message": "long: no end after 20 s"}

    play(main)


def test_a_hung_replica_that_does_not_answer_a_pause_is_taken_out_of_service() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="hang", target="engine/0", at_s=1), slots=1).begin()
        tasks = [world.ask("a", 100), world.ask("b", 100)]
        await asyncio.sleep(2)
        await world.hub.halt_engines()
        assert world.failed == [("engine/0", 2 + RELIABILITY.abort_timeout_s)]
        await world.hub.continue_engines()
        await world.revive(world.hub.replicas[0])
        await asyncio.wait(tasks)

    play(main)


def test_a_replica_that_died_with_nothing_to_do_is_found_by_looking() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="crash", target="engine/1", at_s=1)).begin()
        await asyncio.sleep(2)
        assert world.failed == []
        world.hub.check()
        assert world.failed == [("engine/1", 2.0)]

    play(main)


def test_a_request_that_keeps_failing_raises_after_its_budget() -> None:
    async def main() -> None:
        reliability = replace(RELIABILITY, sample_retries=2)
        lost = FaultConfig(kind="lost_message", target="engine/0", at_s=0, for_s=100)
        world = await World(1, lost, reliability=reliability).begin()
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="engine/0: a message was lost"):
            await world.ask("a")
        assert len(world.ran_on("a")) == 3
        errors = [event for event in world.events if event.kind == "error"]
        assert len(errors) == 3 and {event.who for event in errors} == {"engine/0"}
        assert world.hub.replicas[0].load == 0

    play(main)


def test_a_request_that_failed_on_a_replica_is_tried_on_another_first() -> None:
    async def main() -> None:
        world = await World(2, FaultConfig(kind="lost_message", target="engine/0", at_s=0, for_s=100)).begin()
        await asyncio.sleep(0.5)
        assert await world.ask("a") is FinishReason.STOP
        assert [place for place, _ in world.ran_on("a")] == ["engine/0", "engine/1"]

    play(main)


def test_a_request_under_which_replicas_keep_crashing_raises_after_its_budget() -> None:
    async def main() -> None:
        crashes = [FaultConfig(kind="crash", target="engine/0", at_s=second + 0.05) for second in range(1, 60, 3)]
        reliability = replace(RELIABILITY, sample_retries=1)
        world = World(1, *crashes, reliability=reliability, restart_s=0.0)
        await world.begin()
        world.hub._on_failure = lambda replica, error: world.loop.create_task(world.revive(replica))
        with pytest.raises(EngineError, match="a: replicas crashed under it 2 times"):
            await world.ask("a", 10_000)
        assert len(world.progress["a"].actions) >= 10 + 29, "what was made before is not lost"

    play(main)


# -- versions


def test_replicas_too_old_get_nothing_that_is_trained_but_may_validate() -> None:
    async def main() -> None:
        world = await World(2).begin(0, 3)
        world.hub.require(2)
        trained = [world.ask(f"t{n}") for n in range(4)]
        validated = world.ask("v", lane=RequestLane.VALIDATE)
        await asyncio.wait([*trained, validated])
        assert {world.ran_on(f"t{n}")[0][0] for n in range(4)} == {"engine/1"}
        assert world.ran_on("v") == [("engine/0", 0.0)]
        assert world.hub.served == 0

    play(main)


def test_a_stale_replica_takes_work_again_at_the_moment_of_its_flip() -> None:
    async def main() -> None:
        world = await World(1).begin(0)
        world.hub.require(1)
        task = world.ask("a")
        await asyncio.sleep(4)
        assert world.ran_on("a") == []
        await world.serve(world.hub.replicas[0], 1)
        await task
        assert world.ran_on("a") == [("engine/0", 4.0)] and world.progress["a"].started == 1

    play(main)


def test_a_request_that_spans_a_flip_says_which_version_made_what() -> None:
    async def main() -> None:
        world = await World(1).begin(0)
        task = world.ask("a", 50)
        await asyncio.sleep(2)
        await world.serve(world.hub.replicas[0], 1)
        await task
        assert [(part.version, part.count) for part in world.progress["a"].runs] == [(0, 20), (1, 30)]
        assert len(world.ran_on("a")) == 1, "an update interrupts nothing"

    play(main)


def test_the_version_served_is_the_oldest_that_a_replica_in_service_answers_with() -> None:
    async def main() -> None:
        world = await World(3).begin(4, 2, 3)
        assert world.hub.served == 2
        world.hub.fail(world.hub.replicas[1], EngineError("gone"))
        assert world.hub.served == 3

    play(main)


# -- the wait-for graph


def test_the_graph_names_replicas_lanes_and_restarts() -> None:
    async def main() -> None:
        world = await World(2, slots=1).begin()
        tasks = [world.ask(name, 100) for name in "abc"]
        await asyncio.sleep(1)
        world.hub.fail(world.hub.replicas[1], EngineError("gone"))
        edges = {(wait.owner, wait.what, wait.on) for wait in world.hub.waits()}
        assert edges == {
            ("generate", "request a, 0 tokens so far, the oldest of 1", "engine/0"),
            ("generate", "1 train requests wait for a free slot (1 of 2 up)", "engine/0"),
        }
        await world.hub.pause(RequestLane.TRAIN)
        assert any("paused" in wait.what for wait in world.hub.waits())
        for task in tasks:
            task.cancel()

    play(main)
