"""The planner: it finds asynchrony's gain where there is one and says so plainly where there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from headway.config import load_config
from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEngineConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.errors import ConfigError
from headway.monitor.run_report import RunMonitor
from headway.settings import RunSettings
from headway.sim.folded_scenario import choose_fold, fold_scenario
from headway.sim.planner import GpuSplitPlan, plan_gpu_split, recommend_split
from headway.sim.simulated_run import Scenario, make_scenario, run_scenario
from headway.sim.split_check import make_split_check
from headway.sim.step_estimate import draw_workload, estimate_step
from headway.types import SamplingParams


def long_tail() -> Scenario:
    """Answers of very different lengths, and as much training as generation: asynchrony's home ground."""
    return Scenario(
        settings=RunSettings(
            groups_per_step=16,
            group_size=4,
            max_num_gen_batches=0,
            seed=0,
            sampling=SamplingParams(max_new_tokens=16_384),
        ),
        simulation=SimulationConfig(
            response_tokens=DistributionConfig(kind="lognormal", mean=1500, std=3000, min=16, max=16_384),
            trainer=SimulatedTrainerConfig(gpu_s_per_token=0.001),
            weights=SimulatedWeightsConfig(send_s=1.0, flip_s=0.05),
        ),
    )


def short_and_uniform() -> Scenario:
    """Answers that all end together, engines of four GPUs, and a trainer that needs every GPU there is."""
    return Scenario(
        settings=RunSettings(
            groups_per_step=16, group_size=4, max_num_gen_batches=0, seed=0, sampling=SamplingParams(max_new_tokens=512)
        ),
        simulation=SimulationConfig(
            response_tokens=DistributionConfig(mean=200),
            engine=SimulatedEngineConfig(gpus=4),
            trainer=SimulatedTrainerConfig(gpu_s_per_token=0.05),
            weights=SimulatedWeightsConfig(gather_s=5.0, send_s=15.0, load_s=5.0, flip_s=1.0),
        ),
    )


@cache
def planned(kind: str) -> GpuSplitPlan:
    if kind == "wins":
        return plan_gpu_split(long_tail(), gpus=8, alphas=(0, 1, 2))
    return plan_gpu_split(short_and_uniform(), gpus=8, alphas=(0, 1, 2), trainer_gpus=4)


def test_asynchrony_wins_where_answers_have_a_long_tail() -> None:
    plan = planned("wins")
    best = plan.best_asynchronous
    assert best is not None and plan.options[0] is best
    assert plan.speed_up(best) > 1.3
    assert 0 < best.lag_mean <= best.alpha
    assert recommend_split(plan).startswith("Take ")


def test_asynchrony_loses_where_answers_are_short_and_training_cannot_shrink() -> None:
    plan = planned("loses")
    assert plan.options[0] is plan.synchronous and plan.synchronous.lag_mean == 0
    text = recommend_split(plan)
    assert text.startswith("Synchronous on all 8 GPUs wins here: ")
    assert "training cannot shrink: 4 of 8 GPUs" in text


@pytest.mark.parametrize("kind", ["wins", "loses"])
def test_the_ranking_is_by_trained_tokens_per_second_and_shares_are_shares(kind: str) -> None:
    plan = planned(kind)
    speeds = [option.tokens_per_s for option in plan.options]
    assert speeds == sorted(speeds, reverse=True)
    samples = 16 * 4
    for option in plan.options:
        trained = option.trained_length * samples
        assert option.tokens_per_s * option.seconds_per_step == pytest.approx(trained)
        assert option.stale_share <= option.drop_share
        assert all(0 <= share <= 1 for share in (option.train_busy, option.generate_busy, option.slots_filled))
        assert option.train_gpus + option.infer_gpus == (16 if option.colocated else 8)


@pytest.mark.parametrize("kind", ["wins", "loses"])
def test_the_estimate_is_within_a_factor_of_two_and_a_half_of_the_simulation(kind: str) -> None:
    for option in planned(kind).options:
        assert 0.4 < option.estimated_s / option.seconds_per_step < 2.5, option


def test_gpus_that_cannot_be_split_leave_the_synchronous_run() -> None:
    plan = plan_gpu_split(short_and_uniform(), gpus=4, alphas=(1,), trainer_gpus=4)
    assert plan.options == (plan.synchronous,)
    assert "the only way" in recommend_split(plan)


def test_only_splits_that_train_accepts_are_offered() -> None:
    sizes = {"rollout_batch_size": 8, "num_return_sequences_in_group": 4, "async_generation_ratio": 1}
    devices = {"actor_train.device_mapping": [0, 1], "actor_infer.device_mapping": [2, 3]}
    config = load_config({**sizes, **devices})
    plan = plan_gpu_split(make_scenario(config), gpus=12, alphas=(1,), check=make_split_check(config))
    offered = {option.train_gpus for option in plan.options if not option.colocated}
    assert offered <= {1, 2, 4, 8}  # 32 samples do not divide by 3, 5, 6, 7 or 9 to 11
    assert plan.considered == 1 + 4
    assert "batch not divisible" in plan.synchronous.refused  # nor by all twelve
    for trainers in offered:
        devices = {"actor_train.device_mapping": list(range(trainers)), "actor_infer.device_mapping": [12]}
        assert load_config(config.given(), devices).derived.data_parallel == trainers


def test_a_mini_batch_given_in_prompts_stays_the_same_on_every_split() -> None:
    config = load_config(None, ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"])
    check = make_split_check(config)
    assert check(16, 4) == "" and check(8, 4) == ""
    assert "not divisible" in check(12, 4)


def test_engines_that_do_not_divide_are_folded_to_the_nearest_number_and_adjusted() -> None:
    settings = replace(long_tail().settings, groups_per_step=256, group_size=16)
    world = replace(long_tail(), settings=settings, train_devices=(0,), infer_devices=tuple(range(1, 128)))
    assert choose_fold(world) == 8
    folded = fold_scenario(world, 8)
    assert folded.engines == 16
    speed = folded.engines / folded.simulation.engine.step_s  # as many tokens a second as an eighth of 127 engines
    assert speed == pytest.approx(127 / 8 / world.simulation.engine.step_s)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        plan_gpu_split(short_and_uniform(), gpus=2)


def test_a_scaled_world_takes_as_long_as_the_whole() -> None:
    base = long_tail()
    whole = replace(
        base,
        settings=replace(base.settings, groups_per_step=128, group_size=8, async_generation_ratio=1.0, max_steps=4),
        train_devices=tuple(range(16)),
        infer_devices=tuple(range(16, 32)),
    )
    assert choose_fold(whole) == 2
    seconds = []
    for world in (whole, fold_scenario(whole, 2)):
        monitor = RunMonitor(2)
        assert run_scenario(world, sinks=[monitor]).finished
        seconds.append(monitor.report().throughput.step_mean_s)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)


def test_the_estimate_pays_for_less_of_the_tail_with_a_larger_headway() -> None:
    base = replace(long_tail(), infer_devices=(1, 2, 3, 4), train_devices=tuple(range(5, 60)))
    work = draw_workload(base)
    times = [
        estimate_step(replace(base, settings=replace(base.settings, async_generation_ratio=alpha)), work).step_s
        for alpha in (0, 1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
