"""ROLL: its spellings of our own keys, and its keys that have no effect here, as tables.

Headway's own keys have ROLL's names. Keys that a role does not read here although ROLL has them are listed by role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.dialects.rules import (
    DTYPES,
    IN_LEDGER,
    KL_ESTIMATORS,
    OWN_CLASSES,
    OWN_DEADLINES,
    OWN_PROFILE,
    OWN_TRACKING,
    ForeignKey,
    ForeignKeys,
    KeyRule,
    KeyRules,
    Rewrite,
    rename_value,
    replace_negative,
)

_TRAIN, _INFER_SIZES = "actor_train.training_args.", "actor_infer.strategy_args.strategy_config."
_STRATEGY = "*.strategy_args.strategy_config."
_ENVIRONMENT = "environment variables are set by whoever starts the run"
_SETTINGS = "settings of another framework"
_PROMPTS = "prompts are made by actor_train.data_args"
_NOT_TRAINED = "only trained models keep activations"
_REWARD_ARGS = "a reward that has a model takes its settings from reward_args"
_CRITIC_BACK_END = "the critic runs on the trainer's back end"
_REFERENCE_BACK_END = "the reference model is computed by the trainer's back end"
_JUDGES = ("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key")
_REWARDS = ("code_url", "use_local", "format_pattern", "reward_type", "response_length_penalty_coef")


def _rewrite_resume(value: Any) -> Any:
    return {True: "auto", False: "never"}[value] if isinstance(value, bool) else value


KEY_RULES: KeyRules = {
    "resume_from_checkpoint": KeyRule("resume", _rewrite_resume),
    "max_ckpt_to_keep": KeyRule("save_total_limit", replace_negative(0)),
    "*.training_args.save_total_limit": KeyRule("save_total_limit", replace_negative(0)),
    "max_len_mask": "mask_truncated_samples",
    "max_grad_norm": _TRAIN + "max_grad_norm",
    "is_offload_optimizer_states_in_train_step": _TRAIN + "offload_optimizer",
    "max_running_requests": _INFER_SIZES + "max_num_seqs",
    "model_update_buffer_size_mb": "param_update_produce_bucket_mb",
    "param_update_preduce_bucket_size_mb": "param_update_produce_bucket_mb",
    "param_update_produce_bucket_size_mb": "param_update_produce_bucket_mb",
    "param_update_consume_bucket_size_mb": "param_update_consume_bucket_mb",
    "*.pg_variant": "pg_variant",
    "*.topr_positive_weight": "topr_positive_weight",
    "*.topr_negative_weight": "topr_negative_weight",
    "*.data_args.messages": "*.data_args.prompt",
    "reward_normalization.norm_mean_type": "norm_mean_type",
    "reward_normalization.norm_std_type": "norm_std_type",
    "*.generating_args.stop_strings": "*.generating_args.stop",
    _STRATEGY + "mem_fraction_static": _STRATEGY + "gpu_memory_utilization",
    _STRATEGY + "tensor_parallel_size": _STRATEGY + "tensor_model_parallel_size",
    _STRATEGY + "tp_size": _STRATEGY + "tensor_model_parallel_size",
    _STRATEGY + "pipeline_parallel_size": _STRATEGY + "pipeline_model_parallel_size",
    _STRATEGY + "max_running_requests": _STRATEGY + "max_num_seqs",
    **{f"*.{name}": f"*.reward_args.{name}" for name in (*_JUDGES, *_REWARDS)},
}

VALUE_REWRITES: Mapping[str, Rewrite] = {
    "kl_loss_type": rename_value(KL_ESTIMATORS, strict=False),
    "kl_penalty": rename_value(KL_ESTIMATORS, strict=False),
    "val_batch_size": replace_negative(None),
    "*.model_args.dtype": rename_value(DTYPES, strict=False),
    "*.generating_args.top_k": lambda value: 0 if value == -1 else value,
}
"""Our own key → how other ways to write its value are rewritten."""

FOREIGN_KEYS: ForeignKeys = {
    # the run
    "system_envs": _ENVIRONMENT,
    "tracker_kwargs": OWN_TRACKING,
    "model_name": "see exp_name",
    "logging_dir": "logs go to output_dir",
    "base_dir": "everything goes to output_dir",
    "rollout_dump_dir": IN_LEDGER,
    "render_save_dir": "episodes are kept in the ledger",
    "save_logging_board_dir": OWN_TRACKING,
    "checkpoint_config": "checkpoints are directories below checkpoint_dir",
    "rpc_timeout": OWN_DEADLINES,
    "local_rank": "ranks are assigned when workers start",
    "profiler_timeline": OWN_PROFILE,
    "profiler_memory": OWN_PROFILE,
    "profiler_output_dir": OWN_PROFILE,
    "length_profiler_dir": OWN_PROFILE,
    "report_length_and_rewards": OWN_PROFILE,
    "generate_opt_level": "requests are always scheduled one by one",
    "user_defined_rollout_loop_cls": OWN_CLASSES,
    "model_download_type": "models are local or come from the hub client's own settings",
    "enable_reference": "the reference model runs when a KL asks for it",
    "enable_old_logprobs_recompute": "log-probabilities are recomputed when the loss asks for a proximal policy",
    "force_disable_old_logprobs_recompute": "log-probabilities are recomputed only when the loss asks for it",
    "use_pg_clip_range": "pg_clip_low and pg_clip_high apply whenever they are given",
    "is_offload_states": "roles that share devices hand them over through locks",
    "batch_adjust_mode": "batches are whole groups and need no adjusting",
    "val_greedy": "set validation.generating_args.temperature to 0",
    "val_prompt_length": "validation uses prompt_length",
    "val_sequence_length": "validation uses sequence_length",
    "balance_length": "micro-batches do not change the gradient",
    "defaults": "composition lists are not read: give one complete file",
    "hydra": "settings of the launcher of another framework",
    # roles
    "*.worker_cls": OWN_CLASSES,
    "*.name": "roles have their key as name",
    "*.system_envs": _ENVIRONMENT,
    "*.world_size": "derived from device_mapping",
    "*.num_gpus_per_worker": "derived from the parallel sizes",
    "*.max_concurrency": OWN_DEADLINES,
    "*.backend_timeout": OWN_DEADLINES,
    "*.model_update_frequency": "weights are served after every step",
    "*.offload_nccl": "buffers of another framework",
    "*.logits_in_fp32": "log-probabilities are always computed in fp32",
    "*.apply_loss_scale": "micro-batches never change the gradient",
    "*.use_sequence_packing": "packing is the trainer's affair and never changes the gradient",
    "*.sequence_packing_args": "packing is the trainer's affair and never changes the gradient",
    "*.model_args.model_type": "read from the model",
    "*.model_args.moe_aux_loss_coef": "read from the model",
    "*.training_args.output_dir": "everything goes to output_dir",
    "*.training_args.num_train_epochs": "max_steps ends the run",
    "*.training_args.max_steps": "max_steps of the run is used",
    "*.training_args.bf16": "see model_args.dtype",
    "*.training_args.fp16": "see model_args.dtype",
    "*.training_args.logging_steps": "every step has its line in the log",
    "*.training_args.dataloader_num_workers": "prompts are read by one stage of the line",
    "*.generating_args.include_stop_str_in_output": "the engine decides",
    "*.generating_args.logprobs": "log-probabilities are always returned",
    "*.data_args.preprocessing_num_workers": "prompts are prepared as they are read",
    "*.data_args.cache_path": "nothing is cached on disk",
    "*.data_args.interleave_probs": "see domain_interleave_probs",
    _STRATEGY + "load_format": "engines receive their weights from the trainer",
    _STRATEGY + "enforce_eager": "the engine captures graphs where it can",
    _STRATEGY + "enable_prefix_caching": "prefixes are cached per policy version",
    _STRATEGY + "disable_log_stats": OWN_TRACKING,
    _STRATEGY + "overlap_grad_reduce": "FSDP2 overlaps communication by itself",
    _STRATEGY + "moe_token_dispatcher_type": "read from the model",
    _STRATEGY + "bias_activation_fusion": "kernels of another framework",
    _STRATEGY + "zero_optimization": "FSDP2 shards parameters, gradients and optimizer",
    _STRATEGY + "zero_allow_untested_optimizer": _SETTINGS,
    _STRATEGY + "zero_force_ds_cpu_optimizer": _SETTINGS,
    _STRATEGY + "train_batch_size": "derived from training_args",
    _STRATEGY + "train_micro_batch_size_per_gpu": "derived from training_args",
    _STRATEGY + "bf16": "see model_args.dtype",
    _STRATEGY + "fp16": "see model_args.dtype",
    _STRATEGY + "virtual_pipeline_model_parallel_size": "schedules of another framework",
    "*.query_filter_config": "see filter_zero_variance",
    "*.response_filter_config": "write it into the reward function",
    "rewards.*.training_args": "rewards are not trained",
    "train_env_manager.system_envs": _ENVIRONMENT,
    "val_env_manager.system_envs": _ENVIRONMENT,
    "train_env_manager.worker_cls": OWN_CLASSES,
    "val_env_manager.worker_cls": OWN_CLASSES,
    "train_env_manager.llm_proxy": "agents ask the inference hub",
    "train_env_manager.max_traj_per_env": "derived from rollout_batch_size",
    "train_env_manager.group_filter_cls": "see filter_zero_variance",
    "val_env_manager.llm_proxy": "agents ask the inference hub",
    "val_env_manager.max_traj_per_env": "derived from val_batch_size",
    "val_env_manager.group_filter_cls": "validation filters nothing",
    "custom_envs.*.env_manager_cls": OWN_CLASSES,
    "custom_envs.*.use_thread_lock": "environments of one worker run as coroutines",
    # keys that one role reads and another does not
    "logging_steps": ForeignKey("every step has its line", silent=(1,)),
    "*.infer_batch_size": ForeignKey("forward passes are packed by tokens", silent=(1,)),
    "*.model_args.attn_implementation": ForeignKey("trainer and engines choose their attention", silent=("auto",)),
    "*.model_args.flash_attn": ForeignKey("trainer and engines choose their attention", silent=("auto",)),
    _STRATEGY + "use_distributed_optimizer": ForeignKey("the optimizer's state is always sharded", silent=(True,)),
    _STRATEGY + "sequence_parallel": ForeignKey("see context_parallel_size", silent=(False,)),
    _STRATEGY + "recompute_granularity": ForeignKey("see disable_gradient_checkpointing", silent=("full",)),
    _STRATEGY + "block_size": ForeignKey("the KV cache of the native engine has no blocks", silent=(16,)),
    "actor_infer.data_args": _PROMPTS,
    "actor_infer.model_args.disable_gradient_checkpointing": ForeignKey(_NOT_TRAINED, silent=(True, False)),
    "actor_infer.model_args.lora_rank": "see actor_train.model_args.lora_rank",
    "actor_infer.model_args.lora_alpha": "see actor_train.model_args.lora_alpha",
    "actor_infer.model_args.lora_target": "see actor_train.model_args.lora_target",
    "reference.data_args": _PROMPTS,
    "reference.model_args.dtype": ForeignKey("the reference model has the dtype of actor_train", silent=("bf16",)),
    "reference.model_args.disable_gradient_checkpointing": ForeignKey(_NOT_TRAINED, silent=(True, False)),
    "reference.strategy_args": ForeignKey(_REFERENCE_BACK_END, silent=("native",)),
    "critic.data_args": _PROMPTS,
    "critic.model_args.dtype": ForeignKey("the critic has the dtype of actor_train", silent=("bf16",)),
    "critic.model_args.disable_gradient_checkpointing": "the critic recomputes activations as the actor does",
    "critic.strategy_args": ForeignKey(_CRITIC_BACK_END, silent=("fsdp2_train",)),
    "critic.training_args.per_device_train_batch_size": "the critic is trained on the micro-batches of the actor",
    "critic.training_args.gradient_accumulation_steps": "the critic is trained on the micro-batches of the actor",
    "rewards.*.model_args": _REWARD_ARGS,
    "rewards.*.generating_args": _REWARD_ARGS,
    "rewards.*.data_args": _REWARD_ARGS,
    "rewards.*.strategy_args": ForeignKey(_REWARD_ARGS, silent=("native",)),
    # possible with one value only
    "*.generating_args.num_beams": ForeignKey("rollouts are sampled, there is no beam search", only=1),
    "*.generating_args.do_sample": ForeignKey("rollouts are sampled; temperature 0 is greedy", only=True),
    "*.generating_args.repetition_penalty": ForeignKey("it would change the behaviour policy unseen", only=1.0),
    "whiten_rewards": ForeignKey("see norm_mean_type and norm_std_type", only=False),
    "use_reward_scaling": ForeignKey("see norm_mean_type and norm_std_type", only=False),
    "use_reward_norm": ForeignKey("see norm_mean_type and norm_std_type", only=False),
    "add_len_reward": ForeignKey("write it into the reward function", only=False),
    "difficulty_mask": ForeignKey("not available", only=False),
    "error_max_len_clip": ForeignKey("not available", only=False),
}
