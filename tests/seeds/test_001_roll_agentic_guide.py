"""ROLL's guide to asynchronous training of agents (in Chinese): what it says beyond the general guide."""

from pathlib import Path

import pytest

from headway.config import load_config
from headway.config.simulation_config import DistributionConfig, SimulatedEnvironmentConfig
from headway.errors import ConfigError
from headway.launch.training_session import prepare_run
from tests.config.factory import CONFIGS
from tests.flow.factory import make_costs, make_engine_cost
from tests.seeds.factory import LONG_TAIL, duration_s, lags, play

WEBSHOP = CONFIGS / "webshop_async.yaml"
TURNS = SimulatedEnvironmentConfig(
    turns=DistributionConfig(kind="fixed", mean=3), step_s=DistributionConfig(kind="lognormal", mean=0.5, std=0.5)
)


def test_example_the_webshop_file_is_64_episodes_on_four_and_four_devices() -> None:
    derived = load_config(WEBSHOP).derived
    assert (derived.pipeline, derived.samples_per_step, derived.slots, derived.bound) == ("agentic", 64, 128, 1)
    assert (len(derived.devices["actor_train"]), len(derived.devices["actor_infer"])) == (4, 4)
    assert (derived.sequence_length, derived.max_new_tokens) == (8192, 1024)
    with pytest.raises(ConfigError, match="which environments"):
        prepare_run(load_config(WEBSHOP))


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_how_episodes_of_several_turns_keep_the_bound(alpha: int, tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=4), environment=TURNS, response_tokens=LONG_TAIL)
    played = play(tmp_path, costs=costs, async_generation_ratio=alpha, group_size=2)
    assert played.summary.finished and max(lags(played)) <= alpha


def test_how_asynchrony_hides_the_time_of_environments(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=4), environment=TURNS)
    seconds = [duration_s(play(tmp_path / str(a), costs=costs, async_generation_ratio=a)) for a in (0, 1)]
    assert seconds[1] < 0.8 * seconds[0]


def test_recommendation_4_episodes_pause_for_validation_and_continue(tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=4), environment=TURNS)
    pause = {"eval_steps": 4, "val_batch_size": 4, "pause_generation_for_validation": True}
    played = play(tmp_path, costs=costs, async_generation_ratio=1, **pause)
    assert played.summary.finished and len(played.of("validate.end")) == 2
    begin, end = played.first("validate.begin").time_s, played.first("validate.end").time_s
    inside = [e for e in played.of("request.start") if begin < e.time_s < end]
    assert inside and all(event.data["request"].startswith("v") for event in inside)
