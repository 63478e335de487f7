"""Whoever writes a name of another place, or of TRL's, is told the key that there is."""

from __future__ import annotations

import dataclasses
import re

import pytest

from headway.config import load_config
from headway.config.dialect_tables import FOREIGN_KEYS, KEY_RULES, TRL_NAMES, TRL_NAMES_WITHOUT_PLACE
from headway.config.field_types import iterate_options
from headway.config.schema import Config
from headway.registry import POLICY_LOSSES

from .factory import only_problem

LOSSES = POLICY_LOSSES.names()
KEYS = {option.key for option in iterate_options(Config)}


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("num_generations", "TRL's num_generations is num_return_sequences_in_group here"),
        ("beta", "TRL's beta is kl_loss_coef, with use_kl_loss=true here"),
        ("lora_rank", "did you mean actor_train.model_args.lora_rank?"),
        ("temperature", "did you mean actor_infer.generating_args.temperature?"),
        ("actor_train.learning_rate", "did you mean actor_train.training_args.learning_rate?"),
        ("validation.temperature", "did you mean validation.generating_args.temperature?"),
        ("asnyc_generation_ratio", "did you mean async_generation_ratio?"),
        ("rollout.temprature", "did you mean actor_infer.generating_args.temperature?"),
        ("trainer_args.max_steps", "did you mean max_steps?"),
        ("entropy_coef", "did you mean entropy_loss_coef?"),
        *((key, "lists every key") for key in ("batch_size", "global_batch_size", "chat_template", "gpus")),
        *((key, "lists every key") for key in ("backend", "scheduler.type", "env.name", "reliability.timeout_s")),
        ("logger.name", "`headway config explain` lists every key"),
        ("completely_different", "`headway config explain` lists every key"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_key(written: str, hint: str) -> None:
    assert hint in str(only_problem({written: 8}))


@pytest.mark.parametrize("name", TRL_NAMES)
def test_what_a_name_of_trl_is_here_exists_and_the_name_does_not(name: str) -> None:
    said = re.findall(r"[a-z_]+(?:\.[a-z_<>]+)+|[a-z]+(?:_[a-z]+)+|pretrain|resume|device|seed", TRL_NAMES[name])
    said = [word for word in said if word not in LOSSES]
    assert said and set(said) <= KEYS, said
    assert name not in KEYS


GRPO_FIELDS = re.findall(
    r"\w+",
    """
    model_init_kwargs disable_dropout cast_lm_head_to_fp32 remove_unused_columns num_generations
    num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset generation_batch_size
    steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty use_transformers_paged cache_implementation use_vllm vllm_mode vllm_model_impl
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
    vllm_enable_sleep_mode beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
    sapo_temperature_pos importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
    loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    top_entropy_quantile max_tool_calling_iterations vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_importance_sampling_cap off_policy_mask_threshold
    use_bias_correction_kl log_completions num_completions_to_print log_unique_prompts
    log_completions_hub_repo max_prompt_length
    """,
)


def test_every_field_of_trl_is_a_key_or_gets_one_line_that_answers_it() -> None:
    transformers = pytest.importorskip("transformers")
    inherited = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    endings = {key.rpartition(".")[2] for key in KEYS} | set(KEYS)
    answered = endings | TRL_NAMES.keys() | TRL_NAMES_WITHOUT_PLACE.keys() | KEY_RULES.keys() | FOREIGN_KEYS.keys()
    assert [name for name in [*GRPO_FIELDS, *inherited] if name not in answered] == []
    assert "nothing here takes the place of TRL's optim: the optimizer is AdamW" in str(only_problem({"optim": "sgd"}))


def test_fields_of_trl_with_one_meaning_are_translated() -> None:
    given = {
        "run_name": "mine",
        "report_to": ["wandb"],
        "gradient_checkpointing": False,
        "delta": 4.0,
        "use_vllm": True,
    }
    config = load_config(given).config
    assert (config.exp_name, config.track_with, config.dual_clip_loss, config.dual_clip_c) == (
        "mine",
        ("wandb",),
        True,
        4,
    )
    assert config.actor_train.model_args.disable_gradient_checkpointing
    assert config.actor_infer.strategy_args.strategy_name == "vllm"
    assert load_config({"report_to": "none"}).config.track_with == ()
    assert "none, or some of" in str(only_problem({"report_to": "mlflow"}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pg_variant", "grpo", "(grpo is a value of adv_estimator; expected one of"),
        ("adv_estimator", "gspo", "(gspo is a value of pg_variant; expected one of"),
        ("pg_variant", "cipso", "(did you mean cispo?"),
        ("pg_variant", "bspline", "(expected one of"),
    ],
)
def test_a_name_is_suggested_only_where_it_is_near(key: str, value: str, said: str) -> None:
    assert said in str(only_problem({key: value}))
