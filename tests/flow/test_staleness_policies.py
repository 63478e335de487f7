"""admit, select, evict: what the three policies do near the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from headway.flow.staleness_policies import CandidateGroup, DropPolicy, SchedulerSnapshot
from headway.registry import STALENESS_POLICIES
from tests.flow.factory import make_settings


@dataclass(frozen=True)
class Group:
    number: int
    oldest: int
    is_ready: bool = True


def make_policy(name: str, **settings: Any) -> DropPolicy:
    return STALENESS_POLICIES.get(name)(make_settings(staleness_policy=name, **settings))


def make_view(**changes: Any) -> SchedulerSnapshot:
    base: dict[str, Any] = {
        "trained": 0,
        "served": 0,
        "stepping": False,
        "outstanding": 0,
        "untrained": 0,
        "slots": 4,
        "bound": 1,
    }
    return SchedulerSnapshot(**{**base, **changes})


def numbers(groups: Sequence[CandidateGroup] | None) -> list[int] | None:
    return None if groups is None else [group.number for group in groups]


# -- all of them


@pytest.mark.parametrize("name", STALENESS_POLICIES.built_in)
def test_no_policy_starts_a_group_without_a_slot_or_on_weights_too_old(name: str) -> None:
    policy = make_policy(name, async_generation_ratio=1)
    assert policy.admit(make_view())
    assert not policy.admit(make_view(outstanding=4))
    assert not policy.admit(make_view(trained=3, served=1))
    assert not policy.admit(make_view(trained=2, served=1, stepping=True))


@pytest.mark.parametrize("name", STALENESS_POLICIES.built_in)
def test_no_policy_selects_what_is_beyond_the_bound_or_not_ready(name: str) -> None:
    policy = make_policy(name, async_generation_ratio=1)
    groups = [Group(0, oldest=1), Group(1, oldest=3, is_ready=False), Group(2, oldest=3), Group(3, oldest=2)]
    view = make_view(trained=3)
    assert set(numbers(policy.select(groups, view)) or []) == {2, 3}
    assert policy.select(groups[:3], view) is None


@pytest.mark.parametrize("name", STALENESS_POLICIES.built_in)
def test_every_policy_evicts_exactly_what_no_later_batch_can_take(name: str) -> None:
    policy = make_policy(name, async_generation_ratio=1)
    groups = [Group(0, oldest=1), Group(1, oldest=2, is_ready=False), Group(2, oldest=3)]
    assert numbers(policy.evict(groups, make_view(trained=3))) == [0]
    assert numbers(policy.evict(groups, make_view(trained=3, stepping=True))) == [0, 1]


# -- drop


def test_drop_takes_the_freshest_first_and_among_equals_the_first_started() -> None:
    policy = make_policy("drop", async_generation_ratio=2, groups_per_step=3, selection_order="freshest")
    groups = [Group(0, oldest=0), Group(1, oldest=2), Group(2, oldest=1), Group(3, oldest=2)]
    assert numbers(policy.select(groups, make_view(trained=2, bound=2))) == [1, 3, 2]


def test_drop_can_be_told_to_take_the_oldest_first() -> None:
    policy = make_policy("drop", async_generation_ratio=2, groups_per_step=2, selection_order="oldest")
    groups = [Group(0, oldest=1), Group(1, oldest=2), Group(2, oldest=0)]
    assert numbers(policy.select(groups, make_view(trained=2, bound=2))) == [2, 0]


def test_drop_does_not_wait_for_a_straggler_at_its_deadline() -> None:
    policy = make_policy("drop", async_generation_ratio=1)
    groups = [Group(0, oldest=0, is_ready=False), Group(1, oldest=1), Group(2, oldest=1)]
    assert numbers(policy.select(groups, make_view(trained=1))) == [1, 2]


# -- wait


def test_wait_makes_training_wait_for_a_group_at_its_deadline() -> None:
    policy = make_policy("wait", async_generation_ratio=1)
    groups = [Group(0, oldest=0, is_ready=False), Group(1, oldest=1), Group(2, oldest=1)]
    assert policy.select(groups, make_view(trained=1)) is None
    groups[0] = Group(0, oldest=0)
    assert numbers(policy.select(groups, make_view(trained=1))) == [0, 1]


def test_wait_holds_a_place_for_every_straggler_before_its_deadline() -> None:
    """Of four groups of version 0, two must be trained at 1 or before, because only two can be trained at 2."""
    policy = make_policy("wait", async_generation_ratio=2)
    old = [Group(number, oldest=0, is_ready=False) for number in range(4)]
    fresh = [Group(number, oldest=1) for number in range(4, 6)]
    assert policy.select([*old, *fresh], make_view(trained=1, bound=2)) is None
    old[3] = Group(3, oldest=0)
    assert policy.select([*old, *fresh], make_view(trained=1, bound=2)) is None, "one more is needed"
    old[1] = Group(1, oldest=0)
    assert numbers(policy.select([*old, *fresh], make_view(trained=1, bound=2))) == [1, 3]


def test_wait_goes_on_when_a_straggler_is_dropped_for_another_reason() -> None:
    policy = make_policy("wait", async_generation_ratio=1)
    straggler, fresh = Group(0, oldest=0, is_ready=False), [Group(number, oldest=1) for number in (1, 2)]
    assert policy.select([straggler, *fresh], make_view(trained=1)) is None
    assert numbers(policy.select(fresh, make_view(trained=1))) == [1, 2]


def test_wait_gives_up_as_many_groups_as_are_redundant() -> None:
    policy = make_policy("wait", additional_groups=1)
    straggler, ready = Group(0, oldest=0, is_ready=False), [Group(number, oldest=0) for number in (1, 2)]
    assert numbers(policy.select([straggler, *ready], make_view(bound=0))) == [1, 2]
    assert policy.admit(make_view(untrained=2, outstanding=2, slots=3, bound=0))
    assert not policy.admit(make_view(untrained=3, outstanding=3, slots=3, bound=0))


def test_wait_lets_a_straggler_be_overtaken_while_it_has_time() -> None:
    policy = make_policy("wait", async_generation_ratio=2)
    groups = [Group(0, oldest=0, is_ready=False), Group(1, oldest=1), Group(2, oldest=1)]
    assert numbers(policy.select(groups, make_view(trained=1, bound=2))) == [1, 2]


@pytest.mark.parametrize(
    ("trained", "served", "stepping", "room"),
    [
        (0, 0, False, 4),  # batches at 0 and 1 may take what is made by 0
        (0, 0, True, 2),  # the batch at 0 is chosen already
        (1, 0, False, 2),
        (1, 1, False, 4),
        (1, 0, True, 0),
    ],
)
def test_wait_starts_only_what_the_batches_before_its_deadline_can_hold(
    trained: int, served: int, stepping: bool, room: int
) -> None:
    policy = make_policy("wait", async_generation_ratio=1)
    untrained = 0
    while policy.admit(make_view(trained=trained, served=served, stepping=stepping, untrained=untrained, slots=100)):
        untrained += 1
    assert untrained == room


# -- window


def test_window_trains_in_the_order_of_starting_whatever_is_fresher() -> None:
    policy = make_policy("window", async_generation_ratio=1, staleness_window=4)
    groups = [Group(3, oldest=1), Group(1, oldest=0), Group(0, oldest=1), Group(2, oldest=1)]
    assert numbers(policy.select(groups, make_view(trained=1))) == [0, 1]


def test_window_overtakes_a_straggler_inside_it_only() -> None:
    policy = make_policy("window", async_generation_ratio=1, staleness_window=3)
    straggler, waiting = Group(0, oldest=1, is_ready=False), Group(1, oldest=1, is_ready=False)
    others = [Group(number, oldest=1) for number in (2, 3, 4)]
    assert numbers(policy.select([straggler, *others], make_view(trained=1))) == [2, 3]
    assert policy.select([straggler, waiting, *others], make_view(trained=1)) is None, "3 and 4 are too far ahead"


def test_window_looks_two_batches_ahead_unless_told_otherwise() -> None:
    policy = make_policy("window", async_generation_ratio=1)
    stragglers = [Group(number, oldest=0, is_ready=False) for number in range(2)]
    others = [Group(number, oldest=0) for number in (2, 3)]
    assert numbers(policy.select([*stragglers, *others], make_view())) == [2, 3]
    more = [*stragglers, Group(9, oldest=0, is_ready=False)]
    assert numbers(policy.select([*more, *others], make_view())) == [2, 3], "9 started after them"
    before = [Group(-1, oldest=0, is_ready=False), *stragglers]
    assert policy.select([*before, *others], make_view()) is None


def test_what_is_beyond_the_bound_does_not_block_the_window() -> None:
    policy = make_policy("window", async_generation_ratio=1, staleness_window=2)
    groups = [Group(0, oldest=0, is_ready=False), Group(1, oldest=2), Group(2, oldest=2)]
    assert numbers(policy.select(groups, make_view(trained=2))) == [1, 2]
