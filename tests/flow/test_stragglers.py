"""Fractions of α, and who pays for a straggler: bound, slots, lags, lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import DistributionConfig, SimulatedTrainerConfig, SimulatedWeightsConfig
from tests.flow.factory import Played, make_costs, make_engine_cost, make_scenario, play_through

LONG_TAIL = DistributionConfig(kind="lognormal", mean=100, std=100, min=1, max=2000)
ALPHAS = (0.0, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0)


def play(run_dir: Path, *, seed: int = 0, tail: DistributionConfig = LONG_TAIL, **settings: Any) -> Played:
    costs = make_costs(
        response_tokens=tail,
        engine=make_engine_cost(slots=64, step_per_request_s=0.0002),
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.0004),
        weights=SimulatedWeightsConfig(buckets=2, send_s=0.2),
    )
    base: dict[str, Any] = {"groups_per_step": 8, "group_size": 2, "max_steps": 12}
    return play_through(make_scenario(engines=2, costs=costs, world={"seed": seed}, **{**base, **settings}), run_dir)


@dataclass
class Measured:
    seconds: float
    lag: float
    lags: set[int]
    drops: Counter[str]


def measure(played: Played) -> Measured:
    lags = [event.data["trained"] - event.data["oldest"] for event in played.of("group.train")]
    drops = Counter(event.data["reason"] for event in played.of("group.drop"))
    assert played.summary.finished
    steps = played.of("step.end")
    return Measured(steps[-1].time_s / len(steps), sum(lags) / len(lags), set(lags), drops)


# -- fractions of α


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lags_go_up_to_the_next_whole_number_and_nothing_is_dropped(alpha: float, tmp_path: Path) -> None:
    settings = {"staleness_policy": "wait", "selection_order": "oldest"}
    found = measure(play(tmp_path, async_generation_ratio=alpha, **settings))
    assert max(found.lags) == ceil(alpha) and min(found.lags) <= max(ceil(alpha) - 1, 0)
    assert not found.drops


def test_seconds_fall_and_lag_grows_with_every_fraction_of_alpha(tmp_path: Path) -> None:
    seeds = range(4)
    settings = {"staleness_policy": "wait", "selection_order": "oldest"}
    runs = [
        [measure(play(tmp_path / f"{a}-{s}", async_generation_ratio=a, seed=s, **settings)) for s in seeds]
        for a in ALPHAS
    ]
    seconds = [sum(run.seconds for run in row) / len(row) for row in runs]
    lags = [sum(run.lag for run in row) / len(row) for row in runs]
    for before, after in pairwise(seconds):
        assert after < 1.02 * before, seconds
    assert seconds[-1] < 0.8 * seconds[ALPHAS.index(1.0)] < 0.8 * 0.8 * seconds[0]
    assert lags == sorted(set(lags))
    assert lags[0] == 0 and 0.3 < lags[2] < 0.7, "half a batch ahead: about half of the samples have a lag of 1"
