"""The rollout loop: members, spares, replacements, verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headway.config.simulation_config import DistributionConfig, FaultConfig, SimulatedRewardConfig
from headway.errors import RewardError
from headway.rollout.replica import RequestLane
from headway.sim import simulated_environment as sim_reward
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import DropReason, Episode, Score, VersionRun
from tests.flow.factory import RELIABILITY, Scripted, make_sample_group
from tests.rollout.factory import Rollout


def play(main: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]]) -> None:
    """A test inside a task group, as a line has one."""

    async def outer() -> None:
        async with asyncio.TaskGroup() as tasks:
            await main(tasks)

    run_on_virtual_clock(outer(), max_time_s=10_000)


def lengths(*script: Any) -> Scripted:
    """Group 0 whose members take so many actions, or fail so."""
    return Scripted({0: script}, otherwise=10)


def make_reward(**changes: Any) -> sim_reward.SimulatedReward:
    return sim_reward.SimulatedReward(SimulatedRewardConfig(**changes))


class FailsFor:
    """A reward that has no verdict on some samples."""

    def __init__(self, *samples: str) -> None:
        self._samples = samples
        self.asked: list[str] = []

    async def score(self, episode: Episode) -> Score:
        self.asked.append(episode.sample_id)
        if episode.sample_id in self._samples:
            raise ValueError(f"no idea about {episode.sample_id}")
        return Score(value=1.0)


def test_a_group_is_handed_on_the_moment_its_last_member_is_in() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=lengths(10, 50, 30), group_size=3).begin()
        run_ = rollout.start()
        await rollout.full.wait()
        assert rollout.event_loop.time() == pytest.approx(5.0)
        assert list(run_.episodes) == ["0.0", "0.2", "0.1"], "in the order they came in"
        assert rollout.book.finished == ["0.0", "0.2", "0.1"] and rollout.book.dropped == {}

    play(main)


def test_members_are_requests_of_their_own_and_run_on_different_replicas() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, engines=3, group_size=3).begin()
        rollout.start()
        await rollout.full.wait()
        assert {event.who for event in rollout.events if event.kind == "request.start"} == {
            "engine/0",
            "engine/1",
            "engine/2",
        }

    play(main)


def test_members_of_a_group_that_is_not_replicated_all_go_to_one() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, engines=3, group_size=3, is_num_return_sequences_expand=False).begin()
        rollout.start(0)
        rollout.start(1)
        await asyncio.sleep(100)
        places = {(event.data["request"][0], event.who) for event in rollout.events if event.kind == "request.start"}
        assert places == {("0", "engine/0"), ("1", "engine/1")}

    play(main)


# -- spares


def test_spare_members_are_cancelled_and_recorded_at_the_time_the_group_is_full() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        environments = lengths(100, 10, 20, 200)
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=2, redundant_members=2).begin()
        rollout.start()
        await rollout.full.wait()
        assert rollout.book.started == ["0.0", "0.1", "0.2", "0.3"]
        assert list(rollout.groups[0][0].episodes) == ["0.1", "0.2"]
        surplus = {name: (DropReason.SURPLUS_MEMBER, pytest.approx(2.0)) for name in ("0.0", "0.3")}
        assert rollout.book.dropped == surplus
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rollout.hub.replicas[0].load == 0, "their requests are gone from the engine"
        assert rollout.times("request.end", finish="failed") == [2.0, 2.0]
        await asyncio.sleep(100)
        assert environments.closed == 4 and len(rollout.groups) == 1

    play(main)


def test_a_failed_member_is_not_replaced_while_spares_can_fill_the_group() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        environments = lengths(ValueError("broken"), 30, 20)
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=2, redundant_members=1).begin()
        rollout.start()
        await rollout.full.wait()
        assert rollout.book.started == ["0.0", "0.1", "0.2"]
        assert list(rollout.groups[0][0].episodes) == ["0.2", "0.1"]

    play(main)


# -- failures


def test_a_failed_member_is_replaced_at_once_by_another_of_a_new_name() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=lengths(ValueError("broken"), 50, 20), group_size=2).begin()
        rollout.start()
        await rollout.full.wait()
        assert rollout.book.started == ["0.0", "0.1", "0.2"]
        assert rollout.book.dropped == {"0.0": (DropReason.ENVIRONMENT_FAILED, pytest.approx(0.1))}
        assert list(rollout.groups[0][0].episodes) == ["0.2", "0.1"]
        errors = [event.data for event in rollout.events if event.kind == "error"]
        assert errors == [{"error": "EnvironmentFailed", "message": "0.0: step raised ValueError: broken"}]

    play(main)


def test_a_member_that_the_engines_failed_says_so() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        lost = FaultConfig(kind="lost_message", target="engine/0", at_s=0, for_s=3.5)
        rollout = await Rollout(lost, tasks=tasks, group_size=1).begin()
        await asyncio.sleep(0.5)
        rollout.start()
        await rollout.full.wait()
        assert [reason for reason, _ in rollout.book.dropped.values()] == [DropReason.ENGINE_FAILED]

    play(main)


def test_a_group_that_keeps_failing_is_given_up_when_its_budget_is_spent() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reliability = replace(RELIABILITY, sample_retries=2)
        environments = Scripted(otherwise=ValueError("broken"))
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=1, reliability=reliability).begin()
        rollout.start()
        await asyncio.sleep(100)
        assert [(run_.group_id, reason) for run_, reason in rollout.given_up] == [(0, DropReason.GROUP_FAILED)]
        assert rollout.book.started == ["0.0", "0.1", "0.2"] == list(rollout.book.dropped)
        assert {reason for reason, _ in rollout.book.dropped.values()} == {DropReason.ENVIRONMENT_FAILED}
        assert rollout.loop.runs == {} and rollout.groups == []

    play(main)


def test_giving_a_group_up_stops_its_other_members() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reliability = replace(RELIABILITY, sample_retries=0)
        environments = lengths(ValueError("broken"), 1000)
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=2, reliability=reliability).begin()
        rollout.start()
        await asyncio.sleep(0.5)
        assert len(rollout.given_up) == 1
        assert rollout.hub.replicas[0].load == 0 and environments.closed == 2

    play(main)


def test_a_cancelled_group_stops_everything_and_reports_nothing() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        environments = lengths(10, 1000)
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=2).begin()
        rollout.start()
        await asyncio.sleep(2)
        rollout.loop.cancel(0)
        rollout.loop.cancel(0)
        await asyncio.sleep(0.2)
        assert rollout.hub.replicas[0].load == 0 and environments.closed == 2
        assert rollout.groups == rollout.given_up == [] and rollout.book.dropped == {}

    play(main)


def test_a_member_that_ends_in_the_tick_in_which_its_group_is_cancelled_is_not_handed_in() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=lengths(10), group_size=1).begin()
        rollout.event_loop.call_at(1.0, rollout.loop.cancel, 0)
        rollout.start()
        await asyncio.sleep(5)
        assert rollout.groups == [] and rollout.book.finished == []

    play(main)


# -- verdicts


def test_a_sample_is_scored_the_moment_it_ends_whatever_its_siblings_do() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reward = make_reward(latency_s=DistributionConfig(mean=0.5))
        rollout = await Rollout(tasks=tasks, environments=lengths(10, 100), reward=reward, group_size=2).begin()
        run_ = rollout.start()
        await asyncio.sleep(2)
        assert rollout.times("score.start", sample="0.0") == [1.0]
        assert rollout.times("score.end", sample="0.0") == [1.5]
        assert run_.scores["0.0"].done() and "0.1" in run_.agents
        await rollout.full.wait()
        assert not run_.scores["0.1"].done(), "the group does not wait for verdicts"

    play(main)


def test_without_early_scoring_nothing_is_scored_until_somebody_asks() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reward = make_reward(latency_s=DistributionConfig(mean=0.5))
        rollout = await Rollout(tasks=tasks, reward=reward, group_size=2, with_reward=False).begin()
        run_ = rollout.start()
        await rollout.full.wait()
        await asyncio.sleep(5)
        assert rollout.times("score.start") == [] and run_.scores == {}
        verdicts = [rollout.loop.score(run_, episode) for episode in run_.episodes.values()]
        assert verdicts == [rollout.loop.score(run_, episode) for episode in run_.episodes.values()], "once each"
        assert {score.value for score in await asyncio.gather(*verdicts)} <= {0.0, 1.0}
        assert rollout.times("score.start") == [15.0, 15.0]

    play(main)


def test_a_verdict_is_tried_again_and_then_given_up_with_every_failure_recorded() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reward = FailsFor("0.1")
        rollout = await Rollout(tasks=tasks, reward=reward, group_size=2).begin()
        run_ = rollout.start()
        await asyncio.sleep(20)
        assert run_.scores["0.0"].result() == Score(value=1.0)
        with pytest.raises(RewardError, match=r"0\.1: ValueError: no idea about 0\.1"):
            run_.scores["0.1"].result()
        assert reward.asked.count("0.1") == 1 + RELIABILITY.sample_retries
        errors = [event.who for event in rollout.events if event.kind == "error"]
        assert errors == ["reward"] * 3

    play(main)


def test_a_verdict_that_never_comes_fails_at_its_deadline() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        reliability = replace(RELIABILITY, sample_retries=0, reward_timeout_s=8)
        reward = make_reward(latency_s=DistributionConfig(mean=1000))
        rollout = await Rollout(tasks=tasks, reward=reward, reliability=reliability).begin()
        run_ = rollout.start()
        await asyncio.sleep(30)
        with pytest.raises(RewardError, match="no score after 8 s"):
            run_.scores["0.0"].result()
        assert rollout.times("score.end") == [18.0]

    play(main)


def test_a_member_replaced_after_the_hand_over_lets_the_group_be_handed_on_again() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=lengths(10, 10, 20), group_size=2).begin()
        run_ = rollout.start()
        await asyncio.sleep(2)
        rollout.loop.replace(run_, "0.0", DropReason.REWARD_FAILED)
        await asyncio.sleep(10)
        assert [list(run_.episodes), len(rollout.groups)] == [["0.1", "0.2"], 2]
        assert rollout.groups[1][1] == pytest.approx(4.0)
        assert set(run_.scores) == {"0.1", "0.2"}

    play(main)


# -- going on


def test_a_restored_group_keeps_what_was_in_plays_on_what_was_not_and_starts_what_is_missing() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, environments=Scripted(otherwise=50), group_size=3).begin()
        episode = make_sample_group(0, 0, actions=50).samples[0].episode
        partial = replace(episode.turns[0].generation, runs=(VersionRun(version=0, count=30),))
        partial = replace(partial, actions=partial.actions[:30], logps=partial.logps[:30])
        run_ = rollout.loop.restore(
            0,
            episode.task,
            started=2,
            episodes={"0.0": episode},
            unfinished={"0.1": partial},
            scores={"0.0": Score(value=0.25)},
        )
        await rollout.full.wait()
        assert rollout.event_loop.time() == pytest.approx(5.0)
        assert rollout.times("sample.finish", sample="0.1", actions=50) == [2.0], "20 of 50 were left"
        assert rollout.book.started == ["0.2"], "the others were started by an earlier process"
        assert run_.scores["0.0"].result() == Score(value=0.25)

    play(main)


def test_a_restored_group_that_is_complete_is_handed_on_at_once() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, group_size=1).begin()
        episode = make_sample_group(0, 0).samples[0].episode
        episodes = {episode.sample_id: episode}
        rollout.loop.restore(0, episode.task, started=1, episodes=episodes, unfinished={}, scores={})
        assert len(rollout.groups) == 1
        await asyncio.sleep(1)
        assert rollout.times("score.end") == [0.0]

    play(main)


def test_what_members_have_made_so_far_can_be_kept() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        environments = lengths(10, 1000, (20, 1000))
        rollout = await Rollout(tasks=tasks, environments=environments, group_size=3).begin()
        run_ = rollout.start()
        await asyncio.sleep(4)
        await rollout.hub.pause(RequestLane.TRAIN)
        await asyncio.sleep(1)
        partials = run_.partials()
        found = {name: (len(partial.before), len(partial.actions)) for name, partial in partials.items()}
        assert found == {"0.1": (0, 40), "0.2": (1, 20)}, "turns that the environment has answered, and the present one"
        rollout.loop.cancel(0)

    play(main)


def test_the_age_of_a_group_is_that_of_its_oldest_member() -> None:
    async def main(tasks: asyncio.TaskGroup) -> None:
        rollout = await Rollout(tasks=tasks, slots=1, environments=lengths(10, 10, 10), group_size=3).begin()
        run_ = rollout.start()
        await asyncio.sleep(0.5)
        assert run_.oldest(unstarted=7) == 0 and run_.oldest(unstarted=-1) == -1
        await rollout.full.wait()
        assert run_.oldest(unstarted=-1) == 0, "nobody is left who has not begun"

    play(main)
