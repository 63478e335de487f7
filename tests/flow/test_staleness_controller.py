"""The staleness controller by itself: slots, versions and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.errors import ConfigError, InvariantBroken
from headway.flow.staleness_controller import GroupSlot, Headway
from headway.flow.staleness_policies import CandidateGroup, SchedulerSnapshot
from headway.types import DropReason, Task
from tests.flow.factory import make_sample_group, make_settings


def make_headway(*, served: int = 0, trained: int = 0, **settings: Any) -> tuple[Headway, list[tuple[int, DropReason]]]:
    """A controller, and what it has let go so far."""
    evicted: list[tuple[int, DropReason]] = []

    def on_evict(slot: GroupSlot, reason: DropReason) -> None:
        evicted.append((slot.number, reason))
        headway.drop(slot)

    headway = Headway(make_settings(**settings), trained=trained, on_evict=on_evict)
    headway.serve(served)
    return headway, evicted


def start_all(headway: Headway) -> list[GroupSlot]:
    """As many groups as may start now."""
    opened = []
    while headway.may_start():
        number = max(headway.group_slots, default=-1) + 1
        opened.append(headway.open(number, Task(position=number)))
    return opened


def start(headway: Headway, number: int) -> GroupSlot:
    return headway.open(number, Task(position=number))


def make_ready(headway: Headway, *group_slots: GroupSlot, version: int = 0) -> list[GroupSlot]:
    for slot in group_slots:
        headway.mark_ready(make_sample_group(slot.number, version))
    return list(group_slots)


def train_step(headway: Headway) -> list[GroupSlot]:
    batch = headway.choose_batch()
    assert batch is not None
    headway.begin_step(batch)
    headway.end_step(batch)
    return batch


# -- slots


def test_a_slot_is_taken_on_start_and_kept_until_the_group_is_trained_and_served() -> None:
    headway, _ = make_headway(groups_per_step=1)
    (slot,) = start_all(headway)
    assert headway.outstanding == 1 and not headway.may_start()
    make_ready(headway, slot)
    assert headway.outstanding == 1
    headway.begin_step([slot])
    assert headway.outstanding == 1
    headway.end_step([slot])
    assert headway.outstanding == 1 and not headway.may_start(), "trained, but its weights are not served"
    headway.serve(1)
    assert headway.outstanding == 0 and headway.may_start()


def test_serving_an_older_version_frees_nothing() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1)
    make_ready(headway, *start_all(headway))
    train_step(headway)
    train_step(headway)
    assert headway.outstanding == 2
    headway.serve(1)
    assert headway.outstanding == 1
    headway.serve(2)
    assert headway.outstanding == 0


def test_a_dropped_group_gives_its_slot_back_at_once() -> None:
    headway, _ = make_headway(groups_per_step=2)
    first, second = start_all(headway)
    headway.drop(first)
    make_ready(headway, second)
    headway.drop(second)
    assert headway.outstanding == headway.in_flight == headway.ready_count == 0


@pytest.mark.parametrize(
    ("alpha", "depth", "spares", "slots"),
    [
        (0, None, 0, 4),
        (1, None, 0, 8),
        (2, None, 3, 15),
        (2, 1, 0, 8),
        (2, 0, 1, 5),
        (0.5, None, 0, 6),
        (1.25, None, 0, 9),
        (1.25, 0.6, 0, 6),
    ],
)
def test_as_many_groups_start_as_depth_and_spares_allow(
    alpha: float, depth: float | None, spares: int, slots: int
) -> None:
    headway, _ = make_headway(
        groups_per_step=4, async_generation_ratio=alpha, pipeline_depth=depth, additional_groups=spares
    )
    assert len(start_all(headway)) == slots == headway.slots


def test_a_fraction_of_alpha_runs_a_part_of_a_batch_ahead_and_keeps_it_for_the_next() -> None:
    headway, evicted = make_headway(
        groups_per_step=2, async_generation_ratio=0.5, staleness_policy="wait", selection_order="oldest"
    )
    first = start_all(headway)
    assert len(first) == 3 and headway.settings.bound == 1
    make_ready(headway, *first)
    train_step(headway)
    headway.serve(1)
    second = start_all(headway)
    assert len(second) == 2
    make_ready(headway, *second, version=1)
    assert train_step(headway) == [first[2], second[0]], "lags 1 and 0"
    assert evicted == []


def test_a_depth_below_the_bound_leaves_the_bound_as_it_is() -> None:
    headway, evicted = make_headway(groups_per_step=1, async_generation_ratio=2, pipeline_depth=0, trained=2, served=2)
    (slot,) = start_all(headway)
    make_ready(headway, slot, version=0)
    assert evicted == [] and headway.choose_batch() == [slot]


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_a_depth_outside_the_bound_is_refused(depth: float) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_depth = .*must lie in \[0, async_generation_ratio = 1\]"):
        make_settings(async_generation_ratio=1, pipeline_depth=depth)


# -- freshness


def test_freshness_is_judged_against_trained_and_not_against_served() -> None:
    headway, evicted = make_headway(groups_per_step=1, async_generation_ratio=1, trained=3, served=1)
    stale, fresh = start(headway, 0), start(headway, 1)
    make_ready(headway, stale, version=1)  # no lag at all behind what is served
    make_ready(headway, fresh, version=2)
    assert evicted == [(0, DropReason.STALE_IN_FLIGHT)]
    assert headway.choose_batch() == [fresh]


def test_nothing_starts_on_weights_that_are_too_old_already() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1, trained=3, served=1)
    assert not headway.may_start()
    headway.serve(2)
    assert headway.may_start()


def test_a_step_under_way_counts_against_what_would_start_now() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1, additional_groups=5)
    batch = make_ready(headway, start(headway, 0))
    headway.begin_step(batch)
    assert headway.oldest_useful == 0 and headway.may_start()
    headway.end_step(batch)
    headway.begin_step(make_ready(headway, start(headway, 1)))
    assert headway.oldest_useful == 1 and not headway.may_start(), "version 0 would have lag 2 at the next batch"


class TakesAnything:
    """A policy that misbehaves."""

    def admit(self, view: SchedulerSnapshot) -> bool:
        return True

    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup]:
        return list(groups)

    def evict(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup]:
        return []


def test_whatever_a_policy_chose_a_stale_group_is_refused_at_the_moment_of_consumption() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1, trained=2, served=2)
    headway.policy = TakesAnything()  # type: ignore[assignment]
    make_ready(headway, start(headway, 0), version=0)
    batch = headway.choose_batch()
    assert batch is not None
    with pytest.raises(
        InvariantBroken, match=r"group 0 \(ready\) of versions 0 to 0 has lag 2 at trained = 2, alpha = 1"
    ):
        headway.begin_step(batch)
    assert not headway.stepping


def test_whatever_a_policy_chose_a_group_that_is_not_ready_is_refused() -> None:
    headway, _ = make_headway(groups_per_step=1)
    headway.policy = TakesAnything()  # type: ignore[assignment]
    slot = start(headway, 0)
    with pytest.raises(InvariantBroken, match=r"group 0 \(in flight\)"):
        headway.begin_step([slot])


def test_what_was_made_by_weights_that_do_not_exist_is_refused() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1)
    (slot,) = make_ready(headway, start(headway, 0), version=1)
    with pytest.raises(InvariantBroken, match="versions 1 to 1"):
        headway.begin_step([slot])


def test_one_step_at_a_time() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1)
    first, second = make_ready(headway, *start_all(headway))
    headway.begin_step([first])
    with pytest.raises(InvariantBroken, match="before the last one ended"):
        headway.begin_step([second])


def test_a_group_in_training_cannot_be_dropped() -> None:
    headway, _ = make_headway(groups_per_step=1)
    (slot,) = make_ready(headway, *start_all(headway))
    headway.begin_step([slot])
    with pytest.raises(InvariantBroken, match="dropped while training"):
        headway.drop(slot)


# -- letting go


def test_the_moment_a_batch_is_chosen_whatever_can_be_in_no_later_one_is_let_go() -> None:
    policy = {"staleness_policy": "drop", "selection_order": "freshest"}
    headway, evicted = make_headway(groups_per_step=1, async_generation_ratio=1, additional_groups=3, **policy)
    trained, waiting, in_flight, late = start_all(headway)[:4]
    make_ready(headway, trained, waiting)
    train_step(headway)
    headway.serve(1)
    make_ready(headway, start(headway, 10), version=1)
    assert evicted == []
    headway.begin_step(headway.choose_batch() or [])  # at trained = 1: the next one is at 2
    assert sorted(number for number, _ in evicted) == [waiting.number, in_flight.number, late.number, 4]


def test_the_reason_says_where_the_group_was_and_that_as_many_as_were_redundant_are_surplus() -> None:
    headway, evicted = make_headway(groups_per_step=3, additional_groups=1)
    surplus, queued, first, in_flight = start_all(headway)
    queued.finished_at = 0
    make_ready(headway, first, queued, start(headway, 8), start(headway, 9))
    headway.begin_step([first, headway.group_slots[8], headway.group_slots[9]])
    assert evicted == [
        (surplus.number, DropReason.SURPLUS_GROUP),
        (queued.number, DropReason.STALE_IN_QUEUE),
        (in_flight.number, DropReason.STALE_IN_FLIGHT),
    ]


def test_what_flies_is_asked_how_old_it_is() -> None:
    headway, evicted = make_headway(groups_per_step=1, async_generation_ratio=0, additional_groups=1, trained=0)
    batch = make_ready(headway, start(headway, 0))
    late = start(headway, 1)
    late.track_oldest(lambda: 1)  # its members have not begun and will be made by the next version
    headway.begin_step(batch)
    assert evicted == []


# -- being held


def test_a_degraded_run_starts_nothing_ahead_but_keeps_what_is_in_the_line() -> None:
    headway, evicted = make_headway(groups_per_step=2, async_generation_ratio=2, additional_groups=1)
    group_slots = make_ready(headway, *start_all(headway))
    assert len(group_slots) == 7
    headway.degraded = True
    assert headway.slots == 3 and not headway.may_start()
    train_step(headway)
    headway.serve(1)
    assert evicted == [] and headway.outstanding == 5
    train_step(headway)
    headway.serve(2)
    train_step(headway)
    assert headway.outstanding == 2 and not headway.may_start(), "2 is served and 3 was trained"
    headway.serve(3)
    assert headway.may_start()


def test_nothing_starts_while_paused_or_before_anything_is_served() -> None:
    headway, _ = make_headway(served=-1)
    assert not headway.may_start()
    headway.serve(0)
    assert headway.may_start()
    headway.paused = True
    assert not headway.may_start()


def test_a_run_about_to_stop_starts_nothing_and_chooses_no_further_batch() -> None:
    headway, _ = make_headway(groups_per_step=1, async_generation_ratio=1)
    make_ready(headway, start(headway, 0))
    assert headway.may_start() and headway.choose_batch()
    headway.stopping = True
    assert not headway.may_start() and headway.choose_batch() is None
