"""Whole runs on the virtual clock: staleness, slots, versions, ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from headway.config import StageConfig, load_config
from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedRewardConfig,
    SimulatedScorerConfig,
    SimulatedWeightsConfig,
)
from headway.errors import ConfigError, InvariantBroken
from headway.flow.backends import RunContext
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_policies import CandidateGroup, DropPolicy, SchedulerSnapshot
from headway.flow.training_flow import ROLES, AsyncTrainingFlow
from headway.monitor.event_log import EventLog, LoggedEvent, encode_event
from headway.registry import STALENESS_POLICIES
from headway.settings import make_run_settings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_run import Scenario, make_simulated_backends
from headway.types import DropReason, SampleGroup
from tests.flow.factory import Played, Scripted, audit, make_costs, make_scenario, own_stages, play_through

SPREAD = DistributionConfig(kind="lognormal", mean=100, std=150, min=1, max=1500)


def outstanding_over(events: Sequence[LoggedEvent], engines: int) -> list[int]:
    """Slots taken after every event, told from the events alone."""
    open_, made, served = set(), {}, {f"engine/{number}": -1 for number in range(engines)}
    counts = []
    for event in events:
        if event.kind == "group.start":
            open_.add(event.data["group"])
        elif event.kind == "group.drop":
            open_.discard(event.data["group"])
        elif event.kind == "group.train":
            made[event.data["group"]] = event.data["trained"] + 1
        elif event.kind == "served":
            served[event.who] = event.data["version"]
            open_ -= {group for group in open_ if made.get(group, 1e9) <= min(served.values())}
        counts.append(len(open_))
    return counts


def lags(played: Played) -> set[int]:
    return {event.data["trained"] - event.data["oldest"] for event in played.of("group.train")}


# -- slots


@pytest.mark.parametrize(
    ("alpha", "depth", "spares"), [(0, None, 0), (1, None, 0), (2, 1, 0), (2, None, 2), (0.5, None, 0), (1.7, 0.6, 1)]
)
def test_over_a_whole_run_no_more_groups_are_outstanding_than_there_are_slots(
    alpha: float, depth: float | None, spares: int, tmp_path: Path
) -> None:
    costs = make_costs(response_tokens=SPREAD, weights=SimulatedWeightsConfig(buckets=2, send_s=0.4))
    settings: dict[str, Any] = {
        "groups_per_step": 4,
        "max_steps": 8,
        "async_generation_ratio": alpha,
        "pipeline_depth": depth,
    }
    played = play_through(make_scenario(engines=2, costs=costs, additional_groups=spares, **settings), tmp_path)
    most = int((1 + (alpha if depth is None else depth)) * 4) + spares
    counts = outstanding_over(played.events, engines=2)
    assert max(counts) == most, "all of them are used, and not one more"
    assert played.summary.finished and max(lags(played)) <= ceil(alpha)


def test_a_slot_is_not_free_before_the_weights_made_from_it_are_served(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=4, send_s=3.0))
    played = play_through(make_scenario(costs=costs, max_steps=2), tmp_path)
    trained, served = played.first("step.end").time_s, played.first("served", version=1).time_s
    assert served == pytest.approx(trained + 3.0)
    starts = [event.time_s for event in played.of("group.start")]
    assert starts[:4] == pytest.approx([starts[0]] * 2 + [served] * 2)


def test_a_pipeline_shallower_than_the_bound_keeps_the_bound(tmp_path: Path) -> None:
    costs = make_costs(response_tokens=SPREAD)
    deep = play_through(
        make_scenario(costs=costs, max_steps=12, async_generation_ratio=3, staleness_policy="wait"), tmp_path / "deep"
    )
    scenario = make_scenario(
        costs=costs, max_steps=12, async_generation_ratio=3, pipeline_depth=0.5, staleness_policy="wait"
    )
    shallow = play_through(scenario, tmp_path / "shallow")
    assert max(lags(shallow)) < max(lags(deep)) <= 3


# -- freshness


@pytest.mark.parametrize("policy", ["drop", "wait", "window"])
def test_at_zero_every_sample_is_made_by_the_weights_that_are_trained(policy: str, tmp_path: Path) -> None:
    costs = make_costs(response_tokens=SPREAD)
    played = play_through(make_scenario(costs=costs, max_steps=5, staleness_policy=policy), tmp_path)
    assert played.summary.finished and lags(played) == {0}
    trained = {event.data["sample"] for event in played.of("sample.end", end="trained")}
    versions = {
        (e.data["oldest"] == e.data["newest"]) for e in played.of("sample.finish") if e.data["sample"] in trained
    }
    assert versions == {True}


def test_strictly_on_policy_rollout_and_training_take_turns(tmp_path: Path) -> None:
    played = play_through(make_scenario(), tmp_path)
    assert played.events[-1].time_s == pytest.approx(3 * (1.0 + 1.0) + 0.1)
    steps = list(zip(played.of("step.begin"), played.of("step.end"), strict=True))
    for request in played.of("request.start"):
        assert not any(begin.time_s <= request.time_s < end.time_s for begin, end in steps)


def test_one_step_ahead_rollout_and_training_overlap(tmp_path: Path) -> None:
    played = play_through(make_scenario(async_generation_ratio=1, max_steps=10), tmp_path)
    assert played.events[-1].time_s == pytest.approx(10 * 1.0 + 1.0 + 0.1)
    assert lags(played) == {0, 1}


def test_a_switch_makes_any_run_synchronous(tmp_path: Path) -> None:
    assert (
        make_flow(make_scenario(async_generation_ratio=2, pipeline_depth=1), enable_async_rl=False).settings.slots == 2
    )
    assert (
        make_flow(make_scenario(async_generation_ratio=2, pipeline_depth=1), enable_async_rl=True).settings.slots == 4
    )


def make_flow(scenario: Scenario, *, engines: bool = True, **how: Any) -> AsyncTrainingFlow:
    backends = make_simulated_backends(scenario, FaultInjector())
    return AsyncTrainingFlow(
        trainer=RunContext(
            backends=backends if engines else replace(backends, engines=()),
            settings=scenario.settings,
            events=EventLog(lambda: 0.0),
            run_dir=Path(),
            clock=lambda: 0.0,
        ),
        **how,
    )


@pytest.mark.parametrize(
    "override",
    ["trainer.generate_ahead_steps=2", "actor_rollout_ref.async_strategy=one-step-off", "async_generation_ratio=1"],
)
def test_every_way_to_ask_for_one_step_ahead_runs_one_step_ahead(override: str, tmp_path: Path) -> None:
    settings = make_run_settings(load_config({"rollout_batch_size": 4, "max_steps": 6}, [override]))
    assert settings.async_generation_ratio == 1
    played = play_through(replace(make_scenario(), settings=settings), tmp_path)
    assert played.summary.finished and lags(played) == {0, 1}


def test_freshness_is_judged_against_what_is_trained_while_what_is_served_lags_behind(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=2, send_s=2.5))
    played = play_through(
        make_scenario(costs=costs, async_generation_ratio=1, additional_groups=4, max_steps=8), tmp_path
    )
    behind = {event.data["trained"] - event.data["version"] for event in played.of("served")}
    assert max(behind) >= 1, "weights go out while the next step is trained"
    assert max(lags(played)) == 1
    assert played.of("group.drop"), "what would have been fresh by what is served was let go"


def test_a_policy_that_takes_stale_groups_breaks_the_run_and_trains_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STALENESS_POLICIES._entries, "wait", Careless)
    events: list[LoggedEvent] = []
    with pytest.raises(InvariantBroken, match="has lag 1 at trained = 1, alpha = 0"):
        play_through(make_scenario(additional_groups=2), tmp_path, on_event=events.append)
    assert [event.data["trained"] for event in events if event.kind == "step.begin"] == [0]
    assert audit(tmp_path)["trained"] == 2


class Careless(DropPolicy):
    """Lets nothing go and takes whatever is ready."""

    def evict(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup]:
        return []

    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup] | None:
        ready = [group for group in groups if group.is_ready]
        return ready[: self._size] if len(ready) >= self._size else None


# -- the three policies


def test_drop_cancels_a_straggler_at_the_time_it_becomes_useless_and_draws_its_prompt_again(tmp_path: Path) -> None:
    scenario = make_scenario(groups_per_step=1, async_generation_ratio=1, max_steps=8, staleness_policy="drop")
    played = play_through(scenario, tmp_path, prepare=Scripted({1: [1000]}).use)
    drop = played.first("group.drop")
    assert drop.data == {"group": 1, "reason": DropReason.STALE_IN_FLIGHT}
    second_batch = played.of("step.begin")[1].time_s
    aborted = played.first("request.end", request="1.0/0")
    assert drop.time_s == aborted.time_s == second_batch == pytest.approx(3.0)
    assert aborted.data["actions"] == pytest.approx(300, abs=1), "of a thousand"
    again = played.of("group.start", position=1)[1]
    assert again.time_s >= drop.time_s
    assert played.of("group.train", group=again.data["group"])


def test_wait_lets_training_wait_for_the_straggler_and_drops_nothing(tmp_path: Path) -> None:
    scenario = make_scenario(groups_per_step=1, async_generation_ratio=1, max_steps=4, staleness_policy="wait")
    played = play_through(scenario, tmp_path, prepare=Scripted({1: [1000]}).use)
    assert played.of("group.drop") == [] and played.summary.finished
    assert played.first("group.train", group=1).time_s == pytest.approx(10.0)
    assert played.first("group.train", group=1).data["oldest"] == 0


def test_wait_never_drops_for_staleness_where_drop_does(tmp_path: Path) -> None:
    stale = {}
    for policy in ("drop", "wait"):
        costs = make_costs(response_tokens=SPREAD)
        scenario = make_scenario(
            engines=2, costs=costs, async_generation_ratio=1, max_steps=12, staleness_policy=policy
        )
        played = play_through(scenario, tmp_path / policy)
        assert played.summary.finished
        stale[policy] = len(played.of("group.drop"))
    assert stale["wait"] == 0 < stale["drop"]


def test_window_overtakes_one_straggler_but_not_two(tmp_path: Path) -> None:
    begins = {}
    for stragglers in (1, 2):
        scenario = make_scenario(
            groups_per_step=1, async_generation_ratio=5, max_steps=3, staleness_policy="window", staleness_window=2
        )
        script = Scripted({number: [700 - 100 * number] for number in range(stragglers)})
        played = play_through(scenario, tmp_path / str(stragglers), prepare=script.use)
        begins[stragglers] = played.first("step.begin").time_s
    assert begins == {1: pytest.approx(1.0), 2: pytest.approx(6.0)}


# -- versions inside a sample


def test_a_sample_that_spans_updates_says_which_version_made_what_and_the_counts_add_up(tmp_path: Path) -> None:
    groups: list[SampleGroup] = []
    with own_stages():

        @register_stage("witness")
        class Witness(Stage[SampleGroup, SampleGroup]):
            consumes = produces = SampleGroup

            async def process(self, item: SampleGroup) -> SampleGroup:
                groups.append(item)
                return item

        scenario = make_scenario(
            groups_per_step=1,
            async_generation_ratio=3,
            max_steps=5,
            world={"stages": (StageConfig(name="witness", after="reward"),)},
        )
        play_through(scenario, tmp_path, prepare=Scripted({0: [350]}).use)
    long = next(group.samples[0] for group in groups if group.group_id == 0)
    runs = long.episode.runs
    assert [run.version for run in runs] == [0, 1, 2]
    assert sum(run.count for run in runs) == len(long.episode.turns[0].generation.actions) == long.actions == 350
    assert (long.oldest, long.newest) == (0, 2)


# -- the same again


@pytest.mark.parametrize("faults", [(), (FaultConfig(kind="crash", target="engine/0", at_s=3.3),)])
def test_the_same_scenario_gives_the_same_log_byte_for_byte_and_another_seed_another(
    faults: tuple[FaultConfig, ...], tmp_path: Path
) -> None:
    def log(seed: int, name: str) -> str:
        costs = make_costs(response_tokens=SPREAD, reward=SimulatedRewardConfig(latency_s=DistributionConfig(mean=0.3)))
        settings = {
            "async_generation_ratio": 1,
            "group_size": 3,
            "redundant_members": 1,
            "max_steps": 6,
            "save_steps": 2,
        }
        scenario = make_scenario(*faults, engines=2, costs=costs, world={"seed": seed}, **settings)
        return "\n".join(encode_event(event) for event in play_through(scenario, tmp_path / name).events)

    first = log(7, "first")
    assert first == log(7, "second")
    assert first != log(8, "third")


# -- ends


def test_a_source_that_ends_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    played = play_through(make_scenario(max_steps=10, async_generation_ratio=1, world={"tasks": 5}), tmp_path)
    summary = played.summary
    assert (summary.trained, summary.finished) == (2, False)
    assert summary.reason == "the tasks ran out after 2 of 10 steps"
    assert audit(tmp_path) == {"trained": 4, "saved": 1, "open": 0}


def test_a_source_that_ends_with_stragglers_on_their_way_waits_for_them(tmp_path: Path) -> None:
    scenario = make_scenario(max_steps=10, async_generation_ratio=1, world={"tasks": 4})
    played = play_through(scenario, tmp_path, prepare=Scripted({3: [1000]}).use)
    assert played.summary.trained == 2
    assert played.of("step.begin")[-1].time_s == pytest.approx(10.0)


def test_a_stop_saves_what_is_there_and_a_resumed_run_makes_up_the_rest(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []

    def stop(event: LoggedEvent) -> None:
        if event.kind == "step.end" and event.data["trained"] == 2:
            flows[0].stop("enough for today")

    scenario = make_scenario(max_steps=5, async_generation_ratio=1)
    prepare = Scripted({5: [1000]}).use
    stopped = play_through(scenario, tmp_path, prepare=lambda flow: (flows.append(flow), prepare(flow)), on_event=stop)
    assert (stopped.summary.trained, stopped.summary.reason) == (2, "enough for today")
    assert stopped.first("checkpoint").data == {"trained": 2}
    saved = {event.data["sample"] for event in stopped.of("sample.end", end="saved")}
    assert saved and audit(tmp_path)["saved"] == len(saved)

    resumed = play_through(scenario, tmp_path, prepare=Scripted({5: [1000]}).use)
    assert resumed.summary.finished and resumed.summary.trained == 5
    assert {event.data["sample"] for event in resumed.of("sample.reopen")} == saved
    assert [event.data["trained"] for event in resumed.of("step.end")] == [3, 4, 5]
    assert audit(tmp_path)["trained"] == 10


def test_what_a_stop_interrupted_is_continued_and_not_made_again(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []

    def stop(event: LoggedEvent) -> None:
        if event.kind == "step.begin":
            flows[0].stop()

    script, scenario = (
        {1: [400]},
        make_scenario(groups_per_step=1, async_generation_ratio=2, max_steps=3, staleness_policy="wait"),
    )
    prepare = Scripted(script).use
    play_through(scenario, tmp_path, prepare=lambda flow: (flows.append(flow), prepare(flow)), on_event=stop)
    resumed = play_through(scenario, tmp_path, prepare=Scripted(script).use)
    made = resumed.first("request.end", request="1.0/0").data["actions"]
    assert made == pytest.approx(200, abs=2), "half was there when the step that was under way ended"
    assert resumed.first("sample.finish", sample="1.0").data["actions"] == 400


def test_a_stop_lets_the_step_under_way_end_and_no_other_begin(tmp_path: Path) -> None:
    flows: list[AsyncTrainingFlow] = []

    def stop(event: LoggedEvent) -> None:
        if event.kind == "step.begin":
            flows[0].stop()

    scenario = make_scenario(groups_per_step=1, async_generation_ratio=4, max_steps=9)
    played = play_through(scenario, tmp_path, prepare=flows.append, on_event=stop)
    assert len(played.of("step.begin")) == len(played.of("step.end")) == played.summary.trained == 1
    assert audit(tmp_path)["saved"] == 4


def test_a_stop_before_anything_began_is_a_clean_one_too(tmp_path: Path) -> None:
    played = play_through(make_scenario(), tmp_path, prepare=lambda flow: flow.stop())
    assert (played.summary.trained, played.summary.reason) == (0, "asked to stop")
    assert play_through(make_scenario(), tmp_path).summary.finished


def test_a_finished_run_started_again_has_nothing_to_do(tmp_path: Path) -> None:
    play_through(make_scenario(async_generation_ratio=1), tmp_path)
    again = play_through(make_scenario(async_generation_ratio=1), tmp_path)
    assert again.summary.finished and again.summary.trained == 3
    assert again.of("step.begin") == []


# -- the line


def test_there_is_a_critic_stage_where_there_is_a_critic_and_nowhere_else(tmp_path: Path) -> None:
    without = play_through(make_scenario(max_steps=1), tmp_path / "without")
    assert list(without.flow.stages) == list(ROLES)
    costs = make_costs(critic=SimulatedScorerConfig(fixed_s=0.5))
    played = play_through(make_scenario(costs=costs, max_steps=1), tmp_path / "with")
    assert list(played.flow.stages) == [*ROLES[:6], "critic", *ROLES[6:]]
    assert played.summary.finished
    (group,) = {event.data["group"] for event in played.of("group.train")} - {1}
    assert played.first("group.train", group=group).time_s == pytest.approx(2.0), "two groups, half a second each"


def test_a_flow_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="no engine to generate with"):
        make_flow(make_scenario(), engines=False)


def test_every_stage_ends_stopped(tmp_path: Path) -> None:
    played = play_through(make_scenario(async_generation_ratio=1), tmp_path)
    assert {str(stage.state) for stage in played.flow.stages.values()} == {"stopped"}


# -- shared devices


@pytest.mark.parametrize("dual_buffer", [True, False])
@pytest.mark.parametrize(
    ("groups", "alpha", "tokens"), [(2, 0, SPREAD), (2, 1, SPREAD), (1, 3, DistributionConfig(mean=100))]
)
def test_on_shared_devices_nothing_is_generated_while_a_step_is_trained(
    groups: int, alpha: float, tokens: DistributionConfig, dual_buffer: bool, tmp_path: Path
) -> None:
    costs = make_costs(response_tokens=tokens, weights=SimulatedWeightsConfig(buckets=2, send_s=0.4, load_s=0.2))
    settings = {
        "groups_per_step": groups,
        "async_generation_ratio": alpha,
        "enable_dual_buffer": dual_buffer,
        "max_steps": 8,
    }
    scenario = make_scenario(engines=2, costs=costs, hybrid_engine=True, **settings)
    scenario = replace(scenario, train_devices=scenario.infer_devices)
    played = play_through(scenario, tmp_path)
    assert played.summary.finished
    steps = [(event.time_s - 1.0, event.time_s) for event in played.of("step.end")]
    starts = {(event.who, event.data["request"]): event.time_s for event in played.of("request.start")}
    checked = 0
    for end in played.of("request.end", finish="stop"):
        start = starts[end.who, end.data["request"]]
        held = sum(max(0.0, min(end.time_s, after) - max(start, before)) for before, after in steps)
        checked += held > 0
        assert end.time_s - start - held >= end.data["actions"] * 0.01 - 1e-6, f"{end} was made while training"
    assert checked or not alpha, "some requests were held"
