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
class Rule:
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

RULES: dict[str, tuple[Rule, ...]] = {
    # The second dialect: data
    "data.train_files": (Rule("actor_train.data_args.file_name"),),
    "data.val_files": (Rule("validation.data_args.file_name"),),
    "data.prompt_key": (Rule("actor_train.data_args.prompt"),),
    _VARIABLES: (Rule("actor_train.data_args.chat_template_kwargs"),),
    "data.shuffle": (Rule("actor_train.data_args.shuffle"),),
    "data.seed": (Rule("seed"),),
    "data.train_batch_size": (Rule("rollout_batch_size"),),
    "data.val_batch_size": (Rule("val_batch_size", _off_below_zero(None)),),
    "data.max_prompt_length": (Rule("prompt_length"),),
    "data.max_response_length": (Rule("response_length"),),
    # model
    "actor_rollout_ref.hybrid_engine": (Rule("hybrid_engine"),),
    "actor_rollout_ref.model.path": (Rule("pretrain"),),
    "actor_rollout_ref.model.lora_rank": (Rule("actor_train.model_args.lora_rank"),),
    "actor_rollout_ref.model.lora_alpha": (Rule("actor_train.model_args.lora_alpha"),),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        Rule("actor_train.model_args.disable_gradient_checkpointing", _negated),
    ),
    # actor
    _ACTOR + "strategy": (Rule("actor_train.strategy_args.strategy_name", _named(_TRAINERS)),),
    _ACTOR + "ppo_micro_batch_size_per_gpu": (Rule(_TRAIN + "per_device_train_batch_size"),),
    _ACTOR + "ppo_epochs": (Rule("ppo_epochs"),),
    _ACTOR + "grad_clip": (Rule(_TRAIN + "max_grad_norm"),),
    _ACTOR + "clip_ratio": (Rule("pg_clip"),),
    _ACTOR + "clip_ratio_low": (Rule("pg_clip_low"),),
    _ACTOR + "clip_ratio_high": (Rule("pg_clip_high"),),
    _ACTOR + "clip_ratio_c": (Rule("dual_clip_c"), Rule("dual_clip_loss", lambda value: True)),
    _ACTOR + "loss_agg_mode": (Rule("loss_agg_mode"),),
    _ACTOR + "policy_loss.loss_mode": (Rule("pg_variant", _named(_LOSSES)),),
    _ACTOR + "entropy_coeff": (Rule("entropy_loss_coef"),),
    _ACTOR + "use_kl_loss": (Rule("use_kl_loss"),),
    _ACTOR + "kl_loss_coef": (Rule("kl_loss_coef"),),
    _ACTOR + "kl_loss_type": (Rule("kl_loss_type", _named(_KLS, strict=False)),),
    _ACTOR + "ulysses_sequence_parallel_size": (Rule(_TRAIN_SIZES + "context_parallel_size"),),
    _ACTOR + "megatron.tensor_model_parallel_size": (Rule(_TRAIN_SIZES + "tensor_model_parallel_size"),),
    _ACTOR + "megatron.pipeline_model_parallel_size": (Rule(_TRAIN_SIZES + "pipeline_model_parallel_size"),),
    _ACTOR + "megatron.context_parallel_size": (Rule(_TRAIN_SIZES + "context_parallel_size"),),
    _ACTOR + "megatron.expert_model_parallel_size": (Rule(_TRAIN_SIZES + "expert_model_parallel_size"),),
    _ACTOR + "fsdp_config.optimizer_offload": (Rule(_TRAIN + "offload_optimizer"),),
    _ACTOR + "optim.lr": (Rule(_TRAIN + "learning_rate"),),
    _ACTOR + "optim.weight_decay": (Rule(_TRAIN + "weight_decay"),),
    _ACTOR + "optim.lr_warmup_steps": (Rule(_TRAIN + "warmup_steps", _off_below_zero(UNSET)),),
    _ACTOR + "optim.warmup_style": (Rule(_TRAIN + "lr_scheduler_type"),),
    _ACTOR + "optim.lr_scheduler_type": (Rule(_TRAIN + "lr_scheduler_type"),),
    # rollout
    _ROLLOUT + "name": (Rule("actor_infer.strategy_args.strategy_name", _named(_ENGINES)),),
    _ROLLOUT + "n": (Rule("num_return_sequences_in_group"),),
    _ROLLOUT + "temperature": (Rule(_SAMPLING + "temperature"),),
    _ROLLOUT + "top_p": (Rule(_SAMPLING + "top_p"),),
    _ROLLOUT + "top_k": (Rule(_SAMPLING + "top_k", _off_below_zero(0)),),
    _ROLLOUT + "prompt_length": (Rule("prompt_length"),),
    _ROLLOUT + "response_length": (Rule("response_length"),),
    _ROLLOUT + "max_model_len": (Rule("model_max_length"),),
    _ROLLOUT + "dtype": (Rule("actor_infer.model_args.dtype", _named(_DTYPES, strict=False)),),
    _ROLLOUT + "tensor_model_parallel_size": (Rule(_INFER_SIZES + "tensor_model_parallel_size"),),
    _ROLLOUT + "pipeline_model_parallel_size": (Rule(_INFER_SIZES + "pipeline_model_parallel_size"),),
    _ROLLOUT + "gpu_memory_utilization": (Rule(_INFER_SIZES + "gpu_memory_utilization"),),
    _ROLLOUT + "max_num_seqs": (Rule(_INFER_SIZES + "max_num_seqs"),),
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": (Rule("actor_train.infer_batch_size"),),
    _ROLLOUT + "val_kwargs.temperature": (Rule("validation.generating_args.temperature"),),
    _ROLLOUT + "val_kwargs.top_p": (Rule("validation.generating_args.top_p"),),
    _ROLLOUT + "val_kwargs.top_k": (Rule("validation.generating_args.top_k", _off_below_zero(0)),),
    _ROLLOUT + "val_kwargs.n": (Rule("validation.generating_args.num_return_sequences"),),
    _ROLLOUT + "num_inference_steps": (Rule(_SAMPLING + "num_inference_steps"),),
    _ROLLOUT + "guidance_scale": (Rule(_SAMPLING + "guidance_scale"),),
    _ROLLOUT + "noise_level": (Rule("flow.noise_level"),),
    _ROLLOUT + "sde_type": (Rule("flow.sampler", _named(_SAMPLERS)),),
    _ROLLOUT + "sde_window_size": (Rule("flow.window_size"),),
    _ROLLOUT + "timestep_shift": (Rule("flow.timestep_shift"),),
    _ROLLOUT + "val_kwargs.num_inference_steps": (Rule("validation.generating_args.num_inference_steps"),),
    _ROLLOUT + "val_kwargs.guidance_scale": (Rule("validation.generating_args.guidance_scale"),),
    _ROLLOUT + "with_reward": (Rule("with_reward"),),
    _ROLLOUT + "enable_dual_buffer": (Rule("enable_dual_buffer"),),
    _ROLLOUT + "param_update_preduce_bucket_size_mb": (Rule("param_update_produce_bucket_mb"),),
    _ROLLOUT + "param_update_produce_bucket_size_mb": (Rule("param_update_produce_bucket_mb"),),
    _ROLLOUT + "param_update_consume_bucket_size_mb": (Rule("param_update_consume_bucket_mb"),),
    _REF + "log_prob_micro_batch_size_per_gpu": (Rule("reference.infer_batch_size"),),
    _REF + "ulysses_sequence_parallel_size": (Rule("reference.strategy_args.strategy_config.context_parallel_size"),),
    # critic
    "critic.strategy": (Rule("critic.strategy_args.strategy_name", _named(_TRAINERS)),),
    "critic.model.enable_gradient_checkpointing": (Rule("critic.model_args.disable_gradient_checkpointing", _negated),),
    "critic.model.path": (Rule("critic.model_args.model_name_or_path"),),
    "critic.optim.lr": (Rule(_CRITIC + "learning_rate"),),
    "critic.optim.weight_decay": (Rule(_CRITIC + "weight_decay"),),
    "critic.ppo_micro_batch_size_per_gpu": (Rule(_CRITIC + "per_device_train_batch_size"),),
    "critic.grad_clip": (Rule(_CRITIC + "max_grad_norm"),),
    "critic.cliprange_value": (Rule("value_clip"),),
    # algorithm
    "algorithm.adv_estimator": (Rule("adv_estimator"),),
    "algorithm.gamma": (Rule("gamma"),),
    "algorithm.lam": (Rule("lambd"),),
    "algorithm.norm_adv_by_std_in_grpo": (Rule("norm_std_type", _std),),
    "algorithm.use_kl_in_reward": (Rule("add_token_level_kl"),),
    "algorithm.kl_penalty": (Rule("kl_penalty", _named(_KLS, strict=False)),),
    "algorithm.kl_ctrl.kl_coef": (Rule("init_kl_coef"),),
    "algorithm.kl_ctrl.horizon": (Rule("kl_horizon"),),
    "algorithm.filter_groups.enable": (Rule("filter_zero_variance"),),
    "algorithm.filter_groups.max_num_gen_batches": (Rule("max_num_gen_batches", _off_below_zero(0)),),
    # trainer
    "trainer.nnodes": (Rule("num_nodes"),),
    "trainer.n_gpus_per_node": (Rule("num_gpus_per_node"),),
    "trainer.use_nodes_ratios": (Rule("use_nodes_ratios"),),
    "trainer.total_training_steps": (Rule("max_steps"),),
    "trainer.save_freq": (Rule("save_steps", _off_below_zero(0)),),
    "trainer.max_actor_ckpt_to_keep": (Rule("save_total_limit", _off_below_zero(0)),),
    "trainer.test_freq": (Rule("eval_steps", _off_below_zero(0)),),
    "trainer.val_before_train": (Rule("eval_at_start"),),
    "trainer.experiment_name": (Rule("exp_name"),),
    "trainer.default_local_dir": (Rule("checkpoint_dir"),),
    "trainer.resume_mode": (Rule("resume", _named({"auto": "auto", "disable": "never", "resume_path": UNSET})),),
    "trainer.resume_from_path": (Rule("resume", lambda value: UNSET if value is None else value),),
    # Synonyms in the first dialect
    "resume_from_checkpoint": (Rule("resume", _resume),),
    "max_ckpt_to_keep": (Rule("save_total_limit", _off_below_zero(0)),),
    "*.training_args.save_total_limit": (Rule("save_total_limit", _off_below_zero(0)),),
    "max_len_mask": (Rule("mask_truncated_samples"),),
    "max_grad_norm": (Rule(_TRAIN + "max_grad_norm"),),
    "is_offload_optimizer_states_in_train_step": (Rule(_TRAIN + "offload_optimizer"),),
    "max_running_requests": (Rule(_INFER_SIZES + "max_num_seqs"),),
    "model_update_buffer_size_mb": (Rule("param_update_produce_bucket_mb"),),
    "param_update_preduce_bucket_size_mb": (Rule("param_update_produce_bucket_mb"),),
    "param_update_produce_bucket_size_mb": (Rule("param_update_produce_bucket_mb"),),
    "param_update_consume_bucket_size_mb": (Rule("param_update_consume_bucket_mb"),),
    "*.pg_variant": (Rule("pg_variant"),),
    "*.topr_positive_weight": (Rule("topr_positive_weight"),),
    "*.topr_negative_weight": (Rule("topr_negative_weight"),),
    "*.model_args.flash_attn": (Rule("*.model_args.attn_implementation"),),
    "*.data_args.messages": (Rule("*.data_args.prompt"),),
    "reward_normalization.norm_mean_type": (Rule("norm_mean_type"),),
    "reward_normalization.norm_std_type": (Rule("norm_std_type"),),
    "*.generating_args.stop_strings": (Rule("*.generating_args.stop"),),
    "*.strategy_args.strategy_config.mem_fraction_static": (
        Rule("*.strategy_args.strategy_config.gpu_memory_utilization"),
    ),
    "*.strategy_args.strategy_config.tensor_parallel_size": (
        Rule("*.strategy_args.strategy_config.tensor_model_parallel_size"),
    ),
    "*.strategy_args.strategy_config.tp_size": (Rule("*.strategy_args.strategy_config.tensor_model_parallel_size"),),
    "*.strategy_args.strategy_config.pipeline_parallel_size": (
        Rule("*.strategy_args.strategy_config.pipeline_model_parallel_size"),
    ),
    "*.strategy_args.strategy_config.max_running_requests": (Rule("*.strategy_args.strategy_config.max_num_seqs"),),
}
"""Foreign key → what it sets."""

MAPPINGS = frozenset({_VARIABLES})
"""Foreign keys whose values have names of their own: what is below them is below what they set."""

_JUDGES = ("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key")
_REWARDS = ("code_url", "use_local", "format_pattern", "reward_type", "response_length_penalty_coef")
RULES |= {f"*.{name}": (Rule(f"*.reward_args.{name}"),) for name in (*_JUDGES, *_REWARDS)}

VALUES: dict[str, Callable[[Any], Any]] = {
    "kl_loss_type": _named(_KLS, strict=False),
    "kl_penalty": _named(_KLS, strict=False),
    "val_batch_size": _off_below_zero(None),
    "*.model_args.dtype": _named(_DTYPES, strict=False),
    "*.model_args.attn_implementation": _named({"flash_attention_2": "fa2", "flash_attn": "fa2"}, strict=False),
    "*.generating_args.top_k": lambda value: 0 if value == -1 else value,
}
"""Our own key → how other ways to write its value are rewritten."""
