"""What the stages of the line do with groups: verdicts, spares, filters, faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedRewardConfig,
    SimulatedScorerConfig,
)
from headway.errors import ScoringError
from headway.flow.stages.rollout_stage import episode_to_sample, find_fault
from headway.flow.stages.scoring_stages import check_rows
from headway.flow.training_flow import AsyncTrainingFlow
from headway.types import Batch, DropReason, Episode, RepeatedValue, SampleGroup, Score, VersionedScores
from tests.flow.factory import Played, Scripted, audit, make_costs, make_sample_group, make_scenario, play_through

SLOW_VERDICT = make_costs(reward=SimulatedRewardConfig(latency_s=DistributionConfig(mean=0.5)))


class Judge:
    """Verdicts by sample id; an exception is raised."""

    def __init__(self, **verdicts: Any) -> None:
        self._verdicts = {name.replace("_", ".").removeprefix("s"): verdict for name, verdict in verdicts.items()}

    async def score(self, episode: Episode) -> Score:
        verdict = self._verdicts.get(episode.sample_id, float(episode.sample_id.endswith("1")))
        if isinstance(verdict, Exception):
            raise verdict
        return Score(value=verdict)

    def use(self, flow: AsyncTrainingFlow) -> None:
        flow.backends = replace(flow.backends, reward=self)


def reasons(played: Played) -> dict[int, str]:
    return {event.data["group"]: event.data["reason"] for event in played.of("group.drop")}


# -- reward


def test_scoring_overlaps_with_the_generation_of_siblings_or_waits_for_the_group(tmp_path: Path) -> None:
    starts = {}
    for early in (True, False):
        scenario = make_scenario(costs=SLOW_VERDICT, group_size=2, max_steps=1, with_reward=early)
        script = Scripted({0: [100, 300], 1: [100, 100]})
        played = play_through(scenario, tmp_path / str(early), prepare=script.use)
        starts[early] = played.first("score.start", sample="0.0").time_s
        assert played.first("group.ready", group=0).time_s == pytest.approx(3.5)
    assert starts == {True: pytest.approx(1.0), False: pytest.approx(3.0)}


def test_without_with_reward_scoring_starts_when_the_whole_batch_was_drawn(tmp_path: Path) -> None:
    for alpha in (0, 1, 2):
        settings = {"groups_per_step": 3, "group_size": 2, "max_steps": 4, "async_generation_ratio": alpha}
        spread = DistributionConfig(kind="lognormal", mean=100, std=80, min=1, max=400)
        costs = replace(SLOW_VERDICT, response_tokens=spread)
        scenario = make_scenario(costs=costs, with_reward=False, **settings)
        played = play_through(scenario, tmp_path / str(alpha))
        assert played.summary.finished
        ends = {e.data["sample"]: e.time_s for e in played.of("sample.finish")}
        begun: dict[float, set[str]] = {}
        for event in played.of("score.start"):
            begun.setdefault(event.time_s, set()).add(event.data["sample"].split(".")[0])
        assert all(len(groups) == 3 for groups in begun.values()), "three groups at a time"
        for event in played.of("score.start"):
            batch = begun[event.time_s]
            assert max(ends[f"{group}.{member}"] for group in batch for member in (0, 1)) <= event.time_s


def test_a_batch_is_also_filled_by_groups_that_replace_others(tmp_path: Path) -> None:
    judge = Judge(s0_0=1.0, s0_1=1.0, s1_0=ValueError("no idea"))
    settings = {"groups_per_step": 3, "group_size": 2, "max_steps": 2, "filter_zero_variance": True}
    played = play_through(make_scenario(with_reward=False, **settings), tmp_path, prepare=judge.use)
    assert played.summary.finished
    assert [len(played.of("group.train", trained=step)) for step in (0, 1)] == [3, 3]


def test_the_last_groups_of_a_source_are_scored_although_they_fill_no_batch(tmp_path: Path) -> None:
    settings = {"groups_per_step": 3, "max_steps": 9, "with_reward": False}
    played = play_through(make_scenario(world={"tasks": 5}, **settings), tmp_path)
    assert "the tasks ran out after 1 of 9 steps" in played.summary.reason
    assert {event.data["sample"].split(".")[0] for event in played.of("score.start")} == {"0", "1", "2", "3", "4"}


def test_a_member_without_a_verdict_is_replaced_and_the_group_is_trained_whole(tmp_path: Path) -> None:
    judge = Judge(s0_0=ValueError("no idea"))
    played = play_through(make_scenario(group_size=2, max_steps=1), tmp_path, prepare=judge.use)
    assert played.summary.finished
    ends = {e.data["sample"]: e.data.get("reason", e.data["end"]) for e in played.of("sample.end")}
    assert (ends["0.0"], ends["0.1"], ends["0.2"]) == ("reward_failed", "trained", "trained")
    assert played.first("group.train", group=0).data["samples"] == 2


def test_groups_that_teach_nothing_are_dropped_and_fresh_prompts_take_their_place(tmp_path: Path) -> None:
    judge = Judge(s0_0=1.0, s0_1=1.0, s3_0=0.0, s3_1=0.0)
    scenario = make_scenario(group_size=2, max_steps=3, filter_zero_variance=True)
    played = play_through(scenario, tmp_path, prepare=judge.use)
    assert played.summary.finished
    assert reasons(played) == {0: "zero_variance", 3: "zero_variance"}
    assert len(played.of("group.start", position=0)) == 1, "the prompt taught nothing through its own fault"
    trained = [event.data["group"] for event in played.of("group.train")]
    assert trained == [1, 2, 4, 5, 6, 7]
    assert audit(tmp_path)["dropped:zero_variance"] == 4


def test_unfiltered_groups_are_trained_with_advantages_that_are_zero(tmp_path: Path) -> None:
    judge = Judge(s0_0=1.0, s0_1=1.0)
    played = play_through(make_scenario(group_size=2, max_steps=1), tmp_path, prepare=judge.use)
    assert reasons(played) == {} and 0 in {event.data["group"] for event in played.of("group.train")}


def test_groups_of_one_are_never_filtered(tmp_path: Path) -> None:
    played = play_through(make_scenario(group_size=1, filter_zero_variance=True), tmp_path)
    assert played.summary.finished and reasons(played) == {}


# -- spares


def test_spare_prompts_are_cancelled_the_moment_the_batch_is_full_and_drawn_again(tmp_path: Path) -> None:
    script = Scripted({0: [900], 2: [800]})
    played = play_through(make_scenario(additional_groups=2, max_steps=4), tmp_path, prepare=script.use)
    assert played.summary.finished
    begin = played.first("step.begin").time_s
    assert begin == pytest.approx(1.0), "training did not wait for the long ones"
    dropped = [event for event in played.of("group.drop") if event.time_s == begin]
    assert {event.data["group"] for event in dropped} == {0, 2}
    assert {event.time_s for event in played.of("request.end", finish="failed")} >= {begin}
    assert {event.data["reason"] for event in played.of("group.drop")} <= {"surplus_group", "stale_in_flight"}
    again = {event.data["position"] for event in played.of("group.start") if event.data["group"] > 3}
    assert {0, 2} <= again


def test_spare_members_make_groups_whole_without_the_slowest(tmp_path: Path) -> None:
    script = Scripted({0: [900, 100, 100]})
    scenario = make_scenario(group_size=2, redundant_members=1, max_steps=1)
    played = play_through(scenario, tmp_path, prepare=script.use)
    assert played.first("group.ready", group=0).time_s == pytest.approx(1.0)
    surplus = played.first("sample.end", sample="0.0")
    assert surplus.data["reason"] == DropReason.SURPLUS_MEMBER and surplus.time_s == pytest.approx(1.0)


# -- scheduling


def test_a_batch_at_a_time_waits_for_all_of_it_and_a_queue_does_not(tmp_path: Path) -> None:
    starts = {}
    for scheduling in ("queue", "batch"):
        scenario = make_scenario(
            groups_per_step=1,
            async_generation_ratio=2,
            max_steps=4,
            staleness_policy="wait",
            rollout_scheduling=scheduling,
        )
        script = Scripted({1: [600]})
        played = play_through(scenario, tmp_path / scheduling, prepare=script.use)
        assert played.summary.finished
        starts[scheduling] = played.first("group.start", group=3).time_s
    assert starts == {"queue": pytest.approx(2.0), "batch": pytest.approx(6.0)}


def test_with_a_barrier_all_episodes_take_their_turns_together(tmp_path: Path) -> None:
    ends = {}
    for barrier in (False, True):
        scenario = make_scenario(max_steps=1, env_scheduling="barrier" if barrier else "async")
        script = Scripted({0: [(100, 100)], 1: [(300, 100)]})
        played = play_through(scenario, tmp_path / str(barrier), prepare=script.use)
        ends[barrier] = played.first("sample.finish", sample="0.0").time_s
    assert ends == {False: pytest.approx(2.0), True: pytest.approx(4.0)}


# -- rollout


def test_an_episode_whose_counts_do_not_add_up_is_found() -> None:
    episode = make_sample_group(0, 3, 4, actions=5).samples[0].episode
    turn = episode.turns[0]
    assert find_fault(episode) == ""
    broken = replace(turn.generation, logps=RepeatedValue(-1.0, 9))
    torn = replace(episode, turns=(turn, replace(turn, generation=broken)))
    assert find_fault(torn) == "turn 1 has 10 actions, 9 log-probabilities and versions for 10"
    short = replace(turn.generation, runs=turn.generation.runs[:1])
    assert "versions for 5" in find_fault(replace(episode, turns=(replace(turn, generation=short),)))
    empty = replace(turn.generation, actions=(), logps=(), runs=())
    assert find_fault(replace(episode, turns=(replace(turn, generation=empty),))) == "no actions at all"
    assert find_fault(replace(episode, turns=())) == "no actions at all"


def test_a_sample_knows_its_oldest_and_newest_version_and_how_many_actions_it_has() -> None:
    sample = episode_to_sample(make_sample_group(0, 4, 3, 6, actions=5).samples[0].episode)
    assert (sample.oldest, sample.newest, sample.actions) == (3, 6, 15)


# -- scoring


def test_a_scorer_gives_one_number_for_each_action_or_is_refused() -> None:
    group = make_sample_group(7, 0, actions=3)
    check_rows([[0.0] * 3], group)
    with pytest.raises(ScoringError, match=r"group 7: \[2\] numbers for \[3\] actions"):
        check_rows([[0.0] * 2], group)
    with pytest.raises(ScoringError, match="group 7"):
        check_rows([], group)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_a_scorer_on_the_trainers_devices_takes_turns_with_it(with_trainer: bool, tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=0.3, with_trainer=with_trainer))
    played = play_through(make_scenario(costs=costs, async_generation_ratio=2, max_steps=6), tmp_path)
    assert played.summary.finished
    steps = [(event.time_s - 1.0, event.time_s) for event in played.of("step.end")]
    during = 0
    for ready in played.of("group.ready"):  # a score of its own ends right before
        during += any(before + 1e-6 < ready.time_s < after - 1e-6 for before, after in steps)
    assert (during == 0) is with_trainer


def test_a_group_that_is_let_go_while_it_is_scored_is_not_scored_again(tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=2.5, with_trainer=False))
    played = play_through(make_scenario(costs=costs, additional_groups=2, max_steps=3), tmp_path)
    assert played.summary.finished
    gone = {event.data["group"]: event.time_s for event in played.of("group.drop")}
    assert gone
    ready = {event.data["group"]: event.time_s for event in played.of("group.ready")}
    assert not [group for group in gone if ready.get(group, 0) > gone[group]]


def test_a_fault_of_the_environment_is_one_failed_member(tmp_path: Path) -> None:
    costs = make_costs()
    costs = replace(costs, environment=replace(costs.environment, step_s=DistributionConfig(mean=0.2)))
    fault = FaultConfig(kind="hang", target="environment", at_s=1.05)
    played = play_through(make_scenario(fault, costs=costs), tmp_path)
    assert played.summary.finished
    (drop,) = played.of("sample.end", end="dropped")
    assert drop.data["reason"] == DropReason.ENVIRONMENT_FAILED


class Follower:
    """Scores with the weights of now, and sees with which of them each step is given its groups."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []

    async def score(self, group: SampleGroup) -> VersionedScores:
        return VersionedScores(rows=[[-1.0] * one.actions for one in group.samples], version=self.trainer.version)

    def use(self, flow: AsyncTrainingFlow) -> None:
        self.trainer, train = flow.backends.trainer, flow.backends.trainer.train

        async def watched(batch: Batch) -> Mapping[str, float]:
            self.seen += [(batch.trained, one.logps_version) for group in batch.groups for one in group.samples]
            return await train(batch)

        self.trainer.train = watched  # type: ignore[method-assign]
        flow.backends = replace(flow.backends, logp=self)


@pytest.mark.parametrize("alpha", [0, 1])
def test_log_probabilities_say_which_weights_they_are_of(alpha: int, tmp_path: Path) -> None:
    follower = Follower()
    assert play_through(
        make_scenario(async_generation_ratio=alpha, max_steps=4), tmp_path, prepare=follower.use
    ).summary.finished
    lags = {None if version is None else trained - version for trained, version in follower.seen}
    assert lags == ({0} if alpha == 0 else {0, 1}), "a group that is scored during a step is trained by the next"
