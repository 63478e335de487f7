"""Validation: a second flow over the same hub, beside training or instead of generation for a while."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedEnvironmentConfig,
    SimulatedRewardConfig,
    SimulatedTrainerConfig,
)
from headway.flow.training_flow import AsyncTrainingFlow
from headway.flow.validation_flow import keep_one_version
from headway.monitor.event_log import LoggedEvent
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.sim.simulated_run import Scenario
from headway.types import Episode, FinishReason, Generation, Score, Task, Turn, VersionRun
from tests.flow.factory import Played, audit, make_costs, make_engine_cost, make_scenario, play_through
from tests.flow.scenarios import live, random_scenario
from tests.flow.witness import Witness

SPREAD = DistributionConfig(kind="lognormal", mean=100, std=100, min=1, max=500)
ACTION_S = 0.01


def validated(run_dir: Path, *faults: FaultConfig, **settings: Any) -> Played:
    """A run that validates every second version on six tasks."""
    return play_through(make_validated(*faults, **settings), run_dir)


def make_validated(*faults: FaultConfig, **settings: Any) -> Scenario:
    base: dict[str, Any] = {"async_generation_ratio": 1, "max_steps": 6, "eval_steps": 2, "val_batch_size": 6}
    base["costs"] = make_costs(response_tokens=SPREAD, engine=make_engine_cost(slots=3))
    return make_scenario(*faults, **{**base, **settings})


def windows(played: Played) -> list[tuple[LoggedEvent, LoggedEvent]]:
    return list(zip(played.of("validate.begin"), played.of("validate.end"), strict=True))


def is_training(event: LoggedEvent) -> bool:
    return not event.data["request"].startswith("v")


def test_every_so_many_steps_the_version_just_made_is_validated_on_all_tasks(tmp_path: Path) -> None:
    played = validated(tmp_path)
    assert played.summary.finished
    assert [end.data["trained"] for _, end in windows(played)] == [2, 4, 6]
    for begin, end in windows(played):
        assert (end.data["samples"], end.data["failed"]) == (6, 0) and 0 <= end.data["reward"] <= 1
        assert played.first("served", version=begin.data["trained"]).time_s <= begin.time_s


def test_every_answer_that_is_asked_for_is_judged(tmp_path: Path) -> None:
    played = validated(tmp_path, eval_answers=3)
    assert [(end.data["samples"], end.data["failed"]) for _, end in windows(played)] == [(18, 0)] * 3


def test_validation_is_in_no_ledger_and_in_no_batch(tmp_path: Path) -> None:
    played = validated(tmp_path)
    counts = audit(tmp_path)
    assert counts["trained"] == 12
    ended = [event.data["sample"] for event in played.of("sample.end")]
    assert not [sample for sample in ended if sample.startswith("v")]
    assert len([event for event in played.of("sample.start") if event.who == "validate"]) == 18


def test_beside_training_both_lanes_are_at_work_at_once(tmp_path: Path) -> None:
    played = validated(tmp_path)
    both = 0
    for begin, end in windows(played):
        starts = [event for event in played.of("request.start") if begin.time_s <= event.time_s <= end.time_s]
        both += any(is_training(event) for event in starts) and any(not is_training(event) for event in starts)
    assert both > 0


def test_with_generation_paused_training_requests_stop_at_an_action_and_go_on_afterwards(tmp_path: Path) -> None:
    played = validated(tmp_path, pause_generation_for_validation=True)
    assert played.summary.finished
    interrupted = []
    for begin, end in windows(played):
        for event in played.of("request.start"):
            assert not (is_training(event) and begin.time_s < event.time_s < end.time_s), event
        for event in played.of("request.end"):
            if is_training(event) and begin.time_s < event.time_s < end.time_s:
                assert event.time_s <= begin.time_s + ACTION_S + 1e-6, "only to the end of the action it was at"
            if is_training(event) and begin.time_s <= event.time_s <= begin.time_s + ACTION_S:
                interrupted += [event.data["request"]] if event.data["finish"] == "aborted" else []
    assert interrupted
    for request in interrupted:
        ends = played.of("request.end", request=request)
        assert len(ends) > 1, "it went on"
        finish = played.of("sample.finish", sample=request.split("/")[0])
        if finish:
            assert sum(event.data["actions"] for event in ends) == finish[0].data["actions"], "with what it had"


def test_a_run_ends_only_when_its_last_validation_has(tmp_path: Path) -> None:
    played = validated(tmp_path, eval_steps=6, val_batch_size=20)
    assert played.first("validate.end").time_s > played.of("step.end")[-1].time_s + 1
    assert played.summary.finished and played.events[-1].time_s >= played.first("validate.end").time_s


def test_without_tasks_or_steps_to_validate_there_is_none(tmp_path: Path) -> None:
    for name, settings in {"steps": {"eval_steps": 0}, "tasks": {"val_batch_size": 0}}.items():
        assert windows(validated(tmp_path / name, **settings)) == []


def test_validations_take_turns(tmp_path: Path) -> None:
    played = validated(tmp_path, eval_steps=1, val_batch_size=30)
    assert len(windows(played)) == 6
    for (_, end), (begin, _) in zip(windows(played), windows(played)[1:], strict=False):
        assert end.time_s <= begin.time_s


def test_a_crash_under_validation_is_survived_and_its_samples_count(tmp_path: Path) -> None:
    at_s = windows(validated(tmp_path / "healthy"))[0][0].time_s + 0.3
    crash = FaultConfig(kind="crash", target="engine/0", at_s=at_s)
    played = play_through(make_validated(crash, engines=2), tmp_path / "crash")
    assert played.summary.finished
    assert [(end.data["trained"], end.data["samples"]) for _, end in windows(played)] == [(2, 6), (4, 6), (6, 6)]
    assert windows(played)[0][0].time_s < at_s < windows(played)[0][1].time_s


def test_an_answer_of_another_version_is_a_failure_and_no_part_of_a_score() -> None:
    def answer(*versions: int) -> tuple[Episode, Score]:
        runs = tuple(VersionRun(version=version, count=1) for version in versions)
        made = Generation(actions=[1] * len(runs), logps=[0.0] * len(runs), runs=runs, finish=FinishReason.STOP)
        turn = Turn(observation=[], generation=made)
        return Episode(sample_id="v4.0", task=Task(position=0), turns=(turn,)), Score(value=1.0)

    sample = EvaluatedSample(task=Task(position=0), answers=(answer(4, 4), answer(4, 5)), failures=("late",))
    (kept,) = keep_one_version([sample], 4)
    assert len(kept.answers) == 1 and len(kept.failures) == 2


def test_a_validation_whose_version_is_lost_begins_anew_with_the_version_that_is_served_then(tmp_path: Path) -> None:
    long = DistributionConfig(mean=500)
    costs = make_costs(environment=SimulatedEnvironmentConfig(step_s=DistributionConfig(mean=3.0)))
    costs = replace(costs, response_tokens=long, trainer=SimulatedTrainerConfig(fixed_s=0.2, restart_s=2.0))
    healthy = make_validated(costs=costs, async_generation_ratio=2, eval_steps=4)
    begin = windows(play_through(healthy, tmp_path / "healthy"))[0][0]
    crash = FaultConfig(kind="crash", target="engine/0", at_s=begin.time_s + 7.5)
    lossy = replace(healthy, simulation=replace(healthy.simulation, faults=(crash,)))
    played = play_through(lossy, tmp_path / "crash")
    begun = [event.data["trained"] for event in played.of("validate.begin")]
    ended = [
        (event.data["trained"], event.data["samples"], event.data["failed"]) for event in played.of("validate.end")
    ]
    assert begun[0] == 4 and begun[1] > 4 and ended[0] == (begun[1], 6, 0)
    assert "every engine with version 4 was lost" in played.first("error", who="validate").data["message"]


def test_a_run_that_stops_says_which_version_has_no_score(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []

    def stop(event: LoggedEvent) -> None:
        if event.kind == "validate.begin":
            flows[0].stop("enough")

    played = play_through(make_validated(), tmp_path, prepare=flows.append, on_event=stop)
    assert played.summary.reason == "enough" and not played.of("validate.end")
    (error,) = played.of("error", who="validate")
    assert "the run stopped before version 2 had a held-out score" in error.data["message"]


def test_weights_wait_for_the_answers_of_a_validation_and_not_for_its_scores(tmp_path: Path) -> None:
    slow = SimulatedRewardConfig(latency_s=DistributionConfig(mean=5.0))
    costs = make_costs(engine=make_engine_cost(slots=3), reward=slow, response_tokens=SPREAD)
    played = play_through(make_validated(costs=costs, async_generation_ratio=3), tmp_path)
    early = 0
    for begin, end in windows(played):
        answered = max(
            event.time_s
            for event in played.of("sample.finish", who="validate")
            if begin.time_s <= event.time_s <= end.time_s
        )
        served = [event.time_s for event in played.of("served") if begin.time_s < event.time_s]
        assert all(time_s >= answered for time_s in served), "no new weights before the last answer"
        early += any(time_s < end.time_s for time_s in served)
    assert early, "new weights come while scores are still missing"


def test_mixed_versions_are_an_option_that_says_so(tmp_path: Path) -> None:
    costs = make_costs(response_tokens=DistributionConfig(mean=400), engine=make_engine_cost(slots=3))
    ends = play_through(make_validated(costs=costs, mixed_version_validation=True), tmp_path / "mixed")
    assert all(end.data["mixed"] for _, end in windows(ends))
    spans = [event.data["newest"] - event.data["oldest"] for event in ends.of("sample.finish", who="validate")]
    assert max(spans) > 0, "weights changed within an answer"
    assert not any("mixed" in end.data for _, end in windows(validated(tmp_path / "one")))


@pytest.mark.parametrize("seeds", [range(12), range(12, 24)], ids=str)
def test_no_score_contains_a_foreign_version_whatever_fails(seeds: range, tmp_path: Path) -> None:
    validated = 0
    for seed in seeds:
        scenario = random_scenario(seed, faults=4.0)
        more = {"eval_steps": 1, "val_batch_size": 5, "eval_answers": 1 + seed % 2, "eval_at_start": seed % 3 == 0}
        scenario = replace(scenario, settings=replace(scenario.settings, **more))
        witness = Witness(scenario.settings)
        summary = live(scenario, tmp_path / f"run-{seed}", witness)
        assert summary is not None and "no progress" not in summary.reason, f"seed {seed}: {summary}"
        validated += len(witness.validated)
    assert validated > 2 * len(seeds)


def test_samples_without_a_verdict_are_counted_as_failed(tmp_path: Path) -> None:
    costs = make_costs(reward=SimulatedRewardConfig(failure_probability=0.6))
    settings = {"max_steps": 2, "eval_steps": 2, "val_batch_size": 30}
    played = play_through(make_scenario(costs=costs, **settings), tmp_path)
    (end,) = played.of("validate.end")
    assert end.data["samples"] + end.data["failed"] == 30 and end.data["failed"] > 0


@pytest.mark.parametrize("paused", [True, False])
def test_training_loses_nothing_to_validation(paused: bool, tmp_path: Path) -> None:
    played = validated(tmp_path, pause_generation_for_validation=paused, staleness_policy="wait")
    trained = {event.data["sample"] for event in played.of("sample.end", end="trained")}
    made = {event.data["sample"]: event.data["actions"] for event in played.of("sample.finish", who="generate")}
    assert len(trained) == 12 and trained <= made.keys() and played.of("group.drop") == []
