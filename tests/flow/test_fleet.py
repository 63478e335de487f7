"""Engines that come and go: who joins is seeded first, who leaves loses nothing, and somebody always stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headway.config.simulation_config import EngineChangeConfig, FaultConfig, SimulatedWeightsConfig
from headway.errors import ConfigError
from headway.flow.training_flow import AsyncTrainingFlow
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_run import Scenario
from tests.flow.factory import Played, audit, make_costs, make_engine_cost, make_scenario, play_through

SLOW = make_engine_cost(slots=2)
"""So few slots that another engine makes a difference."""


def make_world(
    *changes: EngineChangeConfig, faults: tuple[FaultConfig, ...] = (), engines: int = 1, **settings: object
) -> Scenario:
    costs = make_costs(engine=SLOW, weights=SimulatedWeightsConfig(buckets=2, send_s=0.3))
    scenario = make_scenario(
        *faults, engines=engines, costs=costs, **{"groups_per_step": 4, "async_generation_ratio": 1, **settings}
    )
    return replace(scenario, simulation=replace(scenario.simulation, changes=changes))


def join(at_s: float) -> EngineChangeConfig:
    return EngineChangeConfig(kind="join", at_s=at_s)


def leave(at_s: float, engine: str | None = None) -> EngineChangeConfig:
    return EngineChangeConfig(kind="leave", at_s=at_s, engine=engine)


def paces(played: Played) -> list[float]:
    ends = [event.time_s for event in played.of("step.end")]
    return [after - before for before, after in pairwise(ends)]


def test_a_newcomer_is_seeded_with_the_newest_weights_before_its_first_request_and_the_run_is_faster(
    tmp_path: Path,
) -> None:
    played = play_through(make_world(join(11.0), max_steps=20), tmp_path)
    assert played.summary.finished
    asked, up = played.first("join", who="engine/1"), played.first("up", who="engine/1")
    assert asked.time_s == 11.0 and asked.data == {"engines": 2}
    assert up.time_s >= 13.0, "it takes as long as a restart"
    newest = max(e.data["trained"] for e in played.of("step.end") if e.time_s < up.time_s)
    assert newest > 0 and up.data["version"] == newest
    assert not played.of("restart", who="engine/1")
    first = played.first("request.start", who="engine/1")
    assert first.time_s >= up.time_s
    assert max(paces(played)[-5:]) < 0.7 * min(paces(played)[1:4])


def test_requests_of_an_engine_that_leaves_go_on_elsewhere_with_their_tokens(tmp_path: Path) -> None:
    played = play_through(make_world(leave(0.755, "engine/0"), engines=2, max_steps=6), tmp_path)
    assert played.summary.finished
    assert played.first("leave", who="engine/0").data == {"engines": 1}
    moved = played.of("request.end", who="engine/0", finish="aborted")
    assert len(moved) == 2 and all(0 < e.data["actions"] < 100 for e in moved)
    for event in moved:
        rest = [e.data["actions"] for e in played.of("request.end", who="engine/1", request=event.data["request"])]
        assert sum(rest) == 100 - event.data["actions"], "what it had is not made again"
    assert not [e for e in played.of("request.start", who="engine/0") if e.time_s > 0.755]
    assert "dropped" not in audit(tmp_path)
    assert not played.of("down") and not played.of("error"), "to leave is no failure"


def test_nobody_waits_for_the_version_of_an_engine_that_has_left(tmp_path: Path) -> None:
    hang = FaultConfig(kind="hang", target="engine/1", at_s=2.0, for_s=10_000.0)
    played = play_through(make_world(leave(2.1, "engine/1"), faults=(hang,), engines=2, max_steps=8), tmp_path)
    assert played.summary.finished
    assert not played.of("restart", who="engine/1")
    assert max(paces(played)) < 6.0


def test_the_last_engine_in_service_stays(tmp_path: Path) -> None:
    played = play_through(make_world(leave(2.0), leave(3.0, "engine/0"), leave(4.0), engines=2), tmp_path)
    assert played.summary.finished
    assert [event.who for event in played.of("leave")] == ["engine/1"]
    refusals = [event.data["message"] for event in played.of("error", who="fleet")]
    assert len(refusals) == 2 and all("last engine" in text or "at least one" in text for text in refusals)

    crash = FaultConfig(kind="crash", target="engine/1", at_s=1.5, for_s=20.0)
    world = make_world(leave(2.0, "engine/0"), leave(3.0), faults=(crash,), engines=2, max_steps=12)
    played = play_through(world, tmp_path / "down")
    assert played.summary.finished
    assert [(event.time_s, event.who) for event in played.of("leave")] == [(3.0, "engine/1")], "the dead one goes"
    assert not [event for event in played.of("restart", who="engine/1") if event.time_s > 3.0]


def test_an_engine_that_was_given_up_and_leaves_is_missed_no_longer(tmp_path: Path) -> None:
    crash = FaultConfig(kind="crash", target="engine/1", at_s=1.5, for_s=10_000.0)
    world = make_world(leave(45.0, "engine/1"), faults=(crash,), engines=2, max_steps=40)
    played = play_through(world, tmp_path)
    assert [(event.kind, event.time_s >= 45.0) for event in (*played.of("degrade"), *played.of("restore"))] == [
        ("degrade", False),
        ("restore", True),
    ]


def test_a_name_is_used_again_only_when_its_engine_is_closed(tmp_path: Path) -> None:
    changes = [leave(2.0, "engine/1"), join(2.0), leave(8.0, "engine/1"), join(14.0)]
    played = play_through(make_world(*changes, engines=3, max_steps=25), tmp_path)
    assert played.summary.finished
    assert [event.who for event in played.of("join")] == ["engine/3", "engine/1"]
    assert [e.data["message"] for e in played.of("error", who="fleet")] == [
        "engine = 'engine/1': there is no such engine (engine/0, engine/2, engine/3)"
    ]


def test_what_is_asked_for_while_the_trainer_is_away_happens_in_the_next_line(tmp_path: Path) -> None:
    crash = FaultConfig(kind="crash", target="trainer", at_s=5.0)
    world = make_world(leave(6.0, "engine/0"), join(6.5), faults=(crash,), engines=2, max_steps=8)
    closed: list[str] = []

    def watch(flow: AsyncTrainingFlow) -> None:
        for engine in flow.backends.engines:
            assert isinstance(engine, SimulatedEngine)
            engine.close = lambda name=engine.name, close=engine.close: (closed.append(name), close())[1]  # type: ignore

    played = play_through(world, tmp_path, prepare=watch)
    assert played.summary.finished and played.summary.restarts == 1
    down, up = played.first("restart", who="trainer").time_s, played.first("up", who="trainer").time_s
    assert down < 6.0 and up > 6.5
    assert closed == ["engine/0"]
    assert played.of("request.start", who="engine/2")
    audit(tmp_path)


def test_how_many_engines_there_can_be_is_a_matter_of_the_placement(tmp_path: Path) -> None:
    said: list[str] = []

    def ask(flow: AsyncTrainingFlow) -> None:
        reserve = flow.backends.reserve
        assert reserve is not None
        flow.backends = replace(flow.backends, reserve=replace(reserve, most=3, why="each has a GPU of its own"))
        asyncio.get_running_loop().call_later(2.0, scale, flow)

    def scale(flow: AsyncTrainingFlow) -> None:
        assert flow.fleet is not None
        for wanted in (4, 0):
            with pytest.raises(ConfigError) as refused:
                flow.fleet.scale(wanted)
            said.append(str(refused.value))
        assert flow.fleet.scale(3) == (["engine/1", "engine/2"], [])
        assert flow.fleet.scale(3) == ([], [])
        assert flow.fleet.scale(1) == ([], ["engine/2", "engine/1"][::-1])
        assert flow.fleet.names == ["engine/0"]

    assert play_through(make_world(), tmp_path, prepare=ask).summary.finished
    assert said == [
        "engines = 4: not on this placement: each has a GPU of its own",
        "engines = 0: a run has at least one engine",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (EngineChangeConfig(kind="leave", engine="engine/7"), "there are at most 1 engines"),
        (EngineChangeConfig(kind="leave", engine="trainer"), "there are at most 1 engines"),
        (EngineChangeConfig(kind="join", engine="engine/1"), "the next free name"),
    ],
)
def test_changes_that_cannot_be_are_refused(change: EngineChangeConfig, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        play_through(make_world(change), tmp_path)
