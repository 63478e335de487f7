"""TRL and AReaL: names of their options, as tables.

TRL's names are not translated, because they are arguments of Python functions and some mean two of our keys. They are
used for the hint when somebody writes one of them. Names that lead to a key with the same last part
(`learning_rate`, `temperature`) need no row.
"""

from __future__ import annotations

from headway.config.dialects.rules import IN_LEDGER, OWN_TRACKING, ForeignKeys

_RANK = "actor_train.model_args.lora_rank"
_DATA = "actor_train.data_args.file_name"

TRL_NAMES: dict[str, str] = {
    "model": "pretrain",
    "model_name_or_path": "pretrain",
    "reward_funcs": "rewards.<name>.reward_fn",
    "reward_weights": "rewards.<name>.weight",
    "train_dataset": _DATA,
    "dataset_name": _DATA,
    "eval_dataset": "validation.data_args.file_name, or actor_train.data_args.holdout",
    "num_generations": "num_return_sequences_in_group",
    "max_prompt_length": "prompt_length",
    "max_completion_length": "response_length",
    "num_iterations": "ppo_epochs",
    "num_train_epochs": "max_steps",
    "beta": "kl_loss_coef, with use_kl_loss=true",
    "epsilon": "pg_clip",
    "epsilon_high": "pg_clip_high",
    "mask_truncated_completions": "mask_truncated_samples",
    "loss_type": "loss_agg_mode",
    "importance_sampling_level": "pg_variant=gspo",
    "scale_rewards": "norm_std_type",
    "generation_batch_size": "rollout_batch_size, which counts prompts",
    "lr": "actor_train.training_args.learning_rate",
    "bf16": "actor_train.model_args.dtype=bf16",
    "gradient_checkpointing": "actor_train.model_args.disable_gradient_checkpointing",
    "lora_r": _RANK,
    "use_lora": _RANK,
    "use_peft": _RANK,
    "peft_config": _RANK,
    "use_vllm": "actor_infer.strategy_args.strategy_name=vllm",
    "run_name": "exp_name",
    "report_to": "track_with",
    "resume_from_checkpoint": "resume",
}
"""TRL's name → our key, as the hint shows it."""

FOREIGN_KEYS: ForeignKeys = {
    "report_to": OWN_TRACKING,
    "run_name": "see exp_name",
    "use_vllm": "see actor_infer.strategy_args.strategy_name",
    "vllm_mode": "see actor_infer.strategy_args.strategy_name",
    "log_completions": IN_LEDGER,
    "trial_name": "see exp_name",
    "stats_logger": OWN_TRACKING,
    "recover": "see resume",
    "launcher": "workers are started by the run itself",
}
