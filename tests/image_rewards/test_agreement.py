"""The rule of the OCR reward, against an independent definition of the distance."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.rewards.images.ocr_reward import _fold, levenshtein_distance, measure_agreement


def test_the_rule() -> None:
    assert measure_agreement("4711", "No. 4711!") == 1.0
    assert measure_agreement("4711", "4712") == 0.75
    assert measure_agreement("4711", "") == 0.0
    assert measure_agreement("4711", "88888888888888") == 0.0
    assert measure_agreement("Hello World", "HELLOWORLD") == 1.0
    assert measure_agreement("ab", "a") == 0.5
    assert _fold(" A\tb\nC ") == "abc"


def test_an_empty_target_is_no_target() -> None:
    with pytest.raises(ValueError, match="no letters"):
        measure_agreement(" ", "anything")


@settings(max_examples=60, deadline=None)
@given(st.text("ab1", max_size=6), st.text("ab1", max_size=6))
def test_the_distance_is_the_fewest_changes(one: str, other: str) -> None:
    @cache
    def changes(left: str, right: str) -> int:
        if not left or not right:
            return len(left) + len(right)
        same = changes(left[1:], right[1:]) + (left[0] != right[0])
        return min(same, changes(left[1:], right) + 1, changes(left, right[1:]) + 1)

    assert levenshtein_distance(one, other) == changes(one, other)
