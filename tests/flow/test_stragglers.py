"""Fractions of α, and who pays for a straggler: bound, slots, lags, lengths."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp
from pathlib import Path
from typing import Any

import pytest

from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedRewardConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
)
from headway.environments.base import Environment, Observation, SingleTurnEnvironment
from headway.flow.sample_population import MeanLengthEstimate
from headway.flow.training_flow import AsyncTrainingFlow
from headway.seeding import make_rng
from headway.types import Task
from tests.flow.factory import Played, make_costs, make_engine_cost, make_scenario, play_through

LONG_TAIL = DistributionConfig(kind="lognormal", mean=100, std=100, min=1, max=2000)
ALPHAS = (0.0, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0)


class KnownLengths:
    """Environments that note how long the simulator makes each answer, by sample id, when it starts."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}

    def use(self, flow: AsyncTrainingFlow) -> None:
        inner = flow.backends.environments

        def make(task: Task) -> Environment:
            environment, current = inner(task), asyncio.current_task()
            assert current is not None
            return NotedEnvironment(environment, self.lengths, current.get_name())

        flow.backends = replace(flow.backends, environments=make)


class NotedEnvironment(SingleTurnEnvironment):
    def __init__(self, inner: Environment, lengths: dict[str, int], sample: str) -> None:
        self._inner, self._lengths, self._sample = inner, lengths, sample

    async def reset(self, task: Task) -> Observation:
        observation = await self._inner.reset(task)
        self._lengths[self._sample] = observation.hint
        return observation


def play(
    run_dir: Path,
    *,
    seed: int = 0,
    tail: DistributionConfig = LONG_TAIL,
    known: KnownLengths | None = None,
    reward: SimulatedRewardConfig | None = None,
    **settings: Any,
) -> Played:
    costs = make_costs(
        reward=reward or SimulatedRewardConfig(),
        response_tokens=tail,
        engine=make_engine_cost(slots=64, step_per_request_s=0.0002),
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.0004),
        weights=SimulatedWeightsConfig(buckets=2, send_s=0.2),
    )
    base: dict[str, Any] = {"groups_per_step": 8, "group_size": 2, "max_steps": 12}
    scenario = make_scenario(engines=2, costs=costs, world={"seed": seed}, **{**base, **settings})
    return play_through(scenario, run_dir, prepare=known.use if known else None)


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
    found = measure(play(tmp_path, async_generation_ratio=alpha))
    assert max(found.lags) == ceil(alpha) and min(found.lags) <= max(ceil(alpha) - 1, 0)
    assert not found.drops


def test_seconds_fall_and_lag_grows_with_every_fraction_of_alpha(tmp_path: Path) -> None:
    seeds, alphas = range(3), (0.0, 0.5, 1.0, 1.5, 2.0)
    runs = [[measure(play(tmp_path / f"{a}-{s}", async_generation_ratio=a, seed=s)) for s in seeds] for a in alphas]
    seconds = [sum(run.seconds for run in row) / len(row) for row in runs]
    lags = [sum(run.lag for run in row) / len(row) for row in runs]
    for before, after in pairwise(seconds):
        assert after < 1.02 * before, seconds
    assert seconds[4] < 0.9 * seconds[2] < 0.9 * 0.8 * seconds[0]
    assert lags == sorted(set(lags))
    assert lags[0] == 0 and 0.3 < lags[1] < 0.7, "half a batch ahead: about half of the samples have a lag of 1"


# -- bias: trained against started


def compare_lengths(known: KnownLengths, played: Played, *, bound: int, steps: int) -> tuple[list[int], list[int]]:
    """Lengths of what was started in time to be trained, and of those of them that were trained.

    A prompt that is drawn again counts as started once. What starts in the last steps is left out on both sides.
    """
    seen: set[int] = set()
    again, early, version = set(), [], 0
    for event in played.events:
        if event.kind == "step.end":
            version = event.data["trained"]
        elif event.kind == "group.start":
            if event.data["position"] in seen:
                again.add(event.data["group"])
            seen.add(event.data["position"])
        elif event.kind == "sample.start" and version < steps - bound - 1:
            early.append(event.data["sample"])
    trained = {event.data["sample"] for event in played.of("sample.end", end="trained")}
    started = [known.lengths[sample] for sample in early if int(sample.split(".")[0]) not in again]
    return started, [known.lengths[sample] for sample in early if sample in trained]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_by_default_trained_answers_are_as_long_as_started_ones_over_many_seeds(alpha: float, tmp_path: Path) -> None:
    """The full script has 200 seeds, more steps and longer tails: benchmarks/straggler_policies.py --property 200."""
    started, trained = [], []
    for seed in range(12):
        known = KnownLengths()
        sizes = {"groups_per_step": 4, "group_size": 2, "max_steps": 8}
        tail = replace(LONG_TAIL, std=200)
        played = play(tmp_path / str(seed), seed=seed, tail=tail, known=known, async_generation_ratio=alpha, **sizes)
        lengths = compare_lengths(known, played, bound=ceil(alpha), steps=8)
        started += lengths[0]
        trained += lengths[1]
    assert len(started) > 300
    assert abs(sum(trained) / len(trained) / (sum(started) / len(started)) - 1) < 0.01


def test_drop_trains_shorter_answers_and_the_measured_bias_is_the_true_one(tmp_path: Path) -> None:
    known = KnownLengths()
    sizes = {"groups_per_step": 8, "group_size": 4, "max_steps": 40, "async_generation_ratio": 1}
    played = play(tmp_path, known=known, staleness_policy="drop", **sizes)
    started, trained = compare_lengths(known, played, bound=1, steps=40)
    true = sum(trained) / len(trained) / (sum(started) / len(started)) - 1
    measured = played.of("step.end")[-1].data
    assert true < -0.05
    assert measured["bias/length"] == pytest.approx(true, abs=0.03)
    dropped = [event.data for event in played.of("step.end") if "length/dropped" in event.data]
    assert sum(step["length/dropped"] - step["length/trained"] for step in dropped) > 0


def test_every_step_reports_what_was_started_dropped_and_trained(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=1)
    for event in played.of("step.end"):
        assert event.data["length/started"] == pytest.approx(event.data["length/trained"])
        assert event.data["length/trained"] == event.data["actions"] / event.data["samples"]
        assert event.data["bias/length"] == pytest.approx(0.0) and event.data["bias/reward"] == pytest.approx(0.0)
        assert event.data["reward/started"] == pytest.approx(event.data["reward/trained"])
        assert "length/dropped" not in event.data


def test_groups_that_are_filtered_for_what_they_contain_are_no_bias(tmp_path: Path) -> None:
    reward = SimulatedRewardConfig(zero_variance_share=0.4)
    played = play(tmp_path, async_generation_ratio=1, filter_zero_variance=True, reward=reward)
    assert played.of("group.drop", reason="zero_variance")
    assert all("length/dropped" not in event.data for event in played.of("step.end"))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_of_redundant_groups_the_slowest_are_given_up_and_no_more_than_were_redundant(
    alpha: float, tmp_path: Path
) -> None:
    plain = measure(play(tmp_path / "plain", async_generation_ratio=alpha))
    found = measure(play(tmp_path / "redundant", async_generation_ratio=alpha, additional_groups=2))
    assert set(found.drops) == {"surplus_group"}
    assert 0 < found.drops["surplus_group"] <= 2 * 12
    assert found.seconds < plain.seconds


def test_redundant_members_are_a_bias_that_is_measured(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=1, redundant_members=2)
    last = played.of("step.end")[-1].data
    assert last["bias/length"] < -0.1 and last["length/dropped"] > 0


# -- the estimate for lengths that are only partly known


def test_an_estimate_of_finished_lengths_is_their_mean() -> None:
    estimate = MeanLengthEstimate()
    assert estimate.mean() is None
    for length in (3, 5, 5, 11):
        estimate.add(length, finished=True)
    assert estimate.mean() == pytest.approx(6.0)


def test_the_estimate_of_lengths_that_were_cut_off_at_random_is_the_mean_without_the_cut() -> None:
    rng = make_rng(0, "lengths")
    estimate, whole = MeanLengthEstimate(), []
    for _ in range(4000):
        length, limit = round(100 * exp(rng.gauss(0, 0.6))), rng.randrange(50, 800)
        whole.append(length)
        estimate.add(min(length, limit), finished=length <= limit)
    assert estimate.mean() == pytest.approx(sum(whole) / len(whole), rel=0.02)
