"""Weights on their way into the replicas: whole or not at all, and without holding anybody up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.config.simulation_config import FaultConfig, SimulatedWeightsConfig
from headway.errors import TransferError
from headway.monitor.event_log import LoggedEvent
from tests.flow.factory import RELIABILITY, Played, audit, make_costs, make_scenario, play_through

WEIGHTS = SimulatedWeightsConfig(buckets=4, gather_s=0.2, send_s=1.0, load_s=0.2, flip_s=0.01)
ONE_LOAD_S = 1.2 + 0.2 / 4 + 0.01
"""The first bucket is gathered, then each is sent and loaded while the next one is."""


def served(played: Played, engine: str = "engine/0") -> list[int]:
    return [event.data["version"] for event in played.of("served", who=engine)]


def test_every_version_is_served_by_every_replica_soon_after_it_was_made(tmp_path: Path) -> None:
    played = play_through(make_scenario(engines=3, costs=make_costs(weights=WEIGHTS)), tmp_path)
    for engine in ("engine/0", "engine/1", "engine/2"):
        assert served(played, engine) == [0, 1, 2, 3]
    for event in played.of("step.end"):
        flips = [flip.time_s for flip in played.of("served", version=event.data["trained"])]
        assert flips == pytest.approx([event.time_s + ONE_LOAD_S] * 3, abs=0.02), "all at the same time"


@pytest.mark.parametrize("engines", [1, 2])
def test_a_corrupted_bucket_is_found_sent_again_and_never_served(engines: int, tmp_path: Path) -> None:
    fault = FaultConfig(kind="corrupted_bucket", target="weights", at_s=3.5)
    scenario = make_scenario(fault, engines=engines, costs=make_costs(weights=WEIGHTS))
    played = play_through(scenario, tmp_path)
    assert played.summary.finished
    errors = played.of("error", error="TransferError")
    assert len(errors) == 1 and "checksum not" in errors[0].data["message"]
    assert len(played.of("retry", who="param_update")) == 1
    assert all(served(played, f"engine/{number}") == [0, 1, 2, 3] for number in range(engines))
    hit = errors[0].who
    late = next(e.time_s for e in played.of("served", who=hit) if e.time_s > errors[0].time_s)
    made = max(e.time_s for e in played.of("step.end") if e.time_s <= errors[0].time_s)
    again_s = WEIGHTS.send_s / 4 + WEIGHTS.load_s / 4 + RELIABILITY.restart_backoff_s
    assert late == pytest.approx(made + ONE_LOAD_S + again_s, abs=0.02)


def test_a_lost_bucket_is_sent_again(tmp_path: Path) -> None:
    fault = FaultConfig(kind="lost_message", target="weights", at_s=3.5)
    played = play_through(make_scenario(fault, costs=make_costs(weights=WEIGHTS)), tmp_path)
    assert played.summary.finished and served(played) == [0, 1, 2, 3]
    assert [event.data["error"] for event in played.of("error")] == ["TransferError"]


def test_a_bucket_that_hangs_is_sent_again_at_its_deadline(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="weights", at_s=3.5)
    played = play_through(make_scenario(fault, costs=make_costs(weights=WEIGHTS)), tmp_path)
    assert played.summary.finished and served(played) == [0, 1, 2, 3]
    (error,) = played.of("error")
    limit = RELIABILITY.transfer_timeout_s / (1 + RELIABILITY.transfer_retries)
    assert f"not there after {limit} s" in error.data["message"]


def test_a_replica_that_cannot_be_updated_is_restarted_and_serves_nothing_meanwhile(tmp_path: Path) -> None:
    """All buckets are damaged for a while: torn weights are never served, also not by a replica that comes back."""
    fault = FaultConfig(kind="corrupted_bucket", target="weights", at_s=3.0, for_s=30.0)
    played = play_through(make_scenario(fault, engines=2, costs=make_costs(weights=WEIGHTS)), tmp_path)
    assert played.summary.finished
    assert {event.who for event in played.of("down")} == {"engine/0", "engine/1"}
    assert [event for event in played.of("served") if 3.0 < event.time_s < 33.0] == []
    assert [event for event in played.of("up") if event.time_s < 33.0] == []
    assert audit(tmp_path)["trained"] == 6


def test_one_replica_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="engine/0", at_s=2.5)
    scenario = make_scenario(fault, engines=2, costs=make_costs(weights=WEIGHTS), max_steps=4)
    played = play_through(scenario, tmp_path)
    made = played.first("step.end").time_s
    flip = played.first("served", who="engine/1", version=1)
    assert flip.time_s == pytest.approx(made + ONE_LOAD_S, abs=0.02)
    assert "engine/0" in {event.who for event in played.of("down")} and played.summary.finished


def test_weights_that_the_trainer_cannot_give_mean_that_it_is_lost(tmp_path: Path) -> None:
    fault = FaultConfig(kind="crash", target="trainer", at_s=4.3)
    costs = make_costs(weights=replace(WEIGHTS, gather_s=2.0))
    played = play_through(make_scenario(fault, costs=costs, save_steps=1), tmp_path)
    assert played.summary.finished and played.summary.restarts == 1
    assert played.of("down") == [], "no replica is to blame"


# -- the spare buffer


def decoding_s(events: list[LoggedEvent]) -> list[float]:
    """How long each answer of a hundred actions took, in order."""
    starts = {event.data["request"]: event.time_s for event in events if event.kind == "request.start"}
    return [
        round(event.time_s - starts[event.data["request"]], 2)
        for event in events
        if event.kind == "request.end" and event.data["finish"] == "stop"
    ]


@pytest.mark.parametrize(("dual_buffer", "longest_s"), [(True, 1.0 + 0.01), (False, 1.0 + 1.25)])
def test_generation_goes_on_while_weights_arrive_unless_there_is_no_room_for_both(
    dual_buffer: bool, longest_s: float, tmp_path: Path
) -> None:
    costs = make_costs(weights=WEIGHTS, trainer=replace(make_costs().trainer, fixed_s=4.0))
    settings = {"async_generation_ratio": 2, "groups_per_step": 1, "enable_dual_buffer": dual_buffer, "max_steps": 8}
    policy = {"staleness_policy": "drop", "selection_order": "freshest"}
    played = play_through(make_scenario(costs=costs, **settings, **policy), tmp_path)
    assert played.summary.finished
    assert max(decoding_s(played.events)) == pytest.approx(longest_s, abs=0.03)


def test_versions_made_while_one_is_on_its_way_are_skipped_for_the_newest(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=4, send_s=3.3))
    scenario = make_scenario(costs=costs, groups_per_step=1, async_generation_ratio=5, max_steps=6)
    played = play_through(scenario, tmp_path)
    versions = served(played)
    assert versions == sorted(set(versions)) and versions[-1] == 6
    assert len(versions) < 7, "not every version is worth sending"


def test_a_version_that_is_not_held_is_refused_by_the_source(tmp_path: Path) -> None:
    played = play_through(make_scenario(), tmp_path)

    async def gather() -> None:
        await played.flow.backends.trainer.source.gather(0)

    with pytest.raises(TransferError, match="version 0 is not held"):
        gather().send(None)
