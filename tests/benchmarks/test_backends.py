"""The comparison of back ends: what it reads from a run, and what it calls noise."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.backends import apart, curves, level, share_as_far, turned

from headway.monitor.event_log import LoggedEvent, parse_event


def test_means_of_equal_back_ends_lie_as_far_apart_by_chance() -> None:
    assert share_as_far([[0.5, 0.5, 0.5], [0.4, 0.4, 0.4]]) == 1.0
    assert share_as_far([[0.1, 0.2], [0.2, 0.1]]) == 1.0, "each was ahead once"


def test_a_back_end_that_is_always_behind_is_not_noise() -> None:
    rows = [[0.5, 0.5 + 0.01 * seed, 0.2] for seed in range(1, 5)]
    assert apart(rows) == pytest.approx(0.325)
    assert share_as_far(rows) == pytest.approx(6 / 6**4), "only the ways that always treat them alike are as far"


def test_another_back_end_is_first_for_each_seed() -> None:
    assert {tuple(turned(["a", "b", "c"], turn)) for turn in range(4)} == {
        ("a", "b", "c"),
        ("b", "c", "a"),
        ("c", "a", "b"),
    }


def test_a_run_is_read_from_its_log() -> None:
    def step(trained: int, lag: int) -> dict[str, Any]:
        told = {"lag_max": lag, "lag_mean": lag, "behaviour_kl": 0.5 - lag, "ratio_max": 1.0 + lag}
        return {"trained": trained, "reward": trained / 10, **{f"train/{name}": value for name, value in told.items()}}

    rows: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "run.begin", {}),
        (2.0, "served", {"version": 0}),
        (3.0, "validate.end", {"trained": 0, "reward": 0.1}),
        (4.0, "step.end", step(1, 0)),
        (4.5, "served", {"version": 1}),
        (6.0, "step.end", step(2, 1)),
        (6.25, "served", {"version": 2}),
        (7.0, "sample.end", {"end": "trained"}),
        (7.0, "sample.end", {"end": "saved"}),
        (8.0, "step.end", step(3, 1)),
        (8.25, "served", {"version": 3}),
        (9.0, "validate.end", {"trained": 3, "reward": 0.7}),
    ]
    found = curves([LoggedEvent(at, parse_event(kind, "x", data)) for at, kind, data in rows])
    assert (found["start_s"], found["step_s"], found["update_s"], found["samples"]) == (2.0, 2.0, 0.25, 1)
    assert (found["fresh_steps"], found["mismatch_kl"], found["mismatch_ratio_max"]) == (1, 0.5, 1.0)
    assert level(found) == 0.7, "what was there before training is not learnt"
