"""Idle trainer devices are lent to engines: they work while training waits, and make way before it goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedScorerConfig,
    SimulatedWeightsConfig,
)
from headway.errors import ConfigError
from headway.sim.simulated_run import Scenario
from tests.flow.factory import Played, audit, make_costs, make_engine_cost, make_scenario, play_through

LENT = "engine/lent-0"
SPREAD = DistributionConfig(kind="gaussian", mean=100, std=40, min=1)


def make_world(*faults: FaultConfig, lend_devices: bool = True, **costs: Any) -> Scenario:
    """Sixteen answers of a second in two slots: the trainer, which needs a second for a step, waits for seven."""
    weights = SimulatedWeightsConfig(buckets=2, send_s=0.2, load_s=0.1)
    made = make_costs(engine=make_engine_cost(slots=2), weights=weights, **costs)
    settings = {"groups_per_step": 16, "async_generation_ratio": 1, "max_steps": 6}
    return make_scenario(*faults, engines=1, costs=made, world={"lend": lend_devices}, **settings)


def step_s(played: Played) -> float:
    ends = [event.time_s for event in played.of("step.end")]
    return max(after - before for before, after in list(pairwise(ends))[1:])


def test_a_trainer_that_waits_makes_the_run_faster(tmp_path: Path) -> None:
    alone = play_through(make_world(lend_devices=False), tmp_path / "alone")
    lent = play_through(make_world(), tmp_path / "lent")
    assert alone.summary.finished and lent.summary.finished
    assert step_s(alone) == pytest.approx(8.0, abs=0.5)
    assert step_s(lent) < 0.7 * step_s(alone), "nearly twice the slots for seven of eight seconds"
    assert "dropped" not in audit(tmp_path / "lent")


def test_before_a_training_step_its_requests_go_on_elsewhere_with_their_tokens(tmp_path: Path) -> None:
    played = play_through(make_world(response_tokens=SPREAD), tmp_path)
    steps = [(b.time_s, e.time_s) for b, e in zip(played.of("step.begin"), played.of("step.end"), strict=True)]
    assert len(steps) == 6
    open_at: dict[str, float] = {}
    for event in played.events:
        if event.who == LENT and event.kind == "request.start":
            open_at[event.data["request"]] = event.time_s
        elif event.who == LENT and event.kind == "request.end":
            began = open_at.pop(event.data["request"])
            for begin, end in steps:
                assert event.time_s <= begin + 0.011 or began >= end - 1e-9, "it works while its devices train"
    moved = [e for e in played.of("request.end", who=LENT, finish="aborted") if e.data["actions"]]
    assert moved
    for event in moved:
        made = [e.data["actions"] for e in played.of("request.end", request=event.data["request"])]
        finished = played.of("sample.finish", sample=event.data["request"].split("/")[0])
        assert [sum(made)] == [e.data["actions"] for e in finished] or not finished


def test_while_a_group_is_scored_its_requests_wait_where_they_are(tmp_path: Path) -> None:
    world = make_world(ref_logp=SimulatedScorerConfig(fixed_s=0.05, with_trainer=True))
    played = play_through(world, tmp_path)
    assert played.summary.finished
    aborted = {round(event.time_s, 1) for event in played.of("request.end", who=LENT, finish="aborted")}
    begun = {round(event.time_s, 1) for event in played.of("step.begin")}
    assert aborted and all(min(abs(at - step) for step in begun) <= 0.2 for at in aborted), "only for steps"


def test_what_it_serves_when_it_comes_back_is_never_older_than_what_was_served(tmp_path: Path) -> None:
    world = make_world(FaultConfig(kind="slowdown", target=LENT, at_s=0.0, factor=40.0))
    served: list[int] = []

    def follow(event: Any) -> None:
        pipeline = flows[0].pipeline
        if pipeline is not None and pipeline.headway.served >= 0:
            served.append(pipeline.headway.served)

    flows: list[Any] = []
    played = play_through(world, tmp_path, prepare=flows.append, on_event=follow)
    assert played.summary.finished
    assert served == sorted(served)


def test_a_lent_engine_that_hangs_is_restarted_and_training_goes_on(tmp_path: Path) -> None:
    hang = FaultConfig(kind="hang", target=LENT, at_s=5.0)
    played = play_through(make_world(hang), tmp_path)
    assert played.summary.finished
    assert played.of("restart", who=LENT) and played.of("up", who=LENT)
    assert "dropped" not in audit(tmp_path)


def test_a_trainer_that_is_lost_leaves_nothing_standing_still(tmp_path: Path) -> None:
    played = play_through(make_world(FaultConfig(kind="crash", target="trainer", at_s=8.5)), tmp_path)
    assert played.summary.finished and played.summary.restarts == 1
    back = played.first("up", who="trainer").time_s
    assert [event for event in played.of("request.start", who=LENT) if event.time_s > back]


def test_devices_that_do_not_make_a_replica_cannot_be_lent(tmp_path: Path) -> None:
    world = make_world()
    costs = replace(world.simulation, engine=replace(world.simulation.engine, gpus=2))
    with pytest.raises(ConfigError, match="the trainer's 1 devices do not make one replica of 2"):
        play_through(replace(world, simulation=costs, infer_devices=(1, 2)), tmp_path)
