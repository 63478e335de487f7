"""What repeated failure does to a run, and the way back up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import FaultConfig, SimulatedScorerConfig
from headway.errors import BackendError, RunStopped
from headway.flow.recovery import DegradationControl, DegradationLevel
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.sim.virtual_clock import run_on_virtual_clock
from tests.flow.factory import RELIABILITY, Played, Scripted, audit, make_costs, make_scenario, play_through

FOR_EVER = 100_000.0


def make_recovery() -> tuple[DegradationControl, list[LoggedEvent], list[DegradationLevel]]:
    events, levels = list[LoggedEvent](), list[DegradationLevel]()
    log = EventLog(asyncio.get_running_loop().time, events.append)
    return DegradationControl(RELIABILITY, events=log, on_level=levels.append), events, levels


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_on_virtual_clock(main())


def changes(events: list[LoggedEvent]) -> list[tuple[str, str]]:
    return [(event.kind, event.data["level"]) for event in events if event.kind in ("degrade", "restore")]


# -- levels


def test_a_spent_budget_is_one_level_down_and_the_next_one_the_end() -> None:
    async def main() -> None:
        recovery, events, levels = make_recovery()
        recovery.exhausted("train", BackendError("no"))
        assert recovery.level is DegradationLevel.SYNCHRONOUS and levels == [DegradationLevel.SYNCHRONOUS]
        with pytest.raises(RunStopped, match="train keeps failing: still no"):
            recovery.exhausted("train", BackendError("still no"))
        assert changes(events) == [("degrade", "synchronous")]
        recovery.close()

    play(main)


def test_a_lost_replica_is_one_level_and_all_of_them_back_is_none() -> None:
    async def main() -> None:
        recovery, events, _ = make_recovery()
        recovery.replica_lost("engine/0")
        recovery.replica_lost("engine/1")
        recovery.replica_back("engine/0")
        assert recovery.level is DegradationLevel.FEWER_REPLICAS
        recovery.replica_back("engine/1")
        assert recovery.level is DegradationLevel.NORMAL
        assert changes(events) == [("degrade", "fewer_replicas"), ("restore", "normal")]

    play(main)


def test_quiet_with_progress_climbs_back_up() -> None:
    async def main() -> None:
        recovery, events, levels = make_recovery()
        recovery.exhausted("train", BackendError("no"))
        recovery.progress()
        await asyncio.sleep(RELIABILITY.quiet_s + 1)
        assert recovery.level is DegradationLevel.NORMAL and levels == [
            DegradationLevel.SYNCHRONOUS,
            DegradationLevel.NORMAL,
        ]
        assert [event.time_s for event in events if event.kind == "restore"] == [RELIABILITY.quiet_s]

    play(main)


def test_quiet_because_nothing_happens_does_not() -> None:
    async def main() -> None:
        recovery, _, _ = make_recovery()
        recovery.exhausted("train", BackendError("no"))
        await asyncio.sleep(10 * RELIABILITY.quiet_s + 1)
        assert recovery.level is DegradationLevel.SYNCHRONOUS
        recovery.progress()
        await asyncio.sleep(RELIABILITY.quiet_s)
        assert recovery.level is DegradationLevel.NORMAL

    play(main)


def test_a_failure_starts_the_quiet_time_again() -> None:
    async def main() -> None:
        recovery, _, _ = make_recovery()
        recovery.exhausted("train", BackendError("no"))
        await asyncio.sleep(RELIABILITY.quiet_s - 1)
        recovery.failure("train", BackendError("again"))
        recovery.progress()
        await asyncio.sleep(RELIABILITY.quiet_s - 1)
        assert recovery.level is DegradationLevel.SYNCHRONOUS
        await asyncio.sleep(2)
        assert recovery.level is DegradationLevel.NORMAL

    play(main)


def test_a_run_that_climbs_without_all_its_replicas_stays_one_level_down() -> None:
    async def main() -> None:
        recovery, events, _ = make_recovery()
        recovery.exhausted("train", BackendError("no"))
        recovery.replica_lost("engine/0")
        recovery.progress()
        await asyncio.sleep(RELIABILITY.quiet_s + 1)
        assert recovery.level is DegradationLevel.FEWER_REPLICAS
        recovery.replica_back("engine/0")
        assert changes(events) == [("degrade", "synchronous"), ("restore", "fewer_replicas"), ("restore", "normal")]

    play(main)


# -- a training step that fails


def steps_made(played: Played) -> list[int]:
    return [event.data["trained"] for event in played.of("step.end")]


def test_a_step_that_failed_and_changed_nothing_is_tried_again(tmp_path: Path) -> None:
    scenario = make_scenario(FaultConfig(kind="lost_message", target="trainer", at_s=2.5))
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and steps_made(played) == [1, 2, 3]
    assert [event.data["error"] for event in played.of("error", who="train")] == ["TrainerError"]
    assert len(played.of("retry", who="train")) == 1
    assert played.summary.restarts == 0 and audit(tmp_path)["trained"] == 6


def test_steps_that_keep_failing_make_the_run_synchronous_and_then_stop_it_with_everything_saved(
    tmp_path: Path,
) -> None:
    fault = FaultConfig(kind="lost_message", target="trainer", at_s=2.5, for_s=FOR_EVER)
    played = play_through(make_scenario(fault, async_generation_ratio=2, max_steps=9), tmp_path)
    assert not played.summary.finished
    assert played.summary.reason == "train keeps failing: trainer: a message was lost"
    assert changes(played.events) == [("degrade", "synchronous")]
    assert len(played.of("error", who="train")) == 2 * (1 + RELIABILITY.step_retries)
    trained = played.summary.trained
    assert trained == 2 and played.of("checkpoint")[-1].data == {"trained": trained}
    counts = audit(tmp_path)
    assert counts["trained"] == 2 * trained and counts["saved"] > 0 == counts["open"]

    mended = play_through(make_scenario(async_generation_ratio=2, max_steps=9), tmp_path)
    assert mended.summary.finished and mended.summary.trained == 9


def test_a_run_climbs_back_up_when_the_cause_is_gone(tmp_path: Path) -> None:
    fault = FaultConfig(kind="lost_message", target="trainer", at_s=2.5, for_s=10.0)
    played = play_through(make_scenario(fault, async_generation_ratio=2, max_steps=60), tmp_path)
    assert played.summary.finished
    assert changes(played.events) == [("degrade", "synchronous"), ("restore", "normal")]
    down, up = played.first("degrade").time_s, played.first("restore").time_s
    degraded = [event.time_s for event in played.of("state", who="train", new="degraded")]
    assert degraded and down <= min(degraded) and max(degraded) <= up, "the stage that failed says so while it works"
    assert not played.of("state", who="reward", new="degraded")
    last_error = played.of("error")[-1].time_s
    assert up == pytest.approx(max(down, last_error) + RELIABILITY.quiet_s)
    before = [
        e.data["trained"] - e.data["oldest"] for e in played.of("group.train") if e.time_s > up - 10 and e.time_s < up
    ]
    after = [e.data["trained"] - e.data["oldest"] for e in played.of("group.train") if e.time_s > up + 10]
    assert max(before) == 0 and max(after) > 0, "nothing runs ahead while it is degraded"


# -- a trainer that is lost


def test_a_step_that_hangs_costs_the_trainer_and_the_line_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    fault = FaultConfig(kind="hang", target="trainer", at_s=7.5)
    played = play_through(make_scenario(fault, max_steps=6, save_steps=2), tmp_path)
    assert played.summary.finished and played.summary.restarts == 1
    assert steps_made(played) == [1, 2, 3, 3, 4, 5, 6], "3 was made again, from checkpoint 2"
    crash = played.first("error", error="TrainerCrashed")
    assert "not done after 30.0 s" in crash.data["message"]
    assert played.first("up", who="trainer").data["version"] == 2
    counts = audit(tmp_path)
    assert counts["trained"] == 12 and counts["open"] == 0


def test_what_was_trained_after_the_checkpoint_is_untrained_again_and_used(tmp_path: Path) -> None:
    fault = FaultConfig(kind="crash", target="trainer", at_s=4.5)
    played = play_through(
        make_scenario(fault, async_generation_ratio=1, max_steps=6, save_steps=2, selection_order="oldest"), tmp_path
    )
    assert played.summary.finished
    ends = [event.data["sample"] for event in played.of("sample.end", end="trained")]
    assert len(ends) > len(set(ends)), "some were trained in the lost lineage and again in the one that is left"
    reopened = {event.data["sample"] for event in played.of("sample.reopen")}
    assert {sample for sample in ends if ends.count(sample) > 1} <= reopened
    assert audit(tmp_path)["trained"] == 12


def test_a_trainer_lost_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    played = play_through(make_scenario(FaultConfig(kind="crash", target="trainer", at_s=5.5)), tmp_path)
    assert played.summary.finished and steps_made(played) == [1, 2, 1, 2, 3]


def test_a_trainer_that_does_not_come_back_is_a_clean_stop(tmp_path: Path) -> None:
    fault = FaultConfig(kind="crash", target="trainer", at_s=5.5, for_s=FOR_EVER)
    played = play_through(make_scenario(fault, max_steps=6, save_steps=1), tmp_path)
    assert "the trainer does not come back" in played.summary.reason
    assert len(played.of("restart", who="trainer")) == 1 + RELIABILITY.replica_restarts
    counts = audit(tmp_path)
    assert counts["trained"] == 4 and counts["open"] == 0
    assert play_through(make_scenario(max_steps=6, save_steps=1), tmp_path).summary.trained == 6


def test_a_trainer_lost_again_and_again_without_getting_further_is_a_clean_stop(tmp_path: Path) -> None:
    crashes = [FaultConfig(kind="crash", target="trainer", at_s=1.5 + second) for second in range(0, 400, 2)]
    played = play_through(make_scenario(*crashes), tmp_path)
    assert "the trainer does not come back" in played.summary.reason
    assert audit(tmp_path)["open"] == 0


# -- scorers and groups


def test_a_scorer_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=0.2))
    played = play_through(
        make_scenario(FaultConfig(kind="lost_message", target="ref_logp", at_s=2), costs=costs), tmp_path
    )
    assert played.summary.finished and played.of("group.drop") == []
    assert [event.data["error"] for event in played.of("error", who="ref_logp")] == ["ScoringError"]


def test_a_scorer_that_keeps_failing_drops_its_groups_and_stops_the_run(tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=0.2))
    fault = FaultConfig(kind="crash", target="ref_logp", at_s=2, for_s=FOR_EVER)
    played = play_through(make_scenario(fault, costs=costs, max_steps=9), tmp_path)
    assert played.summary.reason.startswith("ref_logp keeps failing")
    assert {event.data["reason"] for event in played.of("group.drop")} == {"scoring_failed"}
    assert audit(tmp_path)["open"] == 0


def test_groups_given_up_one_after_another_stop_the_run_with_the_reason(tmp_path: Path) -> None:
    script = Scripted(otherwise=ValueError("every board is broken"))
    played = play_through(make_scenario(), tmp_path, prepare=script.use)
    assert "groups in a row were given up; the last one: " in played.summary.reason
    assert "every board is broken" in played.summary.reason
    assert changes(played.events) == [("degrade", "synchronous")]
    reasons = {event.data["reason"] for event in played.of("sample.end", end="dropped")}
    assert reasons <= {"environment_failed", "group_failed"}
    assert any("every board is broken" in event.data["message"] for event in played.of("error"))


def test_one_bad_prompt_among_good_ones_is_dropped_and_nothing_else_happens(tmp_path: Path) -> None:
    failing = [ValueError("broken board")] * 20
    played = play_through(make_scenario(), tmp_path, prepare=Scripted({1: failing}).use)
    assert played.summary.finished and changes(played.events) == []
    assert [event.data for event in played.of("group.drop")] == [{"group": 1, "reason": "group_failed"}]
    assert len(played.of("group.start", position=1)) == 1, "it would only fail again"


# -- no engines


def test_without_any_engine_the_run_stops_cleanly_and_can_go_on_later(tmp_path: Path) -> None:
    faults = [FaultConfig(kind="crash", target=f"engine/{n}", at_s=3.0, for_s=FOR_EVER) for n in range(2)]
    played = play_through(make_scenario(*faults, engines=2, async_generation_ratio=1, max_steps=9), tmp_path)
    assert played.summary.reason.startswith("no replica in service for")
    assert played.of("checkpoint")[-1].data["trained"] == played.summary.trained > 0
    assert audit(tmp_path)["open"] == 0
    assert play_through(make_scenario(engines=2, async_generation_ratio=1, max_steps=9), tmp_path).summary.trained == 9


@pytest.mark.parametrize("target", ["engine/0", "trainer", "ref_logp", "weights", "environment", "reward"])
def test_every_error_is_an_event(target: str, tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=0.2))
    costs = replace(costs, environment=replace(costs.environment, step_s=replace(costs.response_tokens, mean=0.2)))
    costs = replace(costs, reward=replace(costs.reward, latency_s=replace(costs.response_tokens, mean=0.2)))
    played = play_through(
        make_scenario(FaultConfig(kind="lost_message", target=target, at_s=1.1), costs=costs), tmp_path
    )
    assert played.summary.finished
    assert ["lost" in event.data["message"] for event in played.of("error")] == [True]
