"""A recognised file means what it means in its project: defaults are theirs, and `explain` says so."""

from __future__ import annotations

from typing import Any

import pytest

from headway.cli.config_command import explain_config
from headway.config import load_config
from headway.config.dialect_tables import DIALECT_DEFAULTS
from headway.errors import ConfigErrors
from headway.trainers.local.settings import make_local_settings

ROLL = {"hydra": {"run": {"dir": "."}}, "num_return_sequences_in_group": 2}
VERL = ["actor_rollout_ref.model.path=m", "data.train_files=d.parquet"]
GERL = [*VERL, "actor_rollout_ref.rollout.name=diffusers"]
TRAIN, CRITIC, VALIDATION = "actor_train.training_args", "critic.training_args", "validation.generating_args"

# (our key, their default, the default of a file of our own). Sources: ROLL roll/configs/*.py, roll/pipeline/rlvr and
# roll/pipeline/agentic; verl verl/trainer/config/_generated_ppo_trainer.yaml, the same in dots.rl for these keys;
# GeRL gerl/trainer/config. A default that is the same here needs no entry in our tables, and has its row all the same.
ROLL_DEFAULTS = [
    ("loss_agg_mode", "seq-mean-token-mean", "token-mean"),
    ("adv_estimator", "gae", "grpo"),
    ("norm_mean_type", "none", "group"),
    ("norm_std_type", "none", "group"),
    ("filter_zero_variance", False, True),
    ("unbiased_std", True, False),
    ("pg_clip", 0.2, 0.2),
    ("dual_clip_loss", False, False),
    ("dual_clip_c", 1.4, 3.0),
    ("lambd", 0.95, 0.95),
    ("gamma", 1.0, 1.0),
    ("value_clip", None, None),
    ("use_kl_loss", False, False),
    ("kl_loss_coef", 0.0, 0.001),
    ("init_kl_coef", 0.2, 0.2),
    ("kl_horizon", 10_000, 10_000),
    ("whiten_advantages", False, False),
    ("difficulty_low_threshold", 0.0, 0.1),
    ("difficulty_high_threshold", 1.0, 0.95),
    ("ppo_epochs", 1, 1),
    ("rollout_batch_size", 128, 128),
    ("prompt_length", 1024, 1024),
    ("actor_train.data_args.answer", "ground_truth", "answer"),
    ("max_steps", 500, 500),
    ("save_steps", 50, 50),
    ("eval_steps", 10, 10),
    ("save_total_limit", 0, 5),
    (f"{TRAIN}.lr_scheduler_type", "linear", "constant"),
    (f"{TRAIN}.learning_rate", 5e-5, 1e-6),
    (f"{TRAIN}.weight_decay", 0.0, 0.0),
    (f"{TRAIN}.max_grad_norm", 1.0, 1.0),
    (f"{TRAIN}.per_device_train_batch_size", 8, 1),
    (f"{TRAIN}.gradient_accumulation_steps", 1, 256),
    (f"{TRAIN}.warmup_unit", "optimizer_steps", "training_steps"),
    (f"{CRITIC}.lr_scheduler_type", "linear", "constant"),
    (f"{CRITIC}.learning_rate", 5e-5, 1e-6),
    (f"{CRITIC}.warmup_unit", "optimizer_steps", "training_steps"),
]
VERL_DEFAULTS = [
    ("adv_estimator", "gae", "grpo"),
    ("lambd", 1.0, 0.95),
    ("gamma", 1.0, 1.0),
    ("value_clip", 0.5, None),
    ("init_kl_coef", 0.001, 0.2),
    ("kl_horizon", 10_000, 10_000),
    ("kl_penalty", "k1", "k1"),
    ("use_kl_loss", False, False),
    ("kl_loss_coef", 0.001, 0.001),
    ("kl_loss_type", "k3", "k3"),
    ("pg_clip", 0.2, 0.2),
    ("dual_clip_loss", True, False),
    ("dual_clip_c", 3.0, 3.0),
    ("loss_agg_mode", "token-mean", "token-mean"),
    ("entropy_loss_coef", 0.0, 0.0),
    ("filter_zero_variance", False, True),
    ("unbiased_std", True, False),
    ("routing_replay", False, True),
    ("max_num_gen_batches", 0, 10),
    ("ppo_epochs", 1, 1),
    ("rollout_batch_size", 1024, 128),
    ("prompt_length", 512, 1024),
    ("response_length", 512, 1024),
    ("num_gpus_per_node", 8, 1),
    ("eval_steps", 0, 10),
    ("max_epochs", 30, None),
    ("eval_at_start", True, True),
    ("save_steps", 0, 50),
    ("save_total_limit", 0, 5),
    ("actor_train.data_args.answer", "reward_model.ground_truth", "answer"),
    ("actor_train.data_args.too_long", "error", "drop"),
    ("actor_train.data_args.shuffle", True, True),
    ("validation.data_args.too_long", "error", "drop"),
    ("rewards.default.reward_fn", "data_source", None),
    ("whiten_advantages", True, False),
    (f"{TRAIN}.learning_rate", 1e-6, 1e-6),
    (f"{TRAIN}.weight_decay", 0.01, 0.0),
    (f"{TRAIN}.max_grad_norm", 1.0, 1.0),
    (f"{TRAIN}.lr_scheduler_type", "constant", "constant"),
    (f"{CRITIC}.learning_rate", 1e-5, 1e-6),
    (f"{CRITIC}.weight_decay", 0.01, 0.0),
    ("actor_infer.generating_args.temperature", 1.0, 1.0),
    ("actor_infer.generating_args.top_p", 1.0, 1.0),
    ("actor_infer.strategy_args.strategy_config.gpu_memory_utilization", 0.5, 0.8),
    (f"{VALIDATION}.temperature", 0.0, 1.0),
    (f"{VALIDATION}.top_p", 1.0, 1.0),
    (f"{VALIDATION}.top_k", 0, 0),
    (f"{VALIDATION}.num_return_sequences", 1, 1),
]
GERL_DEFAULTS = [
    ("denoising.algorithm", "flow_grpo", None),
    ("denoising.window", "full", None),
    ("denoising.sampler", "sde", None),
    ("denoising.noise_level", 0.7, None),
    ("actor_infer.generating_args.num_inference_steps", 10, None),
    ("actor_infer.generating_args.guidance_scale", 4.5, 1.0),
    (f"{VALIDATION}.num_inference_steps", 40, None),
    ("num_return_sequences_in_group", 8, 2),
    ("rollout_batch_size", 8, 128),
    ("prompt_length", 128, 1024),
    ("pg_clip", 1e-5, 0.2),
    ("advantage_clip", 5.0, None),
    ("use_kl_loss", True, False),
    ("kl_loss_coef", 0.04, 0.001),
    ("norm_std_type", "batch", "group"),
    ("rewards.default.reward_fn", "ocr", None),
    ("actor_train.model_args.lora_rank", 32, None),
    ("actor_train.model_args.lora_alpha", 64.0, None),
    ("actor_train.model_args.disable_gradient_checkpointing", True, False),
    (f"{TRAIN}.learning_rate", 1e-6, 1e-6),
    (f"{TRAIN}.weight_decay", 0.01, 0.0),
    ("dual_clip_loss", False, False),
]
DIALECTS: dict[str, tuple[str, Any, Any, list[tuple[str, Any, Any]]]] = {
    "roll": ("ROLL", ROLL, (), ROLL_DEFAULTS),
    "verl": ("verl", None, VERL, VERL_DEFAULTS),
    "dots.rl": ("verl", None, [*VERL, "actor_rollout_ref.rollout.name=vllm"], VERL_DEFAULTS),
    "gerl": ("GeRL", None, GERL, GERL_DEFAULTS),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_not_given_has_the_default_of_the_project_and_explain_says_so(dialect: str) -> None:
    project, source, words, table = DIALECTS[dialect]
    shown = explain_config(load_config(source, words))["options"]
    own = explain_config(load_config({"num_return_sequences_in_group": 2}))["options"]
    for key, theirs, ours in table:
        assert shown[key]["value"] == theirs, key
        assert own.get(key, {"value": None})["value"] == ours, key
        if theirs != ours:
            said = shown[key]["from"]
            assert said.startswith((f"default of {project}", "default of verl", "translated from", "derived: ")), key


@pytest.mark.parametrize("dialect", ["roll", "verl", "gerl"])
def test_every_default_of_a_dialect_has_its_row(dialect: str) -> None:
    rows = {key for key, _, _ in DIALECTS[dialect][3]} | {key for key, _, _ in VERL_DEFAULTS if dialect == "gerl"}
    missing = {key for key in DIALECT_DEFAULTS[dialect] if key not in rows}
    assert missing <= ALIKE, "add (key, their default, ours)"


ALIKE = {"num_nodes", "validation.data_args.answer"}
"""Keys whose default follows from that of another row."""


def test_what_is_given_wins_over_a_default_of_theirs() -> None:
    given = {"loss_agg_mode": "token-mean", "pg_clip": 0.1, "filter_zero_variance": True}
    config = load_config({**ROLL, **given}).config
    assert (config.loss_agg_mode, config.filter_zero_variance) == ("token-mean", True)
    assert config.dual_clip_c == pytest.approx(1.2)


def test_a_configuration_that_was_written_to_a_run_directory_keeps_their_meaning() -> None:
    first = load_config({**ROLL, "pg_clip": 0.3, "actor_train": {"training_args": {"warmup_steps": 7}}})
    again = load_config(first.given())
    assert again.config.dual_clip_c == first.config.dual_clip_c == pytest.approx(1.6)
    assert again.config.loss_agg_mode == first.config.loss_agg_mode
    assert again.config.actor_train.training_args == first.config.actor_train.training_args


def test_warm_up_steps_of_theirs_are_optimizer_steps() -> None:
    sizes: dict[str, Any] = {"rollout_batch_size": 8, "num_return_sequences_in_group": 2, "ppo_epochs": 2}
    sizes["actor_train"] = {"training_args": {"warmup_steps": 5, "per_device_train_batch_size": 16}}
    theirs, own = make_local_settings(load_config({**ROLL, **sizes})), make_local_settings(load_config(sizes))
    assert (theirs.optimizer.warmup_steps, own.optimizer.warmup_steps) == (3, 5)


def test_the_batch_size_of_a_loader_does_not_limit_validation() -> None:
    resolved = load_config({**ROLL, "val_batch_size": 16})
    assert resolved.config.val_batch_size is None
    assert any(note.startswith("val_batch_size: changes nothing here") for note in resolved.notes)
    assert load_config({"val_batch_size": 16}).config.val_batch_size == 16


@pytest.mark.parametrize(
    "given", [{"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, {"actor_train.data_args.image_max_pixels": 9}]
)
def test_a_policy_that_reads_pictures_is_refused_in_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors, match="asks for pictures, video or sound") as refused:
        load_config({**ROLL, **given})
    assert len(str(refused.value).splitlines()) == 1
    assert load_config({"pretrain": "models/vl/qwen3"}).config.pretrain == "models/vl/qwen3", "a file of our own"


def test_sampling_of_roll_that_is_not_given_is_as_there() -> None:
    sampling = load_config({**ROLL, "actor_infer": {"generating_args": {"temperature": 0.6}}}).config.actor_infer
    args = sampling.generating_args
    assert (args.temperature, args.top_p, args.top_k) == (0.6, 0.7, 50)


def test_the_sides_of_a_clip_count_in_roll_only_with_their_switch() -> None:
    sides = {"pg_clip_low": 0.1, "pg_clip_high": 0.3}
    off, on = load_config({**ROLL, **sides}), load_config({**ROLL, **sides, "use_pg_clip_range": True})
    assert (off.derived.pg_clip_low, off.derived.pg_clip_high) == (0.2, 0.2)
    assert any(note.startswith("pg_clip_low: changes nothing without use_pg_clip_range") for note in off.notes)
    assert (on.derived.pg_clip_low, on.derived.pg_clip_high) == (0.1, 0.3)


def test_adapters_of_roll_follow_from_their_target() -> None:
    def adapters(**args: Any) -> tuple[int | None, tuple[str, ...]]:
        found = load_config({**ROLL, "actor_train": {"model_args": args}}).config.actor_train.model_args
        return found.lora_rank, found.lora_target

    assert adapters(lora_target="q_proj, v_proj") == (8, ("q_proj", "v_proj"))
    assert adapters(lora_target="all-linear", lora_rank=4) == (4, ())
    assert adapters(lora_rank=4) == (None, ())


def test_a_filter_of_roll_is_off_unless_it_says_otherwise() -> None:
    rows = [
        {"agg_type": "sequence", "ratio_enabled": True, "diff_enabled": False},
        {"enabled": True, "ratio_high": 1.5},
    ]
    filters = load_config({**ROLL, "train_infer_correction": {"filters": rows}}).config.train_infer_correction.filters
    assert [(one.enabled, one.agg_type, one.ratio_high) for one in filters] == [
        (False, "sequence", 1.2),
        (True, "token", 1.5),
    ]


def test_a_filter_of_roll_may_read_turns_and_differences() -> None:
    row = {"enabled": True, "agg_type": "segment", "ratio_enabled": False, "diff_enabled": True, "diff_low": -0.1}
    config = load_config({**ROLL, "train_infer_correction": {"filters": [row]}}).config
    (found,) = config.train_infer_correction.filters
    assert (found.agg_type, found.ratio_low, found.ratio_high) == ("segment", 0.0, 1e9)
    assert (found.diff_low, found.diff_high) == (-0.1, 0.2)


@pytest.mark.parametrize(
    ("given", "norms", "whitened"),
    [
        ({"reward_norm": "batch"}, ("batch", "batch"), False),
        ({"norm_mean_type": "batch", "rewards": {"a": {}, "b": {}}}, ("domain", "none"), True),
        ({"reward_norm": "batch", "rewards": {"a": {}, "b": {}}}, ("domain", "domain"), True),
        (
            {"reward_normalization": {"norm_mean_type": "group"}, "num_return_sequences_in_group": 2},
            ("group", "none"),
            False,
        ),
        ({"reward_normalization": {"grouping": "tags", "method": "mean_std"}}, ("domain", "domain"), False),
    ],
)
def test_rewards_of_roll_are_normalized_by_themselves(
    given: dict[str, Any], norms: tuple[str, str], whitened: bool
) -> None:
    given = {**given, "rewards": {name: {"reward_fn": "exact"} for name in given.get("rewards", {})}}
    resolved = load_config({**ROLL, "adv_estimator": "reinforce", "whiten_advantages": True, **given})
    assert (resolved.derived.norm_mean_type, resolved.derived.norm_std_type) == norms
    assert resolved.config.whiten_by_domain is whitened


@pytest.mark.parametrize("devices", [[0, 1, 2, 3], [0, 1], [2, 3, 4, 5]])
def test_rollout_of_roll_that_runs_ahead_on_devices_of_training_takes_turns(devices: list[int]) -> None:
    mappings = {"actor_train": {"device_mapping": [0, 1, 2, 3]}, "actor_infer": {"device_mapping": devices}}
    resolved = load_config({**ROLL, "async_generation_ratio": 1, "rollout_batch_size": 32, **mappings})
    assert resolved.config.hybrid_engine
    assert any("both take turns although" in note for note in resolved.notes)


def test_a_critic_of_roll_with_several_devices_is_cut_over_the_trainer() -> None:
    mappings = {"actor_train": {"device_mapping": [0, 1]}, "critic": {"device_mapping": [2, 3]}}
    resolved = load_config({**ROLL, "rollout_batch_size": 32, "num_gpus_per_node": 4, **mappings})
    assert resolved.derived.devices["critic"] == (0, 1)
    assert any(note.startswith("critic.device_mapping: changes nothing here") for note in resolved.notes)


def test_joint_keys_of_roll_have_their_effect() -> None:
    given = {"importance_sampling": "seq", "val_greedy": True, "val_n_sample": 4, "max_steps": 200}
    resolved = load_config({**ROLL, **given, "actor_train": {"training_args": {"warmup_ratio": 0.1}}})
    config = resolved.config
    assert (config.pg_variant, config.validation.generating_args.temperature) == ("gspo", 0.0)
    assert config.validation.generating_args.num_return_sequences == 4
    args = config.actor_train.training_args
    assert (args.warmup_steps, args.warmup_unit) == (20, "training_steps")
    assert resolved.derived.pg_clip_low == 0.2, "that of ROLL, not that of gspo here"


def test_a_rank_of_zero_trains_no_adapters_whatever_the_default_is() -> None:
    config = load_config(None, [*GERL, "actor_rollout_ref.model.lora_rank=0"]).config
    assert config.actor_train.model_args.lora_rank is None
    lora = load_config(None, [*VERL, "actor_rollout_ref.model.lora_rank=8"]).config.actor_train.model_args
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_target) == (8, 16.0, ())
    megatron = [
        "actor_rollout_ref.model.lora.rank=8",
        "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]",
    ]
    layers = load_config(None, [*VERL, *megatron]).config.actor_train.model_args.lora_target
    assert layers == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_window_of_gerl_is_drawn_from_the_range_that_is_given() -> None:
    window = [*GERL, "actor_rollout_ref.rollout.sde_window_size=3", "actor_rollout_ref.rollout.sde_window_range=[2,7]"]
    denoising = load_config(None, window).config.denoising
    assert denoising is not None
    assert (denoising.window, denoising.window_size, denoising.window_range) == ("random", 3, (2, 7))
    with pytest.raises(ConfigErrors, match="window_range"):
        load_config(None, [*window, "actor_rollout_ref.rollout.sde_window_range=[5,6]"])


def test_without_a_function_the_source_of_a_row_chooses_its_judge() -> None:
    words = [
        "actor_rollout_ref.model.path=m",
        "data.train_files=f",
        "reward_model.sandbox_fusion.url=http://h/run_code",
    ]
    resolved = load_config(None, [*words, "reward_model.sandbox_fusion.max_concurrent=7"])
    reward = resolved.config.rewards["default"]
    assert reward.reward_fn == "data_source"
    assert reward.reward_args == {"sandbox_url": "http://h/run_code", "concurrency": 7}
    assert any("programs run in http://h/run_code" in note for note in resolved.notes)
    mine = load_config(None, [*words, "reward.custom_reward_function.path=r.py"])
    assert mine.config.rewards["default"].reward_fn == "r.py:compute_score"
    assert any("sandbox_fusion.url: changes nothing here" in note for note in mine.notes)


@pytest.mark.parametrize(
    ("name", "ours", "norms", "whitened"),
    [
        ("grpo", "grpo", ("group", "group"), False),
        ("grpo_vectorized", "grpo", ("group", "group"), False),
        ("reinforce_plus_plus", "reinforce", ("none", "none"), True),
        ("reinforce_plus_plus_baseline", "grpo", ("group", "none"), True),
        ("rloo_vectorized", "rloo", ("none", "none"), False),
        ("gae", "gae", ("none", "none"), True),
        ("remax", "remax", ("none", "none"), False),
    ],
)
def test_an_estimator_of_verl_means_what_it_means_there(
    name: str, ours: str, norms: tuple[str, str], whitened: bool
) -> None:
    words = ["actor_rollout_ref.model.path=m", "data.train_files=f", "actor_rollout_ref.rollout.n=4"]
    resolved = load_config(None, [*words, f"algorithm.adv_estimator={name}"])
    assert resolved.config.adv_estimator == ours
    assert (resolved.derived.norm_mean_type, resolved.derived.norm_std_type) == norms
    assert resolved.config.whiten_advantages is whitened
    assert resolved.derived.group_size == (5 if name == "remax" else 4)


@pytest.mark.parametrize(
    ("loss", "ours"),
    [("geo_mean", "gmpo"), ("gpg", "vanilla"), ("sapo", "sapo"), ("dppo_tv", "dppo_tv"), ("cppo",) * 2],
)
def test_a_loss_of_verl_has_its_counterpart(loss: str, ours: str) -> None:
    actor = "actor_rollout_ref.actor"
    words = ["actor_rollout_ref.model.path=m", "data.train_files=f", "algorithm.adv_estimator=grpo"]
    words += [
        f"{actor}.policy_loss.loss_mode={loss}",
        f"{actor}.loss_agg_mode=token-mean",
        "actor_rollout_ref.rollout.n=4",
    ]
    config = load_config(None, words).config
    assert config.pg_variant == ours
    assert config.loss_agg_mode == ("seq-mean-token-mean" if loss in ("geo_mean", "sapo") else "token-mean")


def test_cispo_of_verl_has_the_clip_of_ppo() -> None:
    words = ["actor_rollout_ref.model.path=m", "data.train_files=f", "actor_rollout_ref.actor.clip_ratio_high=10"]
    config = load_config(None, [*words, "actor_rollout_ref.actor.policy_loss.loss_mode=cispo"]).config
    assert (config.cispo_epsilon_low, config.cispo_epsilon_high) == (0.2, 10)
