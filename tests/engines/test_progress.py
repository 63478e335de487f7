"""`Progress` grows in place, and nothing that was handed out grows with it."""

from __future__ import annotations

from typing import Any

import pytest

from headway.engines.base import Progress
from headway.types import ExpertRouting, FinishReason, RepeatedValue, VersionRun


def make_routing(start: int, tokens: int, expert: int) -> ExpertRouting:
    return ExpertRouting(start=start, layers=2, experts=1, width=1, data=bytes([expert]) * 2 * tokens)


def test_a_record_stays_as_it_was_when_the_request_goes_on() -> None:
    progress = Progress()
    progress.extend([1, 2], [-0.1, -0.2], 3)
    progress.extend([3], [-0.3], 3)
    before = progress.generation(FinishReason.ABORTED)
    progress.extend([4], [-0.4], 5)
    assert (before.actions, before.logps, before.runs) == (
        [1, 2, 3],
        [-0.1, -0.2, -0.3],
        (VersionRun(version=3, count=3),),
    )
    assert progress.generation(FinishReason.STOP).runs == (
        VersionRun(version=3, count=3),
        VersionRun(version=5, count=1),
    )
    assert type(before.actions) is list


@pytest.mark.parametrize("start", [[7, 8], (7, 8)])
def test_what_a_request_resumes_from_is_not_changed(start: Any) -> None:
    kept, logps = start[:], [-1.0, -2.0]
    progress = Progress()
    progress.actions, progress.logps = start, logps
    for action in (9, 10, 11):
        progress.extend((action,), (-3.0,), 1)
    assert start == kept and logps == [-1.0, -2.0]
    assert list(progress.actions) == [7, 8, 9, 10, 11] and list(progress.logps) == [-1.0, -2.0, -3.0, -3.0, -3.0]


def test_a_stretch_that_an_engine_keeps_is_not_changed() -> None:
    progress, stretch = Progress(), [1, 2]
    progress.extend(stretch, [0.0, 0.0], 0)
    progress.extend([3], [0.0], 0)
    assert stretch == [1, 2]


def test_repeated_values_stay_compact() -> None:
    progress = Progress()
    for _ in range(3):
        progress.extend(RepeatedValue(5, 1000), RepeatedValue(-1.0, 1000), 0)
    assert progress.actions == RepeatedValue(5, 3000)


def test_experts_are_joined_and_those_of_other_tokens_replace_them() -> None:
    progress = Progress()
    progress.routing_start = 4
    assert progress.routed_tokens == 4
    progress.add_routing(make_routing(4, 3, 1))
    progress.add_routing(make_routing(7, 2, 2))
    assert progress.routed_tokens == 9
    assert progress.routing == ExpertRouting(start=4, layers=2, experts=1, width=1, data=bytes([1] * 6 + [2] * 4))
    progress.add_routing(make_routing(9, 1, 3))
    assert progress.routed_tokens == 10 and progress.routing is not None and len(progress.routing) == 6
    progress.add_routing(make_routing(0, 2, 4))
    assert progress.routing == make_routing(0, 2, 4)
