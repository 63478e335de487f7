"""The table of other spellings: dotted keys of the second dialect, and synonyms inside the first.

Each row says which key of our tree a foreign key sets, and how its value is rewritten on the way. A rewrite that
finds a value without a counterpart raises `ValueError` with what would be right; `UNSET` leaves our key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

UNSET: Final = object()
"""A value that stands for "not given"."""


def _same(value: Any) -> Any:
    return value


def _negated(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return not value


def _off_below_zero(off: Any) -> Callable[[Any], Any]:
    """Negative values mean "off", which is `off` here."""
    return lambda value: off if isinstance(value, int | float) and value < 0 else value


def _named(names: Mapping[str, Any], *, strict: bool = True) -> Callable[[Any], Any]:
    """Other names for a choice; unless `strict`, names not listed pass unchanged."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, str) and value in names:
            return names[value]
        if strict:
            raise ValueError("one of " + ", ".join(names))
        return value

    return rewrite


def _resume(value: Any) -> Any:
    return {True: "auto", False: "never"}[value] if isinstance(value, bool) else value


def _std(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return UNSET if value else "none"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """What one foreign key does to our tree."""

    target: str
    """Our key; a leading `*` repeats the role of the foreign key."""
    rewrite: Callable[[Any], Any] = _same
    """How the value changes."""


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}
_KLS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3+": "k3"}
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "hf_infer", "native": "native"}
_TRAINERS = {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train"}
_SAMPLERS = {"cps": "cps", "sde": "sde", "flow_sde": "sde"}
_LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo", "tis": "tis"}

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
_TRAIN, _SAMPLING = "actor_train.training_args.", "actor_infer.generating_args."
_TRAIN_SIZES, _INFER_SIZES = "actor_train.strategy_args.strategy_config.", "actor_infer.strategy_args.strategy_config."
_CRITIC, _VARIABLES = "critic.training_args.", "data.apply_chat_template_kwargs"

KEY_RULES: dict[str, tuple[KeyRule, ...]] = {
    # The second dialect: data
    "data.train_files": (KeyRule("actor_train.data_args.file_name"),),
    "data.val_files": (KeyRule("validation.data_args.file_name"),),
    "data.prompt_key": (KeyRule("actor_train.data_args.prompt"),),
    _VARIABLES: (KeyRule("actor_train.data_args.chat_template_kwargs"),),
    "data.shuffle": (KeyRule("actor_train.data_args.shuffle"),),
    "data.seed": (KeyRule("seed"),),
    "data.train_batch_size": (KeyRule("rollout_batch_size"),),
    "data.val_batch_size": (KeyRule("val_batch_size", _off_below_zero(None)),),
    "data.max_prompt_length": (KeyRule("prompt_length"),),
    "data.max_response_length": (KeyRule("response_length"),),
    # model
    "actor_rollout_ref.hybrid_engine": (KeyRule("hybrid_engine"),),
    "actor_rollout_ref.model.path": (KeyRule("pretrain"),),
    "actor_rollout_ref.model.lora_rank": (KeyRule("actor_train.model_args.lora_rank"),),
    "actor_rollout_ref.model.lora_alpha": (KeyRule("actor_train.model_args.lora_alpha"),),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        KeyRule("actor_train.model_args.disable_gradient_checkpointing", _negated),
    ),
    # actor
    _ACTOR + "strategy": (KeyRule("actor_train.strategy_args.strategy_name", _named(_TRAINERS)),),
    _ACTOR + "ppo_micro_batch_size_per_gpu": (KeyRule(_TRAIN + "per_device_train_batch_size"),),
    _ACTOR + "ppo_epochs": (KeyRule("ppo_epochs"),),
    _ACTOR + "grad_clip": (KeyRule(_TRAIN + "max_grad_norm"),),
    _ACTOR + "clip_ratio": (KeyRule("pg_clip"),),
    _ACTOR + "clip_ratio_low": (KeyRule("pg_clip_low"),),
    _ACTOR + "clip_ratio_high": (KeyRule("pg_clip_high"),),
    _ACTOR + "clip_ratio_c": (KeyRule("dual_clip_c"), KeyRule("dual_clip_loss", lambda value: True)),
    _ACTOR + "loss_agg_mode": (KeyRule("loss_agg_mode"),),
    _ACTOR + "policy_loss.loss_mode": (KeyRule("pg_variant", _named(_LOSSES)),),
    _ACTOR + "entropy_coeff": (KeyRule("entropy_loss_coef"),),
    _ACTOR + "use_kl_loss": (KeyRule("use_kl_loss"),),
    _ACTOR + "kl_loss_coef": (KeyRule("kl_loss_coef"),),
    _ACTOR + "kl_loss_type": (KeyRule("kl_loss_type", _named(_KLS, strict=False)),),
    _ACTOR + "ulysses_sequence_parallel_size": (KeyRule(_TRAIN_SIZES + "context_parallel_size"),),
    _ACTOR + "megatron.tensor_model_parallel_size": (KeyRule(_TRAIN_SIZES + "tensor_model_parallel_size"),),
    _ACTOR + "megatron.pipeline_model_parallel_size": (KeyRule(_TRAIN_SIZES + "pipeline_model_parallel_size"),),
    _ACTOR + "megatron.context_parallel_size": (KeyRule(_TRAIN_SIZES + "context_parallel_size"),),
    _ACTOR + "megatron.expert_model_parallel_size": (KeyRule(_TRAIN_SIZES + "expert_model_parallel_size"),),
    _ACTOR + "fsdp_config.optimizer_offload": (KeyRule(_TRAIN + "offload_optimizer"),),
    _ACTOR + "optim.lr": (KeyRule(_TRAIN + "learning_rate"),),
    _ACTOR + "optim.weight_decay": (KeyRule(_TRAIN + "weight_decay"),),
    _ACTOR + "optim.lr_warmup_steps": (KeyRule(_TRAIN + "warmup_steps", _off_below_zero(UNSET)),),
    _ACTOR + "optim.warmup_style": (KeyRule(_TRAIN + "lr_scheduler_type"),),
    _ACTOR + "optim.lr_scheduler_type": (KeyRule(_TRAIN + "lr_scheduler_type"),),
    # rollout
    _ROLLOUT + "name": (KeyRule("actor_infer.strategy_args.strategy_name", _named(_ENGINES)),),
    _ROLLOUT + "n": (KeyRule("num_return_sequences_in_group"),),
    _ROLLOUT + "temperature": (KeyRule(_SAMPLING + "temperature"),),
    _ROLLOUT + "top_p": (KeyRule(_SAMPLING + "top_p"),),
    _ROLLOUT + "top_k": (KeyRule(_SAMPLING + "top_k", _off_below_zero(0)),),
    _ROLLOUT + "prompt_length": (KeyRule("prompt_length"),),
    _ROLLOUT + "response_length": (KeyRule("response_length"),),
    _ROLLOUT + "max_model_len": (KeyRule("model_max_length"),),
    _ROLLOUT + "dtype": (KeyRule("actor_infer.model_args.dtype", _named(_DTYPES, strict=False)),),
    _ROLLOUT + "tensor_model_parallel_size": (KeyRule(_INFER_SIZES + "tensor_model_parallel_size"),),
    _ROLLOUT + "pipeline_model_parallel_size": (KeyRule(_INFER_SIZES + "pipeline_model_parallel_size"),),
    _ROLLOUT + "gpu_memory_utilization": (KeyRule(_INFER_SIZES + "gpu_memory_utilization"),),
    _ROLLOUT + "max_num_seqs": (KeyRule(_INFER_SIZES + "max_num_seqs"),),
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": (KeyRule("actor_train.infer_batch_size"),),
    _ROLLOUT + "val_kwargs.temperature": (KeyRule("validation.generating_args.temperature"),),
    _ROLLOUT + "val_kwargs.top_p": (KeyRule("validation.generating_args.top_p"),),
    _ROLLOUT + "val_kwargs.top_k": (KeyRule("validation.generating_args.top_k", _off_below_zero(0)),),
    _ROLLOUT + "val_kwargs.n": (KeyRule("validation.generating_args.num_return_sequences"),),
    _ROLLOUT + "num_inference_steps": (KeyRule(_SAMPLING + "num_inference_steps"),),
    _ROLLOUT + "guidance_scale": (KeyRule(_SAMPLING + "guidance_scale"),),
    _ROLLOUT + "noise_level": (KeyRule("denoising.noise_level"),),
    _ROLLOUT + "sde_type": (KeyRule("denoising.sampler", _named(_SAMPLERS)),),
    _ROLLOUT + "sde_window_size": (KeyRule("denoising.window_size"),),
    _ROLLOUT + "timestep_shift": (KeyRule("denoising.timestep_shift"),),
    _ROLLOUT + "val_kwargs.num_inference_steps": (KeyRule("validation.generating_args.num_inference_steps"),),
    _ROLLOUT + "val_kwargs.guidance_scale": (KeyRule("validation.generating_args.guidance_scale"),),
    _ROLLOUT + "with_reward": (KeyRule("with_reward"),),
    _ROLLOUT + "enable_dual_buffer": (KeyRule("enable_dual_buffer"),),
    _ROLLOUT + "param_update_preduce_bucket_size_mb": (KeyRule("param_update_produce_bucket_mb"),),
    _ROLLOUT + "param_update_produce_bucket_size_mb": (KeyRule("param_update_produce_bucket_mb"),),
    _ROLLOUT + "param_update_consume_bucket_size_mb": (KeyRule("param_update_consume_bucket_mb"),),
    _REF + "log_prob_micro_batch_size_per_gpu": (KeyRule("reference.infer_batch_size"),),
    _REF + "ulysses_sequence_parallel_size": (
        KeyRule("reference.strategy_args.strategy_config.context_parallel_size"),
    ),
    # critic
    "critic.strategy": (KeyRule("critic.strategy_args.strategy_name", _named(_TRAINERS)),),
    "critic.model.enable_gradient_checkpointing": (
        KeyRule("critic.model_args.disable_gradient_checkpointing", _negated),
    ),
    "critic.model.path": (KeyRule("critic.model_args.model_name_or_path"),),
    "critic.optim.lr": (KeyRule(_CRITIC + "learning_rate"),),
    "critic.optim.weight_decay": (KeyRule(_CRITIC + "weight_decay"),),
    "critic.ppo_micro_batch_size_per_gpu": (KeyRule(_CRITIC + "per_device_train_batch_size"),),
    "critic.grad_clip": (KeyRule(_CRITIC + "max_grad_norm"),),
    "critic.cliprange_value": (KeyRule("value_clip"),),
    # algorithm
    "algorithm.adv_estimator": (KeyRule("adv_estimator"),),
    "algorithm.gamma": (KeyRule("gamma"),),
    "algorithm.lam": (KeyRule("lambd"),),
    "algorithm.norm_adv_by_std_in_grpo": (KeyRule("norm_std_type", _std),),
    "algorithm.use_kl_in_reward": (KeyRule("add_token_level_kl"),),
    "algorithm.kl_penalty": (KeyRule("kl_penalty", _named(_KLS, strict=False)),),
    "algorithm.kl_ctrl.kl_coef": (KeyRule("init_kl_coef"),),
    "algorithm.kl_ctrl.horizon": (KeyRule("kl_horizon"),),
    "algorithm.filter_groups.enable": (KeyRule("filter_zero_variance"),),
    "algorithm.filter_groups.max_num_gen_batches": (KeyRule("max_num_gen_batches", _off_below_zero(0)),),
    # trainer
    "trainer.nnodes": (KeyRule("num_nodes"),),
    "trainer.n_gpus_per_node": (KeyRule("num_gpus_per_node"),),
    "trainer.use_nodes_ratios": (KeyRule("use_nodes_ratios"),),
    "trainer.total_training_steps": (KeyRule("max_steps"),),
    "trainer.save_freq": (KeyRule("save_steps", _off_below_zero(0)),),
    "trainer.max_actor_ckpt_to_keep": (KeyRule("save_total_limit", _off_below_zero(0)),),
    "trainer.test_freq": (KeyRule("eval_steps", _off_below_zero(0)),),
    "trainer.val_before_train": (KeyRule("eval_at_start"),),
    "trainer.experiment_name": (KeyRule("exp_name"),),
    "trainer.default_local_dir": (KeyRule("checkpoint_dir"),),
    "trainer.resume_mode": (KeyRule("resume", _named({"auto": "auto", "disable": "never", "resume_path": UNSET})),),
    "trainer.resume_from_path": (KeyRule("resume", lambda value: UNSET if value is None else value),),
    # Synonyms in the first dialect
    "resume_from_checkpoint": (KeyRule("resume", _resume),),
    "max_ckpt_to_keep": (KeyRule("save_total_limit", _off_below_zero(0)),),
    "*.training_args.save_total_limit": (KeyRule("save_total_limit", _off_below_zero(0)),),
    "max_len_mask": (KeyRule("mask_truncated_samples"),),
    "max_grad_norm": (KeyRule(_TRAIN + "max_grad_norm"),),
    "is_offload_optimizer_states_in_train_step": (KeyRule(_TRAIN + "offload_optimizer"),),
    "max_running_requests": (KeyRule(_INFER_SIZES + "max_num_seqs"),),
    "model_update_buffer_size_mb": (KeyRule("param_update_produce_bucket_mb"),),
    "param_update_preduce_bucket_size_mb": (KeyRule("param_update_produce_bucket_mb"),),
    "param_update_produce_bucket_size_mb": (KeyRule("param_update_produce_bucket_mb"),),
    "param_update_consume_bucket_size_mb": (KeyRule("param_update_consume_bucket_mb"),),
    "*.pg_variant": (KeyRule("pg_variant"),),
    "*.topr_positive_weight": (KeyRule("topr_positive_weight"),),
    "*.topr_negative_weight": (KeyRule("topr_negative_weight"),),
    "*.model_args.flash_attn": (KeyRule("*.model_args.attn_implementation"),),
    "*.data_args.messages": (KeyRule("*.data_args.prompt"),),
    "reward_normalization.norm_mean_type": (KeyRule("norm_mean_type"),),
    "reward_normalization.norm_std_type": (KeyRule("norm_std_type"),),
    "*.generating_args.stop_strings": (KeyRule("*.generating_args.stop"),),
    "*.strategy_args.strategy_config.mem_fraction_static": (
        KeyRule("*.strategy_args.strategy_config.gpu_memory_utilization"),
    ),
    "*.strategy_args.strategy_config.tensor_parallel_size": (
        KeyRule("*.strategy_args.strategy_config.tensor_model_parallel_size"),
    ),
    "*.strategy_args.strategy_config.tp_size": (KeyRule("*.strategy_args.strategy_config.tensor_model_parallel_size"),),
    "*.strategy_args.strategy_config.pipeline_parallel_size": (
        KeyRule("*.strategy_args.strategy_config.pipeline_model_parallel_size"),
    ),
    "*.strategy_args.strategy_config.max_running_requests": (KeyRule("*.strategy_args.strategy_config.max_num_seqs"),),
}
"""Foreign key → what it sets."""

EARLIER_NAMES = {"flow": "denoising"}
"""Blocks of Headway's own configuration that had another name in an earlier version, and their names now."""
KEY_RULES |= {old: (KeyRule(new),) for old, new in EARLIER_NAMES.items()}

MAPPING_KEYS = frozenset({_VARIABLES, *EARLIER_NAMES})
"""Foreign keys whose values have names of their own: what is below them is below what they set."""

_JUDGES = ("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key")
_REWARDS = ("code_url", "use_local", "format_pattern", "reward_type", "response_length_penalty_coef")
KEY_RULES |= {f"*.{name}": (KeyRule(f"*.reward_args.{name}"),) for name in (*_JUDGES, *_REWARDS)}

VALUE_REWRITES: dict[str, Callable[[Any], Any]] = {
    "kl_loss_type": _named(_KLS, strict=False),
    "kl_penalty": _named(_KLS, strict=False),
    "val_batch_size": _off_below_zero(None),
    "*.model_args.dtype": _named(_DTYPES, strict=False),
    "*.model_args.attn_implementation": _named({"flash_attention_2": "fa2", "flash_attn": "fa2"}, strict=False),
    "*.generating_args.top_k": lambda value: 0 if value == -1 else value,
}
"""Our own key → how other ways to write its value are rewritten."""
