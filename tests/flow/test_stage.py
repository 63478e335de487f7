"""One stage by itself: its loop, its states, its retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.errors import BackendError, PluginError, TrainerCrashed, TrainerError
from headway.flow.channel import Channel
from headway.flow.pipeline import Pipeline
from headway.flow.stage import LEGAL_TRANSITIONS, Stage, StageState, create_role_state_machine, register_stage
from headway.monitor.event_log import LoggedEvent
from headway.registry import STAGES
from headway.sim.virtual_clock import run_on_virtual_clock
from tests.flow.factory import make_line, make_scenario, own_stages

Body = Callable[[Pipeline, list[LoggedEvent]], Coroutine[Any, Any, None]]


def play(body: Body, run_dir: Path) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline, events = make_line(make_scenario(), run_dir, tasks=tasks)
            try:
                await body(pipeline, events)
            finally:
                pipeline.recorder.ledger.close()

    run_on_virtual_clock(main(), max_time_s=10_000)


class Doubling(Stage[int, int]):
    """Takes a second for each item; lets odd ones go, breaks on 13."""

    role = "doubling"
    consumes = produces = int

    async def process(self, item: int) -> int | None:
        await asyncio.sleep(1)
        if item == 13:
            raise ValueError("unlucky")
        return None if item % 2 else item * 2


def make_stage(pipeline: Pipeline, *items: int, room: int = 100, width: int = 1) -> Stage[int, int]:
    """A stage with `items` before it and nothing more to come."""
    stage = Doubling(pipeline)
    stage.width = width
    stage.inbound = Channel("before", int, 100, producer="before", consumer="doubling", waits=pipeline.waits)
    stage.outbound = Channel("after", int, room, producer="doubling", consumer="after", waits=pipeline.waits)
    for item in items:
        stage.inbound.put(item)
    stage.inbound.close()
    return stage


def states(events: list[LoggedEvent]) -> list[tuple[float, str]]:
    return [(event.time_s, event.data["new"]) for event in events if event.kind == "state"]


def test_items_are_worked_on_one_after_the_other_and_what_becomes_nothing_is_not_sent(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, 3, 4)
        await stage.run()
        assert asyncio.get_running_loop().time() == 3
        assert stage.outbound is not None and stage.outbound.drain() == [4, 8]

    play(body, tmp_path)


def test_as_many_items_as_the_width_are_worked_on_at_once(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, 4, 6, 8, 10, width=2)
        await stage.run()
        assert asyncio.get_running_loop().time() == 3
        assert stage.outbound is not None and stage.outbound.drain() == [4, 8, 12, 16, 20]

    play(body, tmp_path)


@pytest.mark.parametrize("width", [1, 3])
def test_at_the_end_of_the_stream_it_stops_and_ends_the_stream_behind_it(width: int, tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, width=width)
        await stage.run()
        assert stage.state is StageState.STOPPED and stage.outbound is not None
        assert await stage.outbound.receive() == 4
        following = Doubling(pipeline)
        following.inbound = stage.outbound
        await following.run()
        assert following.state is StageState.STOPPED

    play(body, tmp_path)


@pytest.mark.parametrize("width", [1, 3])
def test_a_stage_that_breaks_has_failed_and_says_with_what(width: int, tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, 13, 4, width=width)
        with pytest.raises((PluginError, ExceptionGroup)) as caught:
            await stage.run()
        assert "unlucky" in str(caught.value) or "unlucky" in repr(caught.value.exceptions)  # type: ignore[union-attr]
        assert stage.state is StageState.FAILED

    play(body, tmp_path)


def test_a_cancelled_stage_has_stopped(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, 4)
        task = asyncio.ensure_future(stage.run())
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and stage.state is StageState.STOPPED

    play(body, tmp_path)


def test_its_states_tell_what_it_was_doing_and_when(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline, 2, 4, room=1)
        assert stage.outbound is not None
        asyncio.get_running_loop().call_later(5, stage.outbound.drain)
        await stage.run()
        assert states(events) == [
            (0, "waiting"),
            (0, "running"),
            (2, "emitting"),
            (5, "idle"),
            (5, "waiting"),
            (5, "stopped"),
        ]

    play(body, tmp_path)


def test_every_change_it_reports_is_legal_and_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        await make_stage(pipeline, *range(12), room=20, width=3).run()
        changes = [(event.data["old"], event.data["new"]) for event in events if event.kind == "state"]
        assert changes[0][0] == "idle"
        assert all(before[1] == after[0] for before, after in pairwise(changes))
        assert all(StageState(new) in LEGAL_TRANSITIONS[StageState(old)] for old, new in changes)

    play(body, tmp_path)


# -- trying again


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, *failures: BaseException | float) -> None:
        self._failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        failure = self._failures.pop(0) if self._failures else None
        if isinstance(failure, BaseException):
            raise failure
        if failure is not None:
            await asyncio.sleep(failure)
        return "done"


def test_what_fails_is_tried_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage, call = make_stage(pipeline), Flaky(TrainerError("one"), TrainerError("two"), TrainerError("three"))
        stage.settle(running=1)
        assert await stage.attempt("step 1", call, retries=3) == "done"
        assert asyncio.get_running_loop().time() == 0.5 + 1.0 + 2.0
        assert [event.data for event in events if event.kind == "error"] == [
            {"error": "TrainerError", "message": message} for message in ("one", "two", "three")
        ]
        assert [event.data["attempt"] for event in events if event.kind == "retry"] == [1, 2, 3]
        assert (0, "recovering") in states(events) and stage.state is StageState.RUNNING

    play(body, tmp_path)


def test_after_its_budget_the_last_error_comes_out(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        call = Flaky(*[TrainerError(f"failure {number}") for number in range(9)])
        with pytest.raises(TrainerError, match="failure 2"):
            await make_stage(pipeline).attempt("step 1", call, retries=2)
        assert call.calls == 3 == pipeline.recovery.failures

    play(body, tmp_path)


def test_what_is_fatal_is_not_tried_again(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        call = Flaky(TrainerCrashed("gone"))
        with pytest.raises(TrainerCrashed, match="gone"):
            await make_stage(pipeline).attempt("step 1", call, retries=5)
        assert call.calls == 1

    play(body, tmp_path)


def test_what_takes_too_long_is_tried_again_and_named(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = make_stage(pipeline)
        assert await stage.attempt("ref_logp of group 3", Flaky(100.0), retries=1, timeout_s=4) == "done"
        with pytest.raises(BackendError, match="ref_logp of group 3: not done after 4 s"):
            await stage.attempt("ref_logp of group 3", Flaky(100.0, 100.0), retries=1, timeout_s=4)

    play(body, tmp_path)


def test_what_is_no_failure_of_a_back_end_is_not_tried_again(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        call = Flaky(KeyError("bug"))
        with pytest.raises(KeyError):
            await make_stage(pipeline).attempt("step 1", call, retries=5)
        assert call.calls == 1

    play(body, tmp_path)


# -- by name


def test_a_stage_is_made_by_its_name_with_what_is_asked_for(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        stage = create_role_state_machine("reward", pipeline=pipeline, width=7)
        assert (stage.role, stage.width, stage.pipeline) == ("reward", 7, pipeline)
        assert create_role_state_machine("rollout", pipeline=pipeline).state is StageState.IDLE
        with pytest.raises(KeyError, match="no stage 'rewards'; there are critic, dataloader, generate"):
            create_role_state_machine("rewards", pipeline=pipeline)
        with pytest.raises(AttributeError, match="stage 'reward' has no 'widht'"):
            create_role_state_machine("reward", pipeline=pipeline, widht=7)

    play(body, tmp_path)


def test_a_second_class_of_a_name_replaces_the_first(tmp_path: Path) -> None:
    async def body(pipeline: Pipeline, events: list[LoggedEvent]) -> None:
        with own_stages():
            register_stage("reward")(Doubling)
            assert isinstance(create_role_state_machine("reward", pipeline=pipeline), Doubling)
        assert not isinstance(create_role_state_machine("reward", pipeline=pipeline), Doubling)
        Doubling.role = "doubling"

    play(body, tmp_path)
    assert "doubling" not in STAGES
