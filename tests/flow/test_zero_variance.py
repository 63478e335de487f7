"""Groups with equal rewards are replaced, up to a bound for each step; then they fill it, and the step says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.dashboard.sample_view import SampleFilter, SampleView
from headway.flow.training_flow import AsyncTrainingFlow
from headway.flow.zero_variance import FRUITLESS_BATCHES, ZeroVarianceFilter
from headway.runs.group_log import GroupLog
from headway.types import Episode, Score
from tests.flow.factory import Played, audit, make_costs, make_scenario, make_settings, play_through
from tests.flow.test_checkpoint import last_checkpoint


class Judge:
    """Only groups of these numbers have spread."""

    def __init__(self, *zero_variance: int) -> None:
        self._spread = zero_variance

    async def score(self, episode: Episode) -> Score:
        group, member = episode.sample_id.split(".")
        return Score(value=float(member == "1" and int(group) in self._spread))

    def use(self, flow: AsyncTrainingFlow) -> None:
        flow.backends = replace(flow.backends, reward=self)


def play_judged(judge: Judge, run_dir: Path, **settings: Any) -> Played:
    scenario = make_scenario(**{"group_size": 2, "max_steps": 2, "filter_zero_variance": True, **settings})
    return play_through(scenario, run_dir, prepare=judge.use)


def told(played: Played) -> list[tuple[int, int]]:
    return [(event.data["replaced"], event.data["filled"]) for event in played.of("step.end")]


def batches(played: Played) -> list[list[int]]:
    trained = played.of("group.train")
    return [[e.data["group"] for e in trained if e.data["trained"] == step] for step in range(played.summary.trained)]


def test_after_so_many_batches_worth_a_step_is_filled_with_what_there_is(tmp_path: Path) -> None:
    played = play_judged(Judge(0), tmp_path, max_num_gen_batches=2)
    assert played.summary.finished
    assert batches(played) == [[0, 3], [6, 7]], "two are replaced for each step"
    assert told(played) == [(2, 1), (2, 2)]
    assert [event.data["group"] for event in played.of("group.ready", equal=True)] == [3, 6, 7]
    ends = audit(tmp_path)
    assert (ends["trained"], ends["dropped:zero_variance"]) == (8, 8)


def test_what_is_dropped_is_kept_with_its_reason_and_rewards(tmp_path: Path) -> None:
    log = GroupLog(tmp_path, str)

    def prepare(flow: AsyncTrainingFlow) -> None:
        Judge(1, 2, 7, 8).use(flow)
        flow.context = replace(flow.context, on_dropped=log.write_dropped)

    scenario = make_scenario(group_size=2, max_steps=2, filter_zero_variance=True, max_num_gen_batches=9)
    play_through(scenario, tmp_path, prepare=prepare)
    view = SampleView(tmp_path)
    rows = view.search(SampleFilter(kind="dropped"))["rows"]
    assert {row["group"] for row in rows} == {0, 3, 4}, "two of each step"
    assert {(row["dropped"], row["reward"]) for row in rows} == {("zero_variance", 0.0)}
    group = view.read_group(rows[-1]["id"])
    assert group["title"] == "group 0, dropped while step 1 was under way" and len(group["columns"]) == 2


def test_a_step_that_gets_its_groups_in_time_is_filled_with_nothing(tmp_path: Path) -> None:
    played = play_judged(Judge(1, 2, 5, 6), tmp_path, max_num_gen_batches=3)
    assert batches(played) == [[1, 2], [5, 6]] and told(played) == [(1, 0), (2, 0)]
    assert played.of("group.ready", equal=True) == []


@pytest.mark.parametrize(("most", "replaced"), [(1, 0), (3, 4), (10, 18)])
def test_one_step_costs_no_more_than_its_batches(most: int, replaced: int, tmp_path: Path) -> None:
    played = play_judged(Judge(), tmp_path, max_num_gen_batches=most)
    assert told(played) == [(replaced, 2), (replaced, 2)]
    assert len(played.of("group.train")) + len(played.of("group.drop", reason="zero_variance")) == 2 * 2 * most


def test_without_a_bound_or_a_filter_nothing_is_filled(tmp_path: Path) -> None:
    zero_variance = tuple(range(30, 34))
    played = play_judged(Judge(*zero_variance), tmp_path / "unbounded", max_num_gen_batches=0)
    assert batches(played) == [[30, 31], [32, 33]] and told(played) == [(30, 0), (0, 0)]
    unfiltered = play_judged(Judge(), tmp_path / "unfiltered", filter_zero_variance=False, max_num_gen_batches=2)
    assert batches(unfiltered) == [[0, 1], [2, 3]] and "replaced" not in unfiltered.first("step.end").data


@pytest.mark.parametrize("most", [0, 10])
def test_a_run_of_nothing_but_equal_rewards_is_stopped_however_its_steps_are_filled(most: int, tmp_path: Path) -> None:
    played = play_judged(Judge(0, 1), tmp_path, max_num_gen_batches=most, max_steps=1000)
    assert not played.summary.finished
    assert f"the last {2 * FRUITLESS_BATCHES} groups had equal rewards throughout" in played.summary.reason
    assert played.summary.trained == (1 if not most else 1 + 9)
    assert audit(tmp_path)["open"] == 0


@pytest.mark.parametrize("policy", ["drop", "wait", "window"])
@pytest.mark.parametrize("alpha", [1, 2.5])
def test_ahead_of_a_slow_trainer_the_bound_holds_and_every_batch_is_full(
    policy: str, alpha: float, tmp_path: Path
) -> None:
    costs = make_costs(trainer=replace(make_costs().trainer, fixed_s=7.0))
    scenario = {
        "costs": costs,
        "async_generation_ratio": alpha,
        "staleness_policy": policy,
        "max_steps": 6,
        "engines": 2,
    }
    played = play_judged(Judge(2, 9, 10, 31, 40, 41), tmp_path, max_num_gen_batches=2, **scenario)
    assert played.summary.finished
    assert [len(batch) for batch in batches(played)] == [2] * 6
    assert all(event.data["trained"] - event.data["oldest"] <= alpha for event in played.of("group.train"))
    equal = {event.data["group"] for event in played.of("group.ready", equal=True)}
    filled = [len(equal.intersection(batch)) for batch in batches(played)]
    assert filled == [count for _, count in told(played)] and sum(filled) > 0
    assert audit(tmp_path)["trained"] == 24


def test_while_a_full_batch_is_ready_or_on_its_way_nothing_is_filled() -> None:
    zero_variance = ZeroVarianceFilter(make_settings(max_num_gen_batches=1))
    assert not zero_variance.keep(1, ready=2), "nobody waits"
    assert zero_variance.keep(2, ready=1)
    assert not zero_variance.keep(3, ready=1), "the other is on its way"
    zero_variance.forget(2)
    assert zero_variance.keep(4, ready=1), "it did not get there"
    zero_variance.group_arrived(4)
    assert not zero_variance.keep(5, ready=2)
    assert zero_variance.batch_taken([0, 4]) == {"replaced": 3, "filled": 1}
    assert zero_variance.batch_taken([]) == {"replaced": 0, "filled": 0}


def test_a_filled_step_is_gone_back_to_like_any_other(tmp_path: Path) -> None:
    first = play_judged(Judge(0), tmp_path, max_num_gen_batches=2, max_steps=3, save_steps=1, async_generation_ratio=1)
    assert first.summary.finished and sum(filled for _, filled in told(first)) > 0
    (tmp_path / "checkpoints" / "step-00000003" / "trainer.json").unlink()
    again = play_judged(Judge(), tmp_path, max_num_gen_batches=2, max_steps=4, save_steps=1, async_generation_ratio=1)
    assert [event.data["trained"] for event in again.of("step.end")] == [3, 4]
    assert last_checkpoint(tmp_path) == (4, "checkpoints/step-00000004")
    assert audit(tmp_path)["trained"] == 16
