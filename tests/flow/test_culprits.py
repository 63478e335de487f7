"""A stall names its culprit: each back end hangs once, in a whole run on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import StageConfig
from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedEnvironmentConfig,
    SimulatedRewardConfig,
    SimulatedScorerConfig,
)
from headway.errors import RunStopped, Stalled
from headway.flow.fruitless_drops import REPORTED_BATCHES, FruitlessDrops
from headway.flow.stage import Stage, register_stage
from headway.flow.training_flow import AsyncTrainingFlow
from headway.flow.zero_variance import FRUITLESS_BATCHES
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.types import DropReason, SampleGroup
from tests.flow.factory import RELIABILITY, audit, make_costs, make_scenario, own_stages, play_through

_DEADLINES = ("request", "environment", "reward", "train", "transfer", "lock")
PATIENT = replace(RELIABILITY, **dict.fromkeys((f"{name}_timeout_s" for name in _DEADLINES), 5_000.0))
"""Deadlines that are longer than the time after which a stall is reported."""
SECOND = DistributionConfig(mean=1.0)
COSTS = make_costs(
    environment=SimulatedEnvironmentConfig(step_s=SECOND),
    reward=SimulatedRewardConfig(latency_s=SECOND),
    ref_logp=SimulatedScorerConfig(fixed_s=0.5),
)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_stages():
        yield


@pytest.mark.parametrize(
    ("target", "at_s", "settings", "culprit"),
    [
        ("engine/0", 2.2, {}, "generate waits for engine/0: request 2.0/0, 0 tokens so far, the oldest of 2"),
        ("trainer", 2.2, {}, "train waits for trainer: step 2, 2 samples"),
        ("trainer", 2.05, {"save_steps": 1}, "train waits for trainer: checkpoint step-00000001"),
        ("weights", 1.5, {}, "param_update waits for transport: send of bucket 1 of 2 of version 1 to engine/0"),
        ("reward", 1.0, {"costs": COSTS}, "scores waits for reward SimulatedReward: reward of sample "),
        (
            "environment",
            0.5,
            {"costs": COSTS},
            "generate waits for environment default: step of sample 0.0 in turn 1",
        ),
        ("ref_logp", 0.5, {"costs": COSTS}, "ref_logp waits for scorer of ref_logp: ref_logp of group 0"),
    ],
    ids=["engine", "trainer", "checkpoint", "transfer", "reward", "environment", "scorer"],
)
def test_a_back_end_that_hangs_is_named(
    tmp_path: Path, target: str, at_s: float, settings: dict[str, Any], culprit: str
) -> None:
    fault = FaultConfig(kind="hang", target=target, at_s=at_s, for_s=4_000.0)
    played = play_through(make_scenario(fault, reliability=PATIENT, max_steps=9, **settings), tmp_path)
    graph = played.of("stall")[0].data["graph"]
    assert graph.splitlines()[0].startswith(f"  culprit: {culprit}"), graph
    assert "ring" not in graph
    assert culprit in played.summary.reason


def test_the_holder_of_a_lock_is_named_and_for_how_long_it_has_held_it(tmp_path: Path) -> None:
    @register_stage("hog")
    class Hog(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup:
            if item.group_id == 2:
                self.pipeline.tasks.create_task(self.hold())
            return item

        async def hold(self) -> None:
            async with self.pipeline.devices.locks["train"].hold("backup of hog", 5_000.0):
                await asyncio.get_running_loop().create_future()

    world = {"stages": (StageConfig(name="hog", after="rollout"),)}
    played = play_through(make_scenario(reliability=PATIENT, max_steps=9, world=world), tmp_path)
    graph = played.of("stall")[0].data["graph"]
    assert "culprit: train waits for backup of hog: lock on devices of train, held for " in graph.splitlines()[0], graph


def test_a_stage_that_keeps_groups_is_named(tmp_path: Path) -> None:
    @register_stage("pocket")
    class Pocket(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup | None:
            return item if item.group_id < 2 else None

    world = {"stages": (StageConfig(name="pocket", after="rollout"),)}
    played = play_through(make_scenario(max_steps=9, world=world), tmp_path)
    graph = played.of("stall")[0].data["graph"]
    told = "pocket waits for pocket.process: group 2 went in and was neither passed on nor dropped"
    assert f"culprit: {told}" in graph.splitlines()[0], graph


def test_a_validation_that_hangs_is_what_the_run_waits_for(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="reward", at_s=0.5, for_s=4_000.0)
    settings = {"eval_steps": 1, "val_batch_size": 2, "eval_at_start": True, "costs": COSTS}
    played = play_through(make_scenario(fault, reliability=PATIENT, **settings), tmp_path)
    graph = played.of("stall")[0].data["graph"]
    assert "culprit: validate waits for reward SimulatedReward: reward of sample v" in graph.splitlines()[0], graph


def test_a_simulated_run_that_does_not_end_carries_the_graph(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="trainer", at_s=2.2, for_s=4_000.0)
    with pytest.raises(Stalled, match="culprit: train waits for trainer: step 2"):
        play_through(make_scenario(fault, reliability=PATIENT, max_steps=9), tmp_path, max_time_s=50.0)


def test_the_graph_of_a_run_without_a_hang_is_left_empty(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []
    played = play_through(make_scenario(costs=COSTS), tmp_path, prepare=flows.append)
    assert played.summary.finished and flows[0].waits.edges() == []


# -- stages that drop everything


def register_sieve() -> tuple[StageConfig, ...]:
    @register_stage("sieve")
    class Sieve(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup | None:
            if self.pipeline.headway.trained == 0:
                return item
            self.pipeline.drop(item.group_id, DropReason.FILTERED, who=self.role)
            return None

    return (StageConfig(name="sieve", after="rollout"),)


def test_a_stage_that_drops_every_group_is_reported_and_in_the_end_stops_the_run(tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=9, world={"stages": register_sieve()}), tmp_path)
    told = [event.data["message"] for event in played.of("error", who="sieve")]
    assert told[0].startswith("sieve dropped the last 4 groups (filtered), and none has reached train since")
    assert [int(line.split()[4]) for line in told] == [4, 8, 16, 32, 64, 128]
    assert not played.summary.finished and played.summary.trained == 1
    assert played.summary.reason.startswith("sieve dropped the last 200 groups (filtered)")
    assert audit(tmp_path)["open"] == 0


def test_a_group_that_gets_through_starts_the_count_anew() -> None:
    events: list[LoggedEvent] = []
    drops = FruitlessDrops(2, EventLog(lambda: 0.0, events.append))
    for _ in range(2 * FRUITLESS_BATCHES):
        for _ in range(2 * REPORTED_BATCHES - 1):
            drops.group_dropped("sieve", DropReason.FILTERED)
        drops.group_arrived()
    drops.group_dropped("reward", DropReason.ZERO_VARIANCE)
    assert not events
    with pytest.raises(RunStopped):
        for _ in range(2 * FRUITLESS_BATCHES):
            drops.group_dropped("sieve", DropReason.FILTERED)
    assert events
