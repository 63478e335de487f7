"""A run that gets nowhere says who waits for whom, and is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config import StageConfig
from headway.config.simulation_config import FaultConfig
from headway.errors import Deadlock
from headway.flow.channel import Channel
from headway.flow.stage import Stage, register_stage
from headway.flow.watchdog import PROGRESS_EVENTS, STALL_WARNINGS, ProgressWatch
from headway.monitor.event_log import LoggedEvent
from headway.monitor.events import CheckpointSave, ErrorReport, SampleFinish, StateChange, StepEnd
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import SampleGroup
from tests.flow.factory import RELIABILITY, audit, make_costs, make_line, make_scenario, own_stages, play_through


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_stages():
        yield


def register_stuck() -> None:
    @register_stage("stuck")
    class Stuck(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup:
            if item.group_id >= 2:
                with self.pipeline.waits.waiting(self.role, "an answer from the oracle", "oracle"):
                    await asyncio.get_running_loop().create_future()
            return item


def test_a_stage_that_never_finishes_is_named_in_the_graph_and_the_run_stopped_cleanly(tmp_path: Path) -> None:
    register_stuck()
    played = play_through(
        make_scenario(max_steps=9, world={"stages": (StageConfig(name="stuck", after="reward"),)}), tmp_path
    )
    stalls = played.of("stall")
    assert len(stalls) == STALL_WARNINGS
    last_move = max(event.time_s for event in played.events if type(event.event) in PROGRESS_EVENTS - {CheckpointSave})
    first = stalls[0].time_s
    assert RELIABILITY.stall_timeout_s <= first - last_move <= 2 * RELIABILITY.stall_timeout_s
    graph = stalls[0].data["graph"]
    assert "stuck waits for oracle: an answer from the oracle" in graph
    assert graph.splitlines()[0].startswith("  culprit: stuck waits for oracle: an answer from the oracle")
    assert "train waits for stuck: a full batch inside the bound (0 of 2 groups)" in graph
    assert "ring" not in graph
    assert "generate waits for param_update: a slot (2 taken)" in graph
    assert not played.summary.finished and played.summary.reason.startswith("no progress for 400 s:")
    assert "stuck waits for oracle" in played.summary.reason
    assert played.of("checkpoint")[-1].data["trained"] == played.summary.trained == 1
    counts = audit(tmp_path)
    assert (counts["trained"], counts["saved"], counts["open"]) == (2, 2, 0)


def test_what_a_stalled_run_saved_is_trained_when_the_cause_is_gone(tmp_path: Path) -> None:
    register_stuck()
    play_through(make_scenario(max_steps=4, world={"stages": (StageConfig(name="stuck", after="reward"),)}), tmp_path)
    played = play_through(make_scenario(max_steps=4), tmp_path)
    assert played.summary.finished and len(played.of("sample.reopen")) == 2
    assert audit(tmp_path)["trained"] == 8


def test_a_slow_run_that_gets_somewhere_is_left_alone(tmp_path: Path) -> None:
    fault = FaultConfig(kind="slowdown", target="engine/0", at_s=0.0, factor=50.0)
    played = play_through(make_scenario(fault), tmp_path)
    assert played.summary.finished and played.of("stall") == []


def test_a_stall_that_ends_is_only_reported(tmp_path: Path) -> None:
    @register_stage("slow")
    class Slow(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup:
            if item.group_id == 2:
                await asyncio.sleep(3.5 * RELIABILITY.stall_timeout_s)
            return item

    played = play_through(make_scenario(world={"stages": (StageConfig(name="slow", after="reward"),)}), tmp_path)
    assert played.summary.finished and 0 < len(played.of("stall")) < STALL_WARNINGS


def test_progress_counts_what_means_that_the_run_gets_somewhere() -> None:
    progress = ProgressWatch(lambda: 0.0)
    progress(LoggedEvent(0.0, ErrorReport(who="x", error="EngineError")))
    progress(LoggedEvent(0.0, StateChange(who="train", old="idle", new="waiting")))
    assert progress.count == 0
    progress(LoggedEvent(0.0, SampleFinish(who="generate", sample="0.0")))
    progress(LoggedEvent(0.0, StepEnd(who="train", trained=1)))
    assert progress.count == 2


def test_on_the_virtual_clock_a_deadlock_is_an_error_at_once_with_the_graph(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline, _ = make_line(make_scenario(costs=make_costs()), tmp_path, tasks=tasks)
            asyncio.get_running_loop().describe = pipeline.waits.describe  # type: ignore[attr-defined]
            channel = Channel(
                "reward → train", SampleGroup, 1, producer="reward", consumer="train", waits=pipeline.waits
            )
            tasks.create_task(channel.receive())

    with pytest.raises(Deadlock, match="train waits for reward: an item in reward → train"):
        run_on_virtual_clock(main())
