"""Replicas that fail in a run: restarted, seeded, given up for a while, and back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headway.config.simulation_config import FaultConfig, SimulatedWeightsConfig
from headway.monitor.event_log import LoggedEvent
from tests.flow.factory import RELIABILITY, Played, audit, make_costs, make_engine_cost, make_scenario, play_through


def life(played: Played, engine: str) -> list[tuple[str, float]]:
    """What became of a replica, and when."""
    kinds = ("down", "restart", "up")
    return [
        (event.kind, round(event.time_s, 2)) for event in played.events if event.kind in kinds and event.who == engine
    ]


def levels(played: Played) -> list[tuple[str, str]]:
    return [(event.kind, event.data["level"]) for event in played.events if event.kind in ("degrade", "restore")]


def test_a_crashed_replica_is_restarted_seeded_with_the_newest_weights_and_back(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=2, send_s=0.5))
    scenario = make_scenario(
        FaultConfig(kind="crash", target="engine/0", at_s=3.2), engines=2, costs=costs, max_steps=6
    )
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and played.summary.restarts == 0
    (down, went), (restart, tried), (up, back) = life(played, "engine/0")
    assert (down, restart, up) == ("down", "restart", "up")
    assert tried == went and back == pytest.approx(went + 2.0 + 0.5, abs=1.5)
    revived = played.first("up", who="engine/0")
    newest = max(event.data["trained"] for event in played.of("step.end") if event.time_s <= revived.time_s)
    assert revived.data["version"] == newest
    assert levels(played) == [] and audit(tmp_path)["trained"] == 12


def test_what_a_crashed_replica_had_in_flight_goes_on_elsewhere_with_its_counts(tmp_path: Path) -> None:
    scenario = make_scenario(FaultConfig(kind="crash", target="engine/0", at_s=0.505), engines=2, max_steps=2)
    played = play_through(scenario, tmp_path)
    moved = played.first("request.end", who="engine/0", finish="failed").data["request"]
    parts = [event.data["actions"] for event in played.of("request.end", request=moved)]
    assert parts == [50, 50]
    assert {event.data["actions"] for event in played.of("sample.finish")} == {100}


def test_a_hung_replica_is_found_and_restarted(tmp_path: Path) -> None:
    scenario = make_scenario(FaultConfig(kind="hang", target="engine/0", at_s=0.5), engines=2, max_steps=4)
    played = play_through(scenario, tmp_path)
    assert played.summary.finished
    assert life(played, "engine/0")[0] == ("down", RELIABILITY.request_timeout_s)
    assert [kind for kind, _ in life(played, "engine/0")] == ["down", "restart", "up"]


def test_a_replica_that_dies_with_nothing_to_do_is_found_too(tmp_path: Path) -> None:
    costs = make_costs(trainer=replace(make_costs().trainer, fixed_s=20.0))
    scenario = make_scenario(
        FaultConfig(kind="crash", target="engine/1", at_s=5.0), engines=2, costs=costs, max_steps=2
    )
    played = play_through(scenario, tmp_path)
    (_, went), *_ = life(played, "engine/1")
    assert 5.0 < went <= 5.0 + RELIABILITY.abort_timeout_s


def test_a_replica_that_keeps_failing_is_given_up_probed_and_comes_back_when_the_cause_is_gone(tmp_path: Path) -> None:
    cause = FaultConfig(kind="crash", target="engine/0", at_s=1.5, for_s=60.0)
    played = play_through(make_scenario(cause, engines=2, max_steps=60), tmp_path)
    assert played.summary.finished
    assert levels(played) == [("degrade", "fewer_replicas"), ("restore", "normal")]
    restarts = [event.time_s for event in played.of("restart", who="engine/0")]
    given_up, back = played.first("degrade").time_s, played.first("restore").time_s
    in_a_row = [time for time in restarts if time < given_up]
    assert len(in_a_row) == RELIABILITY.replica_restarts
    probes = [time for time in restarts if time > given_up]
    assert all(after - before >= RELIABILITY.probe_s for before, after in pairwise(probes))
    assert 61.5 < back <= 61.5 + RELIABILITY.probe_s + 4
    assert any(event.who == "engine/0" and event.time_s > back for event in played.of("request.start"))
    failures = played.of("error", who="engine/0")
    assert len(failures) >= len(restarts) - 1, "every failed restart is recorded"


def test_the_others_work_on_while_one_is_away(tmp_path: Path) -> None:
    cause = FaultConfig(kind="crash", target="engine/0", at_s=1.5, for_s=10_000.0)
    played = play_through(make_scenario(cause, engines=2, max_steps=10), tmp_path)
    assert played.summary.finished
    alone = [event for event in played.of("request.start") if event.time_s > 4]
    assert {event.who for event in alone} == {"engine/1"}


def test_failures_with_quiet_times_between_are_not_failures_in_a_row(tmp_path: Path) -> None:
    apart = RELIABILITY.quiet_s + 20
    crashes = [FaultConfig(kind="crash", target="engine/0", at_s=1.5 + apart * number) for number in range(6)]
    played = play_through(make_scenario(*crashes, engines=2, max_steps=200), tmp_path)
    assert played.summary.finished
    assert len(played.of("down", who="engine/0")) == 6
    assert {event.data["attempt"] for event in played.of("restart", who="engine/0")} == {1}
    assert levels(played) == []


def test_a_replica_that_comes_back_during_a_training_step_on_shared_devices_stands_still(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(restart_s=0.3), trainer=replace(make_costs().trainer, fixed_s=5.0))
    crash = FaultConfig(kind="crash", target="engine/0", at_s=2.0)
    scenario = make_scenario(crash, engines=2, costs=costs, async_generation_ratio=1, max_steps=4, hybrid_engine=True)
    scenario = replace(scenario, train_devices=scenario.infer_devices)
    events: list[LoggedEvent] = []
    played = play_through(scenario, tmp_path, on_event=events.append)
    assert played.summary.finished
    for begin, end in zip(played.of("step.begin"), played.of("step.end"), strict=True):
        during = [e for e in played.of("request.end") if begin.time_s + 0.02 < e.time_s < end.time_s - 1e-6]
        assert not [event for event in during if event.data["actions"] and event.data["finish"] == "stop"]


def test_a_whole_node_can_go_and_come_back(tmp_path: Path) -> None:
    costs = replace(make_costs(), gpus_per_node=2)
    scenario = make_scenario(
        FaultConfig(kind="lost_node", target="node/1", at_s=2.2, for_s=3.0), engines=4, costs=costs
    )
    scenario = replace(scenario, settings=replace(scenario.settings, groups_per_step=8, max_steps=8))
    played = play_through(scenario, tmp_path)
    assert played.summary.finished
    assert {event.who for event in played.of("down")} == {"engine/1", "engine/2"}
    assert {event.who for event in played.of("up")} == {"engine/1", "engine/2"}
