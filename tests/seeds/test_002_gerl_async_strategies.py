"""GeRL's asynchronous strategies for generative models: decoupled pools, rewards beside generation, one step off."""

from pathlib import Path

import pytest

from headway.config import load_config
from headway.config.simulation_config import DistributionConfig, SimulatedRewardConfig
from tests.config.factory import CONFIGS
from tests.flow.factory import make_costs, make_engine_cost
from tests.seeds.factory import duration_s, lags, play, starts_inside, step_windows

SLOW_REWARD = make_costs(
    engine=make_engine_cost(slots=2),
    reward=SimulatedRewardConfig(latency_s=DistributionConfig(kind="lognormal", mean=2.0, std=2.0, max=7.0)),
)


def read_lines(name: str) -> str:
    return (CONFIGS / f"{name}.txt").read_text(encoding="utf-8")


# -- Decoupled Actor and Rollout


def test_decoupled_the_default_is_a_hybrid_engine() -> None:
    derived = load_config(None, ["actor_rollout_ref.rollout.mode=sync"]).derived
    assert derived.hybrid_engine and derived.async_generation_ratio == 0


def test_decoupled_the_two_lines_give_separate_pools_and_asynchronous_rollout() -> None:
    derived = load_config(None, [read_lines("decoupled"), "trainer.n_gpus_per_node=8"]).derived
    assert not derived.hybrid_engine and derived.async_generation_ratio == 1
    assert not set(derived.devices["actor_train"]) & set(derived.devices["actor_infer"])
    assert len(derived.devices["actor_train"]) + len(derived.devices["actor_infer"]) == 8


def test_decoupled_a_shared_card_takes_turns_and_separate_cards_do_not(tmp_path: Path) -> None:
    hybrid = play(tmp_path / "hybrid", hybrid_engine=True)
    assert starts_inside(hybrid, "request.start", step_windows(hybrid)) == 0
    decoupled = play(tmp_path / "decoupled", async_generation_ratio=1)
    assert duration_s(decoupled) < duration_s(hybrid)


# -- Rollout with Async Reward Computing


def test_async_reward_is_the_default_and_has_the_documented_key() -> None:
    assert load_config(None).config.with_reward
    assert load_config(None, [read_lines("with_reward")]).config.with_reward
    assert not load_config(None, ["actor_rollout_ref.rollout.with_reward=False"]).config.with_reward


def test_async_reward_starts_while_the_rest_of_the_batch_is_generated(tmp_path: Path) -> None:
    played = play(tmp_path, costs=SLOW_REWARD, group_size=4, max_steps=3)
    last_answer = [event.time_s for event in played.of("sample.finish")][15]
    assert played.first("score.start").time_s < last_answer


def test_async_reward_off_starts_rewards_when_the_whole_batch_is_generated(tmp_path: Path) -> None:
    played = play(tmp_path, costs=SLOW_REWARD, group_size=4, max_steps=3, with_reward=False)
    finished = [event.time_s for event in played.of("sample.finish")]
    scored = [event.time_s for event in played.of("score.start")]
    for step in range(3):
        assert min(scored[16 * step : 16 * step + 16]) >= max(finished[16 * step : 16 * step + 16])


def test_async_reward_shortens_a_step_where_rewards_are_slow(tmp_path: Path) -> None:
    seconds = [
        duration_s(play(tmp_path / str(on), costs=SLOW_REWARD, group_size=4, with_reward=on)) for on in (False, True)
    ]
    assert seconds[0] > 1.05 * seconds[1]


# -- One-Step-Off Async Policy


def test_one_step_off_the_three_lines_are_alpha_1() -> None:
    derived = load_config(None, [read_lines("one_step_off"), "trainer.n_gpus_per_node=3"]).derived
    assert (derived.async_generation_ratio, derived.bound, derived.hybrid_engine) == (1, 1, False)


def test_one_step_off_a_step_trains_on_samples_of_the_step_before(tmp_path: Path) -> None:
    assert set(lags(play(tmp_path, async_generation_ratio=1))[8:]) == {1}


def test_one_step_off_is_the_default_where_actor_and_rollout_are_decoupled() -> None:
    named, default = (
        load_config(None, [read_lines(lines), "trainer.n_gpus_per_node=2"]) for lines in ("one_step_off", "decoupled")
    )
    assert default.derived == named.derived and default.derived.async_generation_ratio == 1


def test_one_step_off_parallelises_generation_and_training(tmp_path: Path) -> None:
    seconds = [duration_s(play(tmp_path / str(a), async_generation_ratio=a)) for a in (0, 1)]
    assert seconds[1] < 0.6 * seconds[0]


@pytest.mark.parametrize(("actor", "rollout"), [(1, 2), (2, 1)])
def test_one_step_off_cards_are_divided_as_the_table_does(actor: int, rollout: int) -> None:
    mapping = [
        f"actor_train.device_mapping={list(range(actor))}",
        f"actor_infer.device_mapping={list(range(actor, actor + rollout))}",
    ]
    derived = load_config(None, [read_lines("one_step_off"), *mapping]).derived
    assert (len(derived.devices["actor_train"]), len(derived.devices["actor_infer"])) == (actor, rollout)
