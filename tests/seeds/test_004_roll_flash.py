"""ROLL Flash: rollout decoupled from training, fine-grained parallelism, the asynchronous ratio α."""

from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from headway.config import load_config
from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEnvironmentConfig,
    SimulatedRewardConfig,
    SimulatedTrainerConfig,
)
from headway.flow.staleness_controller import Headway
from headway.registry import STALENESS_POLICIES
from headway.sim.planner import plan_gpu_split
from tests.flow.factory import Scripted, audit, make_costs, make_engine_cost, make_scenario, make_settings, play_through
from tests.seeds.factory import LONG_TAIL, duration_s, lags, make_planned_scenario, play, starts_inside, step_windows

# -- 1. Rollout–Train Decoupling


def test_decoupling_producer_and_consumer_never_wait_for_each_other_while_there_is_work(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=2, max_steps=12)
    steps = step_windows(played)[1:]
    idle = sum(after[0] - before[1] for before, after in pairwise(steps))
    assert idle < 0.05 * (steps[-1][1] - steps[0][0])


# -- 2. Fine-Grained Parallelism


def test_fine_grained_generation_environment_and_reward_of_different_samples_overlap(tmp_path: Path) -> None:
    world = SimulatedEnvironmentConfig(turns=DistributionConfig(mean=2), step_s=DistributionConfig(mean=0.7))
    reward = SimulatedRewardConfig(latency_s=DistributionConfig(mean=0.7))
    costs = make_costs(engine=make_engine_cost(slots=2), environment=world, reward=reward, response_tokens=LONG_TAIL)
    played = play(tmp_path, costs=costs, async_generation_ratio=1, engines=1)
    scores = [(e.time_s, e.time_s + 0.7) for e in played.of("score.start")]
    assert starts_inside(played, "request.start", scores) > 0
    assert starts_inside(played, "request.end", scores) > 0


def test_fine_grained_queue_scheduling_beats_batch_scheduling(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=2), response_tokens=LONG_TAIL)
    seconds = [
        duration_s(play(tmp_path / how, costs=costs, group_size=2, max_num_gen_batches=0, rollout_scheduling=how))
        for how in ("batch", "queue")
    ]
    assert seconds[1] <= seconds[0]


def test_fine_grained_prompt_replication_spreads_a_group(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=2))
    seconds = [
        duration_s(
            play(
                tmp_path / str(expand),
                costs=costs,
                groups_per_step=1,
                group_size=8,
                engines=4,
                is_num_return_sequences_expand=expand,
            )
        )
        for expand in (False, True)
    ]
    assert seconds[1] < 0.6 * seconds[0]


def test_fine_grained_redundant_groups_and_members_spare_the_slowest(tmp_path: Path) -> None:
    worlds = Scripted({0: [3000], 2: [3000]})
    settings = {"groups_per_step": 4, "max_steps": 1, "additional_groups": 2}
    spared = play_through(make_scenario(engines=2, **settings), tmp_path / "spare", prepare=worlds.use)
    assert duration_s(spared) < 10
    assert {0, 2} <= {event.data["group"] for event in spared.of("group.drop")}
    audit(tmp_path / "spare")


def test_fine_grained_redundant_members_spare_the_slowest_of_a_group(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=16), response_tokens=LONG_TAIL)
    seconds = [
        duration_s(play(tmp_path / str(more), costs=costs, group_size=3, redundant_members=more)) for more in (0, 2)
    ]
    assert seconds[1] < 0.8 * seconds[0]
    assert audit(tmp_path / "2")["trained"] == 8 * 4 * 3


# -- System components


def test_components_the_hub_takes_a_request_before_the_one_before_it_is_answered(tmp_path: Path) -> None:
    played = play(tmp_path, engines=1, groups_per_step=4, max_steps=1)
    answered = played.first("request.end").time_s
    assert sum(event.time_s < answered for event in played.of("request.start")) == 4


def test_components_the_hub_keeps_every_engine_busy_while_requests_wait(tmp_path: Path) -> None:
    played = play(tmp_path, engines=3, groups_per_step=12, max_steps=2)
    first = {event.who for event in played.of("request.start") if event.time_s == played.first("request.start").time_s}
    assert first == {"engine/0", "engine/1", "engine/2"}


def test_components_an_agent_goes_from_answer_to_observation_until_its_episode_ends(tmp_path: Path) -> None:
    world = SimulatedEnvironmentConfig(turns=DistributionConfig(mean=3))
    played = play(tmp_path, costs=make_costs(environment=world), max_steps=1)
    requests = [event.data["request"] for event in played.of("request.start")]
    assert {request for request in requests if request.startswith("0.0/")} == {"0.0/0", "0.0/1", "0.0/2"}


# -- The asynchronous ratio


@pytest.mark.parametrize("policy", ["drop", "wait", "window"])
@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2, 2.5])
def test_alpha_bounds_every_single_sample_under_every_policy(alpha: float, policy: str, tmp_path: Path) -> None:
    window = {"staleness_window": 4} if policy == "window" else {}
    played = play(tmp_path, tail=True, async_generation_ratio=alpha, staleness_policy=policy, **window)
    assert played.summary.finished and max(lags(played)) <= -(-alpha // 1)


def test_alpha_is_judged_sample_by_sample_and_not_by_the_mean_of_a_batch() -> None:
    controller = Headway(make_settings(async_generation_ratio=1), on_evict=lambda slot, reason: None)
    controller.trained = 2
    assert controller.oldest_useful == 1


def test_alpha_what_is_too_old_is_dropped_and_generated_again(tmp_path: Path) -> None:
    worlds = Scripted({1: [2000]})
    settings = {"async_generation_ratio": 1, "groups_per_step": 2, "max_steps": 8, "staleness_policy": "drop"}
    played = play_through(make_scenario(engines=2, **settings), tmp_path, prepare=worlds.use)
    assert played.first("group.drop", group=1).data["reason"] == "stale_in_flight"
    assert [event.data["position"] for event in played.of("group.start")].count(1) == 2


# -- Conclusions of its experiments


def test_conclusion_1_asynchrony_scales_where_synchronous_training_waits_for_the_tail(tmp_path: Path) -> None:
    """Eight times the engines and trainers: the document has 2.12 times the throughput on 128 GPUs."""
    speed_up = []
    for scale in (1, 8):
        costs = make_costs(
            response_tokens=LONG_TAIL,
            engine=make_engine_cost(slots=4, step_per_request_s=0.002),
            trainer=SimulatedTrainerConfig(gpu_s_per_token=0.004),
        )
        world = {"train_devices": tuple(range(scale))}
        took = [
            duration_s(
                play(
                    tmp_path / f"{scale}-{alpha}",
                    costs=costs,
                    engines=scale,
                    groups_per_step=8,
                    async_generation_ratio=alpha,
                    world=world,
                )
            )
            for alpha in (0, 2)
        ]
        speed_up.append(took[0] / took[1])
    assert speed_up[1] > speed_up[0] > 1.0


def test_conclusion_2_the_split_of_a_budget_decides_and_the_planner_finds_it() -> None:
    plan = plan_gpu_split(make_planned_scenario(), gpus=8, alphas=(0, 2))
    splits = [option.tokens_per_s for option in plan.options if option.alpha == 2]
    assert len(splits) > 1 and max(splits) > 1.1 * min(splits)
    assert plan.best_asynchronous is not None and plan.speed_up(plan.best_asynchronous) > 1.3


def test_conclusion_3_a_small_alpha_gives_nearly_all_of_the_speed(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=16), response_tokens=LONG_TAIL)
    seconds = {
        alpha: mean(
            duration_s(
                play(
                    tmp_path / f"{alpha}-{seed}",
                    costs=costs,
                    async_generation_ratio=alpha,
                    seed=seed,
                    max_steps=12,
                    staleness_policy="drop",
                )
            )
            for seed in range(2)
        )
        for alpha in (0, 2, 6)
    }
    gain = (seconds[0] - seconds[2]) / (seconds[0] - seconds[6])
    assert gain > 0.8 and seconds[0] > 1.5 * seconds[2]


@pytest.mark.parametrize("variant", ["tis", "cispo", "topr", "decoupled_ppo"])
def test_conclusion_4_its_off_policy_algorithms_are_offered(variant: str) -> None:
    assert load_config(None, {"pg_variant": variant, "async_generation_ratio": 2}).config.pg_variant == variant


def test_conclusion_agents_gain_more_than_single_answers_where_environments_are_slow(tmp_path: Path) -> None:
    world = SimulatedEnvironmentConfig(
        turns=DistributionConfig(kind="fixed", mean=4),
        step_s=DistributionConfig(kind="lognormal", mean=1.0, std=2.0, max=10.0),
    )
    gains = []
    for environment in (SimulatedEnvironmentConfig(), world):
        costs = make_costs(engine=make_engine_cost(slots=8), environment=environment)
        name = str(len(gains))
        took = [duration_s(play(tmp_path / f"{name}-{a}", costs=costs, async_generation_ratio=a)) for a in (0, 3)]
        gains.append(took[0] / took[1])
    assert gains[1] > gains[0] > 1.2


def test_conclusion_policies_for_stragglers_can_be_chosen() -> None:
    assert {"drop", "wait", "window"} <= set(STALENESS_POLICIES.names())
