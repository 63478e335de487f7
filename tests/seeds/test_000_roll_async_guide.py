"""ROLL's guide to asynchronous training (RLVR and agentic)."""

from pathlib import Path

import pytest
import yaml

from headway.config import load_config
from headway.errors import ConfigError, ConfigErrors
from headway.launch.training_session import prepare_run
from headway.monitor.run_report import make_run_report
from headway.sim.planner import plan_gpu_split, recommend_split
from tests.config.factory import CONFIGS
from tests.seeds.factory import duration_s, lags, make_planned_scenario, play, starts_inside, step_windows

RLVR, AGENTIC = CONFIGS / "rlvr_async.yaml", CONFIGS / "frozen_lake_async.yaml"


# -- Asynchronous Training Overview


def test_overview_synchronous_training_starts_the_next_batch_after_the_current_one_is_trained(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=0)
    starts, ends = [e.time_s for e in played.of("group.start")], [e.time_s for e in played.of("step.end")]
    assert all(start >= end for start, end in zip(starts[4::4], ends, strict=False))
    assert starts_inside(played, "request.start", step_windows(played)) == 0


def test_overview_asynchronous_training_runs_inference_and_training_in_parallel(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=1)
    steps = step_windows(played)
    answers = [(event.time_s - 1.0, event.time_s) for event in played.of("request.end", finish="stop")]
    assert any(begin < middle < end for begin, end in steps for middle in [sum(a) / 2 for a in answers])
    assert duration_s(played) < 0.7 * duration_s(play(tmp_path / "sync", async_generation_ratio=0))


def test_overview_inference_can_generate_several_batches_in_advance(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=2, engines=4)
    first_step = played.first("step.end").time_s
    assert sum(event.time_s < first_step for event in played.of("group.start")) == 3 * 4


# -- Enabling Asynchronous Training


def test_enabling_the_parameter_means_the_same_for_rlvr_and_agents() -> None:
    for alpha in (0, 1, 2, 3):
        change = {"async_generation_ratio": alpha}
        rlvr, agentic = load_config(RLVR, change).derived, load_config(AGENTIC, change).derived
        assert rlvr.bound == agentic.bound == alpha
        assert rlvr.slots == (1 + alpha) * rlvr.groups_per_step
        assert agentic.slots == (1 + alpha) * agentic.groups_per_step


def test_enabling_the_default_is_zero_and_synchronous() -> None:
    derived = load_config(None).derived
    assert (derived.async_generation_ratio, derived.bound, derived.slots) == (0, 0, derived.groups_per_step)


@pytest.mark.parametrize(("alpha", "bound", "slots"), [(0.5, 1, 96), (1.5, 2, 160), (2.25, 3, 208)])
def test_enabling_fractions_are_supported_beyond_the_document(alpha: float, bound: int, slots: int) -> None:
    derived = load_config(RLVR, {"async_generation_ratio": alpha}).derived
    assert (derived.bound, derived.slots) == (bound, slots)


# -- Configuration Examples


def test_examples_every_value_of_the_two_files_is_read_or_named() -> None:
    for path in (RLVR, AGENTIC):
        resolved = load_config(path)
        leaves = {key: value for key, value, _ in resolved.rows()}
        assert leaves["async_generation_ratio"] == 1
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key in ("rollout_batch_size", "max_steps", "save_steps", "ppo_epochs", "adv_estimator", "pretrain"):
            assert leaves[key] == given[key]
        for role, other in (("actor_train", "actor_infer"), ("actor_infer", "actor_train")):
            assert not set(resolved.derived.devices[role]) & set(resolved.derived.devices[other])


def test_examples_the_agentic_block_is_agentic_and_lacks_only_its_environment() -> None:
    resolved = load_config(AGENTIC)
    assert resolved.derived.pipeline == "agentic"
    with pytest.raises(ConfigError, match=r"train_env_manager\.tags.*which environments"):
        prepare_run(resolved)


def test_examples_the_rlvr_block_is_rlvr_and_lacks_only_its_rewards() -> None:
    resolved = load_config(RLVR)
    assert resolved.derived.pipeline == "rlvr"
    with pytest.raises(ConfigError, match="rewards"):
        prepare_run(resolved)


# -- How Asynchronous Training Works


def test_how_1_a_value_above_zero_is_asynchronous_mode(tmp_path: Path) -> None:
    assert set(lags(play(tmp_path / "0", async_generation_ratio=0))) == {0}
    assert set(lags(play(tmp_path / "1", async_generation_ratio=1))) == {0, 1}


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_how_2_inference_generates_that_many_times_the_data_in_advance(alpha: int, tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=alpha, engines=4)
    begin = played.first("step.begin").time_s
    started = [event for event in played.of("group.start") if event.time_s <= begin]
    assert len(started) - 4 == alpha * 4


def test_how_3_training_does_not_wait_for_the_batch_that_is_being_generated(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=2, tail=True)
    running = list[int]()
    for begin, _ in step_windows(played):
        started = sum(event.time_s <= begin for event in played.of("request.start"))
        running.append(started - sum(event.time_s <= begin for event in played.of("request.end")))
    assert min(running[:-2]) > 0


def test_how_4_efficiency_grows_most_where_inference_takes_long(tmp_path: Path) -> None:
    gains = list[float]()
    for tail in (False, True):
        seconds = [
            duration_s(play(tmp_path / f"{tail}-{alpha}", tail=tail, async_generation_ratio=alpha)) for alpha in (0, 2)
        ]
        gains.append(seconds[0] / seconds[1])
    assert gains[1] > gains[0] > 1.2


# -- Supported Algorithms


@pytest.mark.parametrize("estimator", ["grpo", "reinforce", "gae"])
def test_algorithms_policy_gradients_of_both_pipelines_are_accepted(estimator: str) -> None:
    for path in (RLVR, AGENTIC):
        assert load_config(path, {"adv_estimator": estimator}).config.adv_estimator == estimator


@pytest.mark.parametrize("variant", ["topr", "tis", "cispo", "kimi15", "ppo"])
def test_algorithms_off_policy_variants_are_accepted(variant: str) -> None:
    assert load_config(RLVR, {"pg_variant": variant}).config.pg_variant == variant


def test_algorithms_vanilla_needs_a_word_because_it_corrects_nothing() -> None:
    with pytest.raises(ConfigErrors, match="no off-policy correction"):
        load_config(RLVR, {"pg_variant": "vanilla"})
    assert load_config(RLVR, {"pg_variant": "vanilla", "allow_uncorrected_async": True}).config.pg_variant == "vanilla"


# -- Usage Recommendations


def test_recommendation_1_the_planner_compares_values_of_the_ratio_for_these_costs() -> None:
    plan = plan_gpu_split(make_planned_scenario(), gpus=4, alphas=(0, 1, 2), trainer_gpus=2)
    assert {option.alpha for option in plan.options} == {0, 1, 2}
    assert recommend_split(plan).startswith(f"Take {plan.options[0].name}")


def test_recommendation_2_roles_that_share_devices_take_turns_and_it_is_said() -> None:
    resolved = load_config(RLVR, {"actor_infer.device_mapping": "list(range(8,16))"})
    assert resolved.derived.hybrid_engine and any("both take turns" in note for note in resolved.notes)


def test_recommendation_3_the_use_of_every_role_is_measured(tmp_path: Path) -> None:
    report = make_run_report(play(tmp_path, async_generation_ratio=1).events)
    names = {role.role for role in report.usage.roles} | {engine.engine for engine in report.usage.engines}
    assert {"train", "engine/0", "engine/1"} <= names


def test_recommendation_4_generation_pauses_for_validation_and_resumes(tmp_path: Path) -> None:
    played = play(
        tmp_path, async_generation_ratio=1, eval_steps=2, val_batch_size=4, pause_generation_for_validation=True
    )
    begins, ends = ([e.time_s for e in played.of(f"validate.{what}")] for what in ("begin", "end"))
    training = [e for e in played.of("request.start") if not e.data["request"].startswith("v")]
    assert len(begins) == 4
    for begin, end in zip(begins, ends, strict=True):
        assert not [event for event in training if begin < event.time_s < end]
    assert [event for event in training if event.time_s > ends[0]], "it goes on afterwards"


def test_recommendation_5_members_of_a_group_are_spread_over_the_engines(tmp_path: Path) -> None:
    for expand, engines in ((True, {1, 2}), (False, {1})):
        played = play(tmp_path / str(expand), group_size=4, is_num_return_sequences_expand=expand)
        used = dict[str, set[str]]()
        for event in played.of("request.start"):
            used.setdefault(event.data["request"].split(".")[0], set()).add(event.who)
        assert {len(names) for names in used.values()} <= engines
        assert max(len(names) for names in used.values()) == max(engines)


def test_recommendation_6_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigErrors, match="pg_variant") as refused:
        load_config(RLVR, {"pg_variant": "tiss"})
    assert "tis" in str(refused.value)
