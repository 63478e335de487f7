"""verl: its keys `actor_rollout_ref.*`, `trainer.*`, `data.*`, `algorithm.*` and `critic.*`, as tables.

Keys that mean something only together, such as those about asynchrony, are translated by code in
`headway.config.translation`.
"""

from __future__ import annotations

from headway.config.dialects.rules import (
    DTYPES,
    IN_LEDGER,
    KL_ESTIMATORS,
    OWN_CLASSES,
    OWN_DEADLINES,
    OWN_PROFILE,
    OWN_TRACKING,
    UNSET,
    ForeignKey,
    ForeignKeys,
    KeyRule,
    KeyRules,
    choose_by_flag,
    keep_names,
    rename_value,
    replace_negative,
)

_ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "hf_infer", "native": "native"}
_TRAINERS = {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train"}
_SAMPLERS = {"cps": "cps", "sde": "sde", "flow_sde": "sde"}
_LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo", "tis": "tis"}

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
_TRAIN, _SAMPLING = "actor_train.training_args.", "actor_infer.generating_args."
_TRAIN_SIZES, _INFER_SIZES = "actor_train.strategy_args.strategy_config.", "actor_infer.strategy_args.strategy_config."
_CRITIC, _VALIDATION = "critic.training_args.", "validation.generating_args."

_KERNELS = "the trainer chooses its kernels"
_MICRO_BATCHES = "micro-batches do not change the result"
_FSDP = "FSDP2 with its defaults is used"
_VALIDATION_SAMPLES = "validation samples are in the ledger"

CHAT_TEMPLATE_VARIABLES = "data.apply_chat_template_kwargs"
"""A key whose value has names of the user's own; what is below it is below what it sets."""

KEY_RULES: KeyRules = {
    # data
    "data.train_files": "actor_train.data_args.file_name",
    "data.val_files": "validation.data_args.file_name",
    "data.prompt_key": "actor_train.data_args.prompt",
    CHAT_TEMPLATE_VARIABLES: "actor_train.data_args.chat_template_kwargs",
    "data.shuffle": "actor_train.data_args.shuffle",
    "data.seed": "seed",
    "data.train_batch_size": "rollout_batch_size",
    "data.val_batch_size": KeyRule("val_batch_size", replace_negative(None)),
    "data.max_prompt_length": "prompt_length",
    "data.max_response_length": "response_length",
    # model
    "actor_rollout_ref.hybrid_engine": "hybrid_engine",
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.model.lora_rank": "actor_train.model_args.lora_rank",
    "actor_rollout_ref.model.lora_alpha": "actor_train.model_args.lora_alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": KeyRule(
        "actor_train.model_args.disable_gradient_checkpointing", choose_by_flag(when_true=False, when_false=True)
    ),
    # actor
    _ACTOR + "strategy": KeyRule("actor_train.strategy_args.strategy_name", rename_value(_TRAINERS)),
    _ACTOR + "ppo_micro_batch_size_per_gpu": _TRAIN + "per_device_train_batch_size",
    **keep_names(_ACTOR, "", "ppo_epochs loss_agg_mode use_kl_loss kl_loss_coef"),
    _ACTOR + "grad_clip": _TRAIN + "max_grad_norm",
    _ACTOR + "clip_ratio": "pg_clip",
    _ACTOR + "clip_ratio_low": "pg_clip_low",
    _ACTOR + "clip_ratio_high": "pg_clip_high",
    _ACTOR + "clip_ratio_c": (KeyRule("dual_clip_c"), KeyRule("dual_clip_loss", lambda value: True)),
    _ACTOR + "policy_loss.loss_mode": KeyRule("pg_variant", rename_value(_LOSSES)),
    _ACTOR + "entropy_coeff": "entropy_loss_coef",
    _ACTOR + "kl_loss_type": KeyRule("kl_loss_type", rename_value(KL_ESTIMATORS, strict=False)),
    _ACTOR + "ulysses_sequence_parallel_size": _TRAIN_SIZES + "context_parallel_size",
    **keep_names(
        _ACTOR + "megatron.",
        _TRAIN_SIZES,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size",
    ),
    _ACTOR + "fsdp_config.optimizer_offload": _TRAIN + "offload_optimizer",
    _ACTOR + "optim.lr": _TRAIN + "learning_rate",
    **keep_names(_ACTOR + "optim.", _TRAIN, "weight_decay lr_scheduler_type"),
    _ACTOR + "optim.lr_warmup_steps": KeyRule(_TRAIN + "warmup_steps", replace_negative(UNSET)),
    _ACTOR + "optim.warmup_style": _TRAIN + "lr_scheduler_type",
    # rollout
    _ROLLOUT + "name": KeyRule("actor_infer.strategy_args.strategy_name", rename_value(_ENGINES)),
    _ROLLOUT + "n": "num_return_sequences_in_group",
    **keep_names(_ROLLOUT, _SAMPLING, "temperature top_p num_inference_steps guidance_scale"),
    _ROLLOUT + "top_k": KeyRule(_SAMPLING + "top_k", replace_negative(0)),
    **keep_names(_ROLLOUT, "", "prompt_length response_length with_reward enable_dual_buffer"),
    _ROLLOUT + "max_model_len": "model_max_length",
    _ROLLOUT + "dtype": KeyRule("actor_infer.model_args.dtype", rename_value(DTYPES, strict=False)),
    **keep_names(
        _ROLLOUT,
        _INFER_SIZES,
        "tensor_model_parallel_size pipeline_model_parallel_size gpu_memory_utilization max_num_seqs",
    ),
    **keep_names(
        _ROLLOUT + "val_kwargs.", "validation.generating_args.", "temperature top_p num_inference_steps guidance_scale"
    ),
    _ROLLOUT + "val_kwargs.top_k": KeyRule("validation.generating_args.top_k", replace_negative(0)),
    _ROLLOUT + "val_kwargs.n": "validation.generating_args.num_return_sequences",
    **keep_names(_ROLLOUT, "denoising.", "noise_level timestep_shift"),
    _ROLLOUT + "sde_type": KeyRule("denoising.sampler", rename_value(_SAMPLERS)),
    _ROLLOUT + "sde_window_size": "denoising.window_size",
    _ROLLOUT + "param_update_preduce_bucket_size_mb": "param_update_produce_bucket_mb",
    _ROLLOUT + "param_update_produce_bucket_size_mb": "param_update_produce_bucket_mb",
    _ROLLOUT + "param_update_consume_bucket_size_mb": "param_update_consume_bucket_mb",
    # critic
    "critic.model.path": "critic.model_args.model_name_or_path",
    "critic.optim.lr": _CRITIC + "learning_rate",
    "critic.optim.weight_decay": _CRITIC + "weight_decay",
    "critic.grad_clip": _CRITIC + "max_grad_norm",
    "critic.cliprange_value": "value_clip",
    # algorithm
    "algorithm.adv_estimator": "adv_estimator",
    "algorithm.gamma": "gamma",
    "algorithm.lam": "lambd",
    "algorithm.norm_adv_by_std_in_grpo": KeyRule("norm_std_type", choose_by_flag(when_true=UNSET, when_false="none")),
    "algorithm.use_kl_in_reward": "add_token_level_kl",
    "algorithm.kl_penalty": KeyRule("kl_penalty", rename_value(KL_ESTIMATORS, strict=False)),
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.kl_ctrl.horizon": "kl_horizon",
    "algorithm.filter_groups.enable": "filter_zero_variance",
    "algorithm.filter_groups.max_num_gen_batches": KeyRule("max_num_gen_batches", replace_negative(0)),
    # trainer
    "trainer.nnodes": "num_nodes",
    "trainer.n_gpus_per_node": "num_gpus_per_node",
    "trainer.use_nodes_ratios": "use_nodes_ratios",
    "trainer.total_training_steps": "max_steps",
    "trainer.save_freq": KeyRule("save_steps", replace_negative(0)),
    "trainer.max_actor_ckpt_to_keep": KeyRule("save_total_limit", replace_negative(0)),
    "trainer.test_freq": KeyRule("eval_steps", replace_negative(0)),
    "trainer.val_before_train": "eval_at_start",
    "trainer.experiment_name": "exp_name",
    "trainer.default_local_dir": "checkpoint_dir",
    "trainer.resume_mode": KeyRule("resume", rename_value({"auto": "auto", "disable": "never", "resume_path": UNSET})),
    "trainer.resume_from_path": KeyRule("resume", lambda value: UNSET if value is None else value),
}

FOREIGN_KEYS: ForeignKeys = {
    "actor_rollout_ref.model.external_lib": "import it in the process that starts the run",
    "actor_rollout_ref.model.use_remove_padding": "padding is never trained on",
    "actor_rollout_ref.model.use_fused_kernels": _KERNELS,
    "actor_rollout_ref.model.use_liger": _KERNELS,
    "actor_rollout_ref.model.use_shm": "models are read from where they are",
    "actor_rollout_ref.model.trust_remote_code": "code that comes with a model is never run",
    "actor_rollout_ref.nccl_timeout": OWN_DEADLINES,
    "actor_rollout_ref.actor.use_torch_compile": _KERNELS,
    "actor_rollout_ref.actor.use_dynamic_bsz": _MICRO_BATCHES,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _MICRO_BATCHES,
    "actor_rollout_ref.actor.shuffle": "groups are trained in the order of the line",
    "actor_rollout_ref.actor.fsdp_config": _FSDP,
    "actor_rollout_ref.actor.checkpoint": "checkpoints hold everything needed to go on",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "deprecated there; use ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.optim.total_training_steps": "see trainer.total_training_steps",
    "actor_rollout_ref.ref.fsdp_config": _FSDP,
    "actor_rollout_ref.ref.strategy": "the reference runs on the trainer's back end",
    "actor_rollout_ref.ref.use_torch_compile": _KERNELS,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _MICRO_BATCHES,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _MICRO_BATCHES,
    "actor_rollout_ref.rollout.load_format": "engines receive their weights from the trainer",
    "actor_rollout_ref.rollout.enforce_eager": "the engine captures graphs where it can",
    "actor_rollout_ref.rollout.free_cache_engine": "roles that share devices hand them over through locks",
    "actor_rollout_ref.rollout.disable_log_stats": OWN_TRACKING,
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the engine decides how it prefills",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "the engine decides how it prefills",
    "actor_rollout_ref.rollout.engine_kwargs": "settings of another engine",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _MICRO_BATCHES,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _MICRO_BATCHES,
    "actor_rollout_ref.rollout.calculate_log_probs": "log-probabilities are always returned",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "temperature 0 is greedy",
    "actor_rollout_ref.rollout.multi_turn": "agentic runs are configured by train_env_manager",
    "critic.rollout_n": "the group size is used",
    "critic.ppo_mini_batch_size": "the critic is trained on the same batches as the actor",
    "critic.ppo_epochs": "ppo_epochs of the run is used",
    "critic.checkpoint": "checkpoints hold everything needed to go on",
    "critic.model.tokenizer_path": "the tokenizer comes with the model",
    "critic.model.fsdp_config": _FSDP,
    "critic.model.use_remove_padding": "padding is never trained on",
    "reward_model": "learned rewards are configured below rewards.<domain>",
    "data.image_key": "the task decides what it shows",
    "data.video_key": "the task decides what it shows",
    "data.custom_cls": OWN_CLASSES,
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
    "trainer.logger": OWN_TRACKING,
    "trainer.project_name": OWN_TRACKING,
    "trainer.log_val_generations": _VALIDATION_SAMPLES,
    "trainer.rollout_data_dir": IN_LEDGER,
    "trainer.validation_data_dir": _VALIDATION_SAMPLES,
    "trainer.balance_batch": _MICRO_BATCHES,
    "trainer.total_epochs": "max_steps ends the run",
    "trainer.critic_warmup": "the critic trains from the first step",
    "trainer.default_hdfs_dir": "copy the run directory yourself",
    "trainer.device": "devices are found when workers start",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept as save_total_limit says",
    "trainer.max_critic_ckpt_to_keep": "the critic is part of every checkpoint; see save_total_limit",
    "trainer.ray_wait_register_center_timeout": OWN_DEADLINES,
    "ray_init": OWN_DEADLINES,
    "ray_kwargs": OWN_DEADLINES,
    "global_profiler": OWN_PROFILE,
    _REF + "log_prob_micro_batch_size_per_gpu": _MICRO_BATCHES,
    _REF + "ulysses_sequence_parallel_size": "the reference model is computed by the trainer's back end",
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": _MICRO_BATCHES,
    "critic.strategy": "the critic runs on the trainer's back end",
    "critic.model.enable_gradient_checkpointing": "the critic recomputes activations as the actor does",
    "critic.ppo_micro_batch_size_per_gpu": "the critic is trained on the micro-batches of the actor",
    # possible with one value only
    _ROLLOUT + "do_sample": ForeignKey("rollouts are sampled; temperature 0 is greedy", only=True),
    _ROLLOUT + "ignore_eos": ForeignKey("an answer ends where the model ends it", only=False),
    _ROLLOUT + "use_fire_sampling": ForeignKey("not available", only=False),
    _ROLLOUT + "multi_turn.enable": ForeignKey("agentic runs are configured by train_env_manager", only=False),
    "actor_rollout_ref.model.override_config": ForeignKey("a model is taken as it is", only={}),
    _ACTOR + "optim.lr_warmup_steps_ratio": ForeignKey("give actor_train.training_args.warmup_steps", only=0),
    "critic.optim.lr_warmup_steps_ratio": ForeignKey("give critic.training_args.warmup_steps", only=0),
    "reward_model.enable": ForeignKey("learned rewards are configured below rewards.<domain>", only=False),
}
