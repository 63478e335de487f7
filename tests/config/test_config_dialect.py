"""Keys of verl and ROLL, conflicts between keys, and keys of other frameworks without effect."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config
from headway.config.dialect_tables import EARLIER_NAMES, FOREIGN_KEYS, KEY_RULES
from headway.config.field_types import iterate_options
from headway.config.resolved_config import get_at_key
from headway.config.schema import Config
from headway.config.translation import is_foreign_key
from headway.registry import ADVANTAGE_ESTIMATORS, ENGINES, POLICY_LOSSES, STALENESS_POLICIES, Registry

from .factory import only_problem

ROLES = ("actor_train", "actor_infer", "reference", "critic", "validation")
ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."

TRANSLATED: list[tuple[str, Any, str, Any]] = [
    ("data.train_batch_size", 64, "rollout_batch_size", 64),
    ("data.max_prompt_length", 100, "prompt_length", 100),
    ("data.max_response_length", 200, "response_length", 200),
    ("data.train_files", "a.parquet", "actor_train.data_args.file_name", ("a.parquet",)),
    ("data.val_files", "[a, b]", "validation.data_args.file_name", ("a", "b")),
    ("actor_rollout_ref.model.path", "m", "pretrain", "m"),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        True,
        "actor_train.model_args.disable_gradient_checkpointing",
        False,
    ),
    (ACTOR + "optim.lr", "1e-6", "actor_train.training_args.learning_rate", 1e-6),
    (ACTOR + "ppo_micro_batch_size_per_gpu", 2, "actor_train.training_args.per_device_train_batch_size", 2),
    (ACTOR + "clip_ratio", 0.3, "pg_clip_low", 0.3),
    (ACTOR + "clip_ratio_high", 0.28, "pg_clip_high", 0.28),
    (ACTOR + "clip_ratio_c", 4.0, "dual_clip_loss", True),
    (ACTOR + "use_kl_loss", True, "use_kl_loss", True),
    (ACTOR + "kl_loss_coef", 0.01, "kl_loss_coef", 0.01),
    (ACTOR + "kl_loss_type", "low_var_kl", "kl_loss_type", "k3"),
    (ACTOR + "entropy_coeff", 0.01, "entropy_loss_coef", 0.01),
    (ACTOR + "loss_agg_mode", "seq-mean-token-sum", "loss_agg_mode", "seq-mean-token-sum"),
    (ROLLOUT + "n", 8, "num_return_sequences_in_group", 8),
    (ROLLOUT + "temperature", 0.7, "actor_infer.generating_args.temperature", 0.7),
    (ROLLOUT + "top_k", -1, "actor_infer.generating_args.top_k", 0),
    (ROLLOUT + "name", "sglang", "actor_infer.strategy_args.strategy_name", "sglang"),
    (ROLLOUT + "gpu_memory_utilization", 0.5, "actor_infer.strategy_args.strategy_config.gpu_memory_utilization", 0.5),
    (ROLLOUT + "with_reward", False, "with_reward", False),
    (ROLLOUT + "enable_dual_buffer", False, "enable_dual_buffer", False),
    (ROLLOUT + "param_update_preduce_bucket_size_mb", 64, "param_update_produce_bucket_mb", 64),
    (ROLLOUT + "param_update_produce_bucket_size_mb", 64, "param_update_produce_bucket_mb", 64),
    (ROLLOUT + "val_kwargs.temperature", 0, "validation.generating_args.temperature", 0.0),
    ("algorithm.adv_estimator", "reinforce", "adv_estimator", "reinforce"),
    ("actor_rollout_ref.nccl_timeout", 900, "reliability.rank_timeout_s", 900),
    ("algorithm.gamma", 0.9, "gamma", 0.9),
    ("algorithm.lam", 0.9, "lambd", 0.9),
    ("algorithm.use_kl_in_reward", True, "add_token_level_kl", True),
    ("algorithm.kl_ctrl.kl_coef", 0.1, "init_kl_coef", 0.1),
    ("algorithm.norm_adv_by_std_in_grpo", False, "norm_std_type", "none"),
    ("algorithm.filter_groups.max_num_gen_batches", 3, "max_num_gen_batches", 3),
    ("critic.optim.lr", 1e-5, "critic.training_args.learning_rate", 1e-5),
    (ACTOR + "fsdp_config.optimizer_offload", True, "actor_train.training_args.offload_optimizer", True),
    ("trainer.n_gpus_per_node", 4, "num_gpus_per_node", 4),
    ("trainer.nnodes", 2, "num_nodes", 2),
    ("trainer.total_training_steps", 9, "max_steps", 9),
    ("trainer.save_freq", -1, "save_steps", 0),
    ("trainer.max_actor_ckpt_to_keep", 3, "save_total_limit", 3),
    ("max_ckpt_to_keep", 0, "save_total_limit", 0),
    ("actor_train.training_args.save_total_limit", -1, "save_total_limit", 0),
    ("trainer.test_freq", 5, "eval_steps", 5),
    ("trainer.default_local_dir", "ckpt", "checkpoint_dir", "ckpt"),
    ("trainer.resume_mode", "disable", "resume", "never"),
    ("resume_from_checkpoint", True, "resume", "auto"),
    ("custom_reward_function.path", "r.py", "rewards.default.reward_fn", "r.py:compute_score"),
]


@pytest.mark.parametrize(("key", "value", "target", "expected"), TRANSLATED, ids=[row[0] for row in TRANSLATED])
def test_a_key_lands_where_it_belongs(key: str, value: Any, target: str, expected: Any) -> None:
    resolved = load_config(None, [f"{key}={value}"])
    assert get_at_key(resolved.config, target) == expected
    if not resolved.provenance[target].startswith("derived"):
        assert resolved.provenance[target] == f"translated from {key} (override)"


def test_every_rule_sets_an_option_that_exists() -> None:
    known = {option.key for option in iterate_options(Config)} | set(EARLIER_NAMES.values())
    known |= {key.rpartition(".")[0] for key in known}
    missing = []
    for rule in (rule for rules in KEY_RULES.values() for rule in rules):
        keys = [rule.target.replace("*.", f"{role}.", 1) for role in ROLES] if "*" in rule.target else [rule.target]
        is_open = ".reward_args." in rule.target or ".chat_template_kwargs." in rule.target
        if not is_open and not known.intersection(keys):
            missing.append(rule.target)
    assert missing == []


def test_no_key_is_both_foreign_and_known() -> None:
    known = [option.key.replace("<name>", "mine").partition("[]")[0] for option in iterate_options(Config)]
    assert [key for key in known if is_foreign_key(tuple(key.split(".")))] == []
    assert FOREIGN_KEYS.keys() & KEY_RULES.keys() == set()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor_train.generating_args.temperature", "did you mean actor_infer.generating_args.temperature?"),
        ("actor_train.strategy_args.strategy_config.max_num_seqs", "actor_infer.strategy_args.strategy_config"),
        ("actor_infer.training_args.learning_rate", "did you mean actor_train.training_args.learning_rate?"),
        ("reference.training_args.learning_rate", "did you mean actor_train.training_args.learning_rate?"),
        ("validation.data_args.holdout", "did you mean actor_train.data_args.holdout?"),
        ("rewards.math.training_arg.learning_rate", "unknown key"),
    ],
)
def test_a_key_that_a_role_does_not_read_is_an_unknown_key_there(key: str, hint: str) -> None:
    message = only_problem(None, {key: 1})
    assert "unknown key" in message and hint in message


@pytest.mark.parametrize(
    "key",
    [
        "reference.strategy_args.strategy_config.tensor_model_parallel_size",
        "rewards.math.model_args.model_name_or_path",
        "critic.training_args.per_device_train_batch_size",
        "actor_infer.data_args.template",
    ],
)
def test_a_key_that_another_framework_reads_for_the_role_is_noted(key: str) -> None:
    resolved = load_config(None, {key: 2, "num_return_sequences_in_group": 2})
    (note,) = resolved.notes
    assert key.startswith(note.partition(":")[0]) and "changes nothing here" in note
    assert resolved.derived == load_config(None, {"num_return_sequences_in_group": 2}).derived or "rewards" in key


@pytest.mark.parametrize(("steps", "alpha"), [(1, 0), (2, 1), (4, 3)])
def test_k_steps_ahead_are_a_ratio_of_k_minus_one(steps: int, alpha: int) -> None:
    assert load_config(None, [f"trainer.generate_ahead_steps={steps}"]).derived.async_generation_ratio == alpha


@pytest.mark.parametrize("key", [ROLLOUT + "async_strategy", "actor_rollout_ref.async_strategy"])
def test_both_spellings_of_the_strategy_are_accepted(key: str) -> None:
    derived = load_config(None, [f"{key}=one-step-off"]).derived
    assert (derived.async_generation_ratio, derived.hybrid_engine) == (1, False)


def test_fully_async_keeps_the_bound_it_is_given_and_is_one_otherwise() -> None:
    line = ROLLOUT + "async_strategy=fully-async"
    assert load_config(None, [line]).derived.async_generation_ratio == 1
    assert load_config(None, [line, "async_generation_ratio=3.5"]).derived.async_generation_ratio == 3.5
    assert "async_generation_ratio > 0" in only_problem(None, [line, "async_generation_ratio=0"])


def test_a_strategy_on_shared_devices_is_refused() -> None:
    lines = [ROLLOUT + "async_strategy=one-step-off", "actor_rollout_ref.hybrid_engine=True"]
    assert "hybrid_engine=False" in only_problem(None, lines)


def test_mode_async_on_shared_devices_is_noted() -> None:
    assert any("hybrid_engine=False" in note for note in load_config(None, [ROLLOUT + "mode=async"]).notes)


def test_two_keys_with_one_meaning_must_agree() -> None:
    message = only_problem(None, ["async_generation_ratio=2", "trainer.generate_ahead_steps=2"])
    assert "async_generation_ratio = 2" in message
    assert "as 1 (translated from trainer.generate_ahead_steps (override))" in message
    assert (
        load_config(None, ["async_generation_ratio=1", "trainer.generate_ahead_steps=2"]).derived.async_generation_ratio
        == 1
    )


def test_a_file_and_an_override_in_different_dialects_must_agree_too() -> None:
    assert "keep one" in only_problem({"rollout_batch_size": 32}, ["data.train_batch_size=64"])


def test_the_pipeline_switched_off_contradicts_steps_ahead() -> None:
    message = only_problem(None, ["actor_rollout_ref.async_pipeline=False", "trainer.generate_ahead_steps=3"])
    assert "async_pipeline" in message
    assert "generate_ahead_steps" in message


def test_a_mini_batch_in_prompts_becomes_accumulation() -> None:
    lines = ["data.train_batch_size=64", ROLLOUT + "n=8", ACTOR + "ppo_mini_batch_size=16", "trainer.n_gpus_per_node=8"]
    resolved = load_config(None, [*lines, ACTOR + "ppo_micro_batch_size_per_gpu=4"])
    assert resolved.config.actor_train.training_args.gradient_accumulation_steps == 16 * 8 // (4 * 8)
    assert (resolved.derived.mini_batch_samples, resolved.derived.optimizer_steps) == (128, 4)
    again = load_config(None, resolved.given())
    assert again.derived.optimizer_steps == 4, "a run that is resumed takes the steps it took"


def test_a_mini_batch_that_does_not_divide_is_refused() -> None:
    lines = ["data.train_batch_size=64", ACTOR + "ppo_mini_batch_size=12", "trainer.n_gpus_per_node=8"]
    with pytest.raises(Exception, match="12 prompts × 1 members = 12 samples, not divisible by 8"):
        load_config(None, lines)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("trainer.generate_ahead_steps=0", "expected a number ≥ 1"),
        (ROLLOUT + "mode=later", "one of sync, async"),
        (ROLLOUT + "async_strategy=two-step-off", "one of one-step-off, fully-async"),
        (ROLLOUT + "name=trt", "one of vllm, sglang"),
        ("actor_rollout_ref.async_pipeline=perhaps", "true or false"),
        ("trainer.n_gpu_per_node=8", "did you mean trainer.n_gpus_per_node?"),
    ],
)
def test_what_cannot_be_translated_is_refused(line: str, part: str) -> None:
    message = only_problem(None, [line])
    assert line.partition("=")[0] in message
    assert part in message


def test_nulls_of_the_second_dialect_are_not_given() -> None:
    assert (
        load_config(None, [ACTOR + "ppo_micro_batch_size_per_gpu=null", "data.val_batch_size=null"]).config
        == load_config().config
    )


def test_foreign_keys_are_noted_once_per_block() -> None:
    notes = load_config(
        {"system_envs": {"A": 1, "B": 2}, "tracker_kwargs": {"mode": "offline"}, "num_return_sequences_in_group": 2}
    ).notes
    assert [note.partition(":")[0] for note in notes] == ["system_envs", "tracker_kwargs", "pg_variant"]


def test_beams_are_refused_unless_there_is_one() -> None:
    assert load_config(None, ["actor_infer.generating_args.num_beams=1", "num_return_sequences_in_group=2"]).notes == ()
    assert "num_beams = 4" in only_problem(None, ["actor_infer.generating_args.num_beams=4"])


def test_an_engine_that_a_plugin_registers_is_used() -> None:
    ENGINES.register("mine", object())
    try:
        resolved = load_config(None, ["actor_infer.strategy_args.strategy_name=mine"])
    finally:
        ENGINES.unregister("mine")
    assert resolved.derived.strategies["actor_infer"] == "mine"
    assert "one of native" in only_problem(None, ["actor_infer.strategy_args.strategy_name=mine"])


@pytest.mark.parametrize(
    ("key", "registry"),
    [("pg_variant", POLICY_LOSSES), ("adv_estimator", ADVANTAGE_ESTIMATORS), ("staleness_policy", STALENESS_POLICIES)],
)
def test_choices_are_the_names_of_a_registry(key: str, registry: Registry[Any]) -> None:
    assert f"expected one of {', '.join(registry.names())}" in only_problem(None, {key: "mine"})
    close = registry.built_in[0][:-1] + "x"
    assert f"did you mean {registry.built_in[0]}?" in only_problem(None, {key: close})


def test_the_normalisation_of_agentic_files_is_kept() -> None:
    given = {"reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"}}
    derived = load_config({**given, "num_return_sequences_in_group": 4, "adv_estimator": "reinforce"}).derived
    assert (derived.norm_mean_type, derived.norm_std_type) == ("group", "group")
    assert load_config({"reward_normalization": {"method": "identity"}}).derived.norm_std_type == "none"
    clipped = load_config({"reward_normalization": {"method": "asym_clip"}, "num_return_sequences_in_group": 4})
    config, derived = clipped.config, clipped.derived
    assert (config.normalized_reward_low, config.normalized_reward_high, derived.norm_std_type) == (-1.0, 3.0, "group")
    assert "one of identity, mean, mean_std, asym" in only_problem({"reward_normalization": {"method": "median"}})


def test_settings_of_a_judge_are_passed_to_the_reward() -> None:
    given = {"rewards": {"judge": {"judge_prompt": "p", "worker_cls": "x.Y", "data_args": {"template": "qwen"}}}}
    resolved = load_config(given)
    assert resolved.config.rewards["judge"].reward_args == {"judge_prompt": "p"}
    assert any(note.startswith("rewards.judge.worker_cls: ") for note in resolved.notes)


def test_a_foreign_key_may_refer_to_what_nobody_knows() -> None:
    assert any(note.startswith("model_name: ") for note in load_config({"model_name": "${exp_name}-${now:%Y}"}).notes)


def test_a_kl_target_counts_only_with_the_adaptive_controller() -> None:
    target = "algorithm.kl_ctrl.target_kl=0.1"
    assert load_config(None, [target, "algorithm.kl_ctrl.type=fixed"]).config.target_kl is None
    assert load_config(None, [target, "algorithm.kl_ctrl.type=adaptive"]).config.target_kl == 0.1
    assert "one of fixed, adaptive" in only_problem(None, ["algorithm.kl_ctrl.type=strange"])


def test_a_key_of_theirs_that_nothing_here_knows_is_named_once() -> None:
    notes = load_config(None, ["algorithm.nonsense.deeply=8", "trainer.nnodes=1"]).notes
    assert [note for note in notes if note == "algorithm.nonsense.deeply: changes nothing here; not known here"]


def test_settings_of_a_back_end_are_named_and_not_refused() -> None:
    config = {"actor_train.strategy_args.strategy_name": "megatron_train", "hydra.run.dir": "."}
    more = {"actor_train.strategy_args.strategy_config.moe_grouped_gemm": True}
    notes = load_config(None, {**config, **more}).notes
    assert any("moe_grouped_gemm" in note and "kernels, memory and parallelism" in note for note in notes)


def test_in_a_file_of_our_own_an_unknown_key_is_a_mistake() -> None:
    assert "unknown key" in only_problem({"moe_grouped_gemm": True})


@pytest.mark.parametrize("key", ["sft_train", "student", "chosen_key"])
def test_pipelines_that_are_not_offered_are_named_in_one_line(key: str) -> None:
    assert "which Headway does not offer" in only_problem({key: {"a": 1}, "nonsense": 1, "hydra": {"x": 1}})
