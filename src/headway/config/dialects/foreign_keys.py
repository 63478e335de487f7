"""Keys that other frameworks have and that change nothing here, each with the reason.

They are set aside before the schema is consulted and reported once, by name. A few are harmless only with one
value; with another they are errors. Anything not listed here, translated or in the schema is an unknown key.
"""

from __future__ import annotations

from typing import Any

from headway.config.document import ConfigEntries, KeyPath, join_key
from headway.errors import ConfigError

_OWN_WORKERS = "classes of another framework; subclass a stage instead"
_ENVIRON = "environment variables are set by whoever starts the run"
_OWN_TRACKING = "metrics go to the run directory and to what `track_with` names; `headway report` shows them"
_OWN_PROFILE = "the event log is the profile; see `headway report`"
_RAY = "processes and their deadlines are set by `reliability`"

FOREIGN_KEYS: dict[str, str] = {
    # ROLL, top level
    "system_envs": _ENVIRON,
    "tracker_kwargs": _OWN_TRACKING,
    "model_name": "see exp_name",
    "logging_dir": "logs go to output_dir",
    "base_dir": "everything goes to output_dir",
    "rollout_dump_dir": "finished samples are in the ledger of the run directory",
    "render_save_dir": "episodes are kept in the ledger",
    "save_logging_board_dir": _OWN_TRACKING,
    "checkpoint_config": "checkpoints are directories below checkpoint_dir",
    "rpc_timeout": _RAY,
    "local_rank": "ranks are assigned when workers start",
    "profiler_timeline": _OWN_PROFILE,
    "profiler_memory": _OWN_PROFILE,
    "profiler_output_dir": _OWN_PROFILE,
    "length_profiler_dir": _OWN_PROFILE,
    "report_length_and_rewards": _OWN_PROFILE,
    "generate_opt_level": "requests are always scheduled one by one",
    "user_defined_rollout_loop_cls": _OWN_WORKERS,
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
    # ROLL, roles
    "*.worker_cls": _OWN_WORKERS,
    "*.name": "roles have their key as name",
    "*.system_envs": _ENVIRON,
    "*.world_size": "derived from device_mapping",
    "*.num_gpus_per_worker": "derived from the parallel sizes",
    "*.max_concurrency": _RAY,
    "*.backend_timeout": _RAY,
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
    "*.strategy_args.strategy_config.load_format": "engines receive their weights from the trainer",
    "*.strategy_args.strategy_config.enforce_eager": "the engine captures graphs where it can",
    "*.strategy_args.strategy_config.enable_prefix_caching": "prefixes are cached per policy version",
    "*.strategy_args.strategy_config.disable_log_stats": _OWN_TRACKING,
    "*.strategy_args.strategy_config.overlap_grad_reduce": "FSDP2 overlaps communication by itself",
    "*.strategy_args.strategy_config.moe_token_dispatcher_type": "read from the model",
    "*.strategy_args.strategy_config.bias_activation_fusion": "kernels of another framework",
    "*.strategy_args.strategy_config.zero_optimization": "FSDP2 shards parameters, gradients and optimizer",
    "*.strategy_args.strategy_config.zero_allow_untested_optimizer": "settings of another framework",
    "*.strategy_args.strategy_config.zero_force_ds_cpu_optimizer": "settings of another framework",
    "*.strategy_args.strategy_config.train_batch_size": "derived from training_args",
    "*.strategy_args.strategy_config.train_micro_batch_size_per_gpu": "derived from training_args",
    "*.strategy_args.strategy_config.bf16": "see model_args.dtype",
    "*.strategy_args.strategy_config.fp16": "see model_args.dtype",
    "*.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": "schedules of another framework",
    "*.query_filter_config": "see filter_zero_variance",
    "*.response_filter_config": "write it into the reward function",
    "rewards.*.training_args": "rewards are not trained",
    "train_env_manager.system_envs": _ENVIRON,
    "val_env_manager.system_envs": _ENVIRON,
    "train_env_manager.worker_cls": _OWN_WORKERS,
    "val_env_manager.worker_cls": _OWN_WORKERS,
    "train_env_manager.llm_proxy": "agents ask the inference hub",
    "train_env_manager.max_traj_per_env": "derived from rollout_batch_size",
    "train_env_manager.group_filter_cls": "see filter_zero_variance",
    "val_env_manager.llm_proxy": "agents ask the inference hub",
    "val_env_manager.max_traj_per_env": "derived from val_batch_size",
    "val_env_manager.group_filter_cls": "validation filters nothing",
    "custom_envs.*.env_manager_cls": _OWN_WORKERS,
    "custom_envs.*.use_thread_lock": "environments of one worker run as coroutines",
    # verl
    "actor_rollout_ref.model.external_lib": "import it in the process that starts the run",
    "actor_rollout_ref.model.use_remove_padding": "padding is never trained on",
    "actor_rollout_ref.model.use_fused_kernels": "the trainer decides on kernels",
    "actor_rollout_ref.model.use_liger": "the trainer decides on kernels",
    "actor_rollout_ref.model.use_shm": "models are read from where they are",
    "actor_rollout_ref.model.trust_remote_code": "code that comes with a model is never run",
    "actor_rollout_ref.nccl_timeout": _RAY,
    "actor_rollout_ref.actor.use_torch_compile": "the trainer decides on kernels",
    "actor_rollout_ref.actor.use_dynamic_bsz": "micro-batches do not change the gradient",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro-batches do not change the gradient",
    "actor_rollout_ref.actor.shuffle": "groups are trained in the order of the line",
    "actor_rollout_ref.actor.fsdp_config": "FSDP2 with its defaults is used",
    "actor_rollout_ref.actor.checkpoint": "checkpoints hold everything needed to go on",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "deprecated there; use ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.optim.total_training_steps": "see trainer.total_training_steps",
    "actor_rollout_ref.ref.fsdp_config": "FSDP2 with its defaults is used",
    "actor_rollout_ref.ref.strategy": "the reference runs on the trainer's back end",
    "actor_rollout_ref.ref.use_torch_compile": "the trainer decides on kernels",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "micro-batches do not change the result",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "micro-batches do not change the result",
    "actor_rollout_ref.rollout.load_format": "engines receive their weights from the trainer",
    "actor_rollout_ref.rollout.enforce_eager": "the engine captures graphs where it can",
    "actor_rollout_ref.rollout.free_cache_engine": "roles that share devices hand them over through locks",
    "actor_rollout_ref.rollout.disable_log_stats": _OWN_TRACKING,
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the engine decides how it prefills",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "the engine decides how it prefills",
    "actor_rollout_ref.rollout.engine_kwargs": "settings of another engine",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "micro-batches do not change the result",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "micro-batches do not change the result",
    "actor_rollout_ref.rollout.calculate_log_probs": "log-probabilities are always returned",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "temperature 0 is greedy",
    "actor_rollout_ref.rollout.multi_turn": "agentic runs are configured by train_env_manager",
    "critic.rollout_n": "the group size is used",
    "critic.ppo_mini_batch_size": "the critic is trained on the same batches as the actor",
    "critic.ppo_epochs": "ppo_epochs of the run is used",
    "critic.checkpoint": "checkpoints hold everything needed to go on",
    "critic.model.tokenizer_path": "the tokenizer comes with the model",
    "critic.model.fsdp_config": "FSDP2 with its defaults is used",
    "critic.model.use_remove_padding": "padding is never trained on",
    "reward_model": "learned rewards are configured below rewards.<domain>",
    "data.image_key": "the task decides what it shows",
    "data.video_key": "the task decides what it shows",
    "data.custom_cls": _OWN_WORKERS,
    "data.tokenizer": "the tokenizer comes with the model",
    "data.reward_fn_key": "the domain of a task picks its reward",
    "data.return_raw_chat": "prompts are token ids from the start",
    "data.return_raw_input_ids": "prompts are token ids from the start",
    "data.filter_overlong_prompts": "prompts over prompt_length are left out; see actor_train.data_args.too_long",
    "data.filter_overlong_prompts_workers": "prompts are prepared as they are read",
    "data.truncation": "see actor_train.data_args.too_long: drop, error or truncate",
    "data.trust_remote_code": "code that comes with a dataset is never run",
    "data.gen_batch_size": "a prompt is drawn whenever a slot is free",
    "algorithm.filter_groups.metric": "groups are filtered by their rewards",
    "trainer.logger": _OWN_TRACKING,
    "trainer.project_name": _OWN_TRACKING,
    "trainer.log_val_generations": "validation samples are in the ledger",
    "trainer.rollout_data_dir": "finished samples are in the ledger of the run directory",
    "trainer.validation_data_dir": "validation samples are in the ledger",
    "trainer.balance_batch": "micro-batches do not change the gradient",
    "trainer.total_epochs": "max_steps ends the run",
    "trainer.critic_warmup": "the critic trains from the first step",
    "trainer.default_hdfs_dir": "copy the run directory yourself",
    "trainer.device": "devices are found when workers start",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept as save_total_limit says",
    "trainer.max_critic_ckpt_to_keep": "the critic is part of every checkpoint; see save_total_limit",
    "trainer.ray_wait_register_center_timeout": _RAY,
    "ray_init": _RAY,
    "ray_kwargs": _RAY,
    "global_profiler": _OWN_PROFILE,
    # TRL and AReaL
    "report_to": _OWN_TRACKING,
    "run_name": "see exp_name",
    "use_vllm": "see actor_infer.strategy_args.strategy_name",
    "vllm_mode": "see actor_infer.strategy_args.strategy_name",
    "log_completions": "finished samples are in the ledger of the run directory",
    "trial_name": "see exp_name",
    "stats_logger": _OWN_TRACKING,
    "recover": "see resume",
    "launcher": "workers are started by the run itself",
}
"""Key (`*`: any role or name) → why it changes nothing."""

ONE_VALUE_KEYS: dict[str, tuple[Any, str]] = {
    "*.generating_args.num_beams": (1, "rollouts are sampled, there is no beam search"),
    "*.generating_args.do_sample": (True, "rollouts are sampled; temperature 0 is greedy"),
    "*.generating_args.repetition_penalty": (1.0, "a penalty would change the behaviour policy unseen"),
    "actor_rollout_ref.rollout.do_sample": (True, "rollouts are sampled; temperature 0 is greedy"),
    "actor_rollout_ref.rollout.ignore_eos": (False, "an answer ends where the model ends it"),
    "actor_rollout_ref.rollout.use_fire_sampling": (False, "not available"),
    "actor_rollout_ref.rollout.multi_turn.enable": (False, "agentic runs are configured by train_env_manager"),
    "actor_rollout_ref.model.override_config": ({}, "a model is taken as it is"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (0, "give actor_train.training_args.warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": (0, "give critic.training_args.warmup_steps"),
    "whiten_rewards": (False, "see norm_mean_type and norm_std_type"),
    "use_reward_scaling": (False, "see norm_mean_type and norm_std_type"),
    "use_reward_norm": (False, "see norm_mean_type and norm_std_type"),
    "add_len_reward": (False, "write it into the reward function"),
    "difficulty_mask": (False, "not available"),
    "error_max_len_clip": (False, "not available"),
    "reward_model.enable": (False, "learned rewards are configured below rewards.<domain>"),
}
"""Key → the one value with which it changes nothing, and why."""

ROLES = frozenset({"actor_train", "actor_infer", "reference", "critic", "validation", "reward"})
"""First segments for which a leading `*` stands; below `rewards` it stands for two segments."""


def generalize_path(path: KeyPath) -> KeyPath:
    """The path as the tables write it: the name of a role, reward or environment becomes `*`."""
    if path[0] in ROLES:
        return ("*", *path[1:])
    if path[0] == "rewards" and len(path) > 2:
        return ("*", *path[2:])
    if path[0] == "custom_envs" and len(path) > 2:
        return ("custom_envs", "*", *path[2:])
    return path


def _listed(path: KeyPath) -> KeyPath | None:
    """The foreign key that `path` is, or is below."""
    domain = ("rewards", "*", *path[2:]) if path[0] == "rewards" and len(path) > 2 else path
    for name in (path, generalize_path(path), domain):
        for length in range(1, len(name) + 1):
            if join_key(name[:length]) in FOREIGN_KEYS:
                return name[:length]
    return None


def is_foreign_key(path: KeyPath) -> bool:
    """Whether nothing here reads the key, so that its value cannot matter."""
    return _listed(path) is not None


def set_foreign_keys_aside(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> ConfigEntries:
    """Entries without foreign keys; each of those becomes a note, or a problem where its value matters."""
    kept: ConfigEntries = {}
    noted: dict[str, str] = {}
    for path, entry in entries.items():
        harmless = ONE_VALUE_KEYS.get(join_key(path)) or ONE_VALUE_KEYS.get(join_key(generalize_path(path)))
        if harmless is not None:
            value, reason = harmless
            if entry.value not in (value, None):
                problem, hint = f"cannot be done [{entry.origin}]", f"only {value!r} is possible: {reason}"
                problems.append(ConfigError(problem, key=join_key(path), value=entry.value, hint=hint))
        elif (listed := _listed(path)) is not None:
            if entry.value is None:
                continue
            stars = 1 if path[0] == "rewards" and listed[0] == "*" else 0
            noted.setdefault(join_key(path[: len(listed) + stars]), FOREIGN_KEYS[join_key(listed)])
        else:
            kept[path] = entry
    notes.extend(f"{key}: changes nothing here; {reason}" for key, reason in noted.items())
    return kept
