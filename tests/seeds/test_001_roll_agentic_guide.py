"""ROLL's guide to asynchronous training of agents (in Chinese): the same promises for episodes of several turns."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import load_config
from headway.config.simulation_config import DistributionConfig, SimulatedEnvironmentConfig
from headway.errors import ConfigError
from headway.launch.training_session import prepare_run
from headway.monitor.run_report import make_run_report
from tests.config.factory import CONFIGS
from tests.flow.factory import Played, make_costs, make_engine_cost
from tests.seeds.factory import LONG_TAIL, duration_s, lags, play, starts_inside, step_windows

WEBSHOP = CONFIGS / "webshop_async.yaml"
TURNS = SimulatedEnvironmentConfig(
    turns=DistributionConfig(kind="fixed", mean=3), step_s=DistributionConfig(kind="lognormal", mean=0.5, std=0.5)
)


def play_episodes(run_dir: Path, **settings: Any) -> Played:
    """Play a run whose episodes have three turns, each with a step of the environment."""
    return play(run_dir, costs=make_costs(engine=make_engine_cost(slots=4), environment=TURNS), **settings)


# -- 异步训练概述: overview


def test_overview_the_next_episodes_begin_while_the_trainer_works_or_after_it(tmp_path: Path) -> None:
    started = []
    for alpha in (0, 1):
        played = play_episodes(tmp_path / str(alpha), async_generation_ratio=alpha)
        started.append(starts_inside(played, "request.start", step_windows(played)))
    assert started[0] == 0 < started[1]


# -- 开启异步训练: configuration and example


def test_enabling_the_default_is_zero_and_synchronous() -> None:
    tree = yaml.safe_load(WEBSHOP.read_text(encoding="utf-8"))
    del tree["async_generation_ratio"]
    derived = load_config({**tree, "hybrid_engine": True}).derived
    assert (derived.pipeline, derived.async_generation_ratio, derived.slots) == ("agentic", 0, derived.groups_per_step)


def test_example_the_webshop_file_is_64_episodes_on_four_and_four_devices() -> None:
    derived = load_config(WEBSHOP).derived
    assert (derived.pipeline, derived.samples_per_step, derived.slots, derived.bound) == ("agentic", 64, 128, 1)
    assert (len(derived.devices["actor_train"]), len(derived.devices["actor_infer"])) == (4, 4)
    assert (derived.sequence_length, derived.max_new_tokens) == (8192, 1024)
    with pytest.raises(ConfigError, match="which environments"):
        prepare_run(load_config(WEBSHOP))


# -- 异步训练的工作原理: how it works


def test_how_1_and_2_episodes_of_that_many_batches_are_under_way(tmp_path: Path) -> None:
    for alpha in (0, 1, 2):
        played = play_episodes(tmp_path / str(alpha), async_generation_ratio=alpha)
        begin = played.first("step.begin").time_s
        assert sum(event.time_s <= begin for event in played.of("group.start")) == (1 + alpha) * 4


def test_how_3_training_goes_on_while_the_current_episodes_are_played(tmp_path: Path) -> None:
    played = play_episodes(tmp_path, async_generation_ratio=2, max_steps=6)
    under_way = []
    for begin, _ in step_windows(played)[:-2]:
        started = sum(event.time_s <= begin for event in played.of("sample.start"))
        under_way.append(started - sum(event.time_s <= begin for event in played.of("sample.finish")))
    assert min(under_way) > 0


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_how_3_episodes_of_several_turns_keep_the_bound(alpha: int, tmp_path: Path) -> None:
    costs = make_costs(engine=make_engine_cost(slots=4), environment=TURNS, response_tokens=LONG_TAIL)
    played = play(tmp_path, costs=costs, async_generation_ratio=alpha, group_size=2)
    assert played.summary.finished and max(lags(played)) <= alpha


def test_how_4_asynchrony_hides_the_time_of_environments(tmp_path: Path) -> None:
    seconds = [duration_s(play_episodes(tmp_path / str(a), async_generation_ratio=a)) for a in (0, 1)]
    assert seconds[1] < 0.8 * seconds[0]


# -- 使用建议: recommendations; the first, to choose the ratio for the hardware, is that of the general guide


def test_recommendation_2_roles_that_share_devices_take_turns_and_it_is_said() -> None:
    resolved = load_config(WEBSHOP, {"actor_infer.device_mapping": "list(range(2,6))"})
    assert resolved.derived.hybrid_engine and any("both take turns" in note for note in resolved.notes)


def test_recommendation_3_the_use_of_trainer_engines_and_environments_is_measured(tmp_path: Path) -> None:
    report = make_run_report(play_episodes(tmp_path, async_generation_ratio=1).events)
    names = {role.role for role in report.usage.roles} | {engine.engine for engine in report.usage.engines}
    assert {"train", "generate", "engine/0", "engine/1"} <= names


def test_recommendation_4_episodes_pause_for_validation_and_continue(tmp_path: Path) -> None:
    pause = {"eval_steps": 4, "val_batch_size": 4, "pause_generation_for_validation": True}
    played = play_episodes(tmp_path, async_generation_ratio=1, **pause)
    assert played.summary.finished and len(played.of("validate.end")) == 2
    begin, end = played.first("validate.begin").time_s, played.first("validate.end").time_s
    inside = [e for e in played.of("request.start") if begin < e.time_s < end]
    assert inside and all(event.data["request"].startswith("v") for event in inside)
