"""What the scheduler needs to know of a configuration. Real and simulated runs read the same."""

from __future__ import annotations

from headway.config import GeneratingArgs, ResolvedConfig
from headway.settings import RunSettings
from headway.types import SamplingParams


def make_run_settings(resolved: ResolvedConfig, *, held_out: int = 0) -> RunSettings:
    """From a configuration; `held_out` tasks are there to validate with."""
    config, derived = resolved.config, resolved.derived
    return RunSettings(
        groups_per_step=derived.groups_per_step,
        group_size=derived.group_size,
        max_steps=config.max_steps,
        alpha=derived.alpha,
        depth=derived.depth,
        policy=config.staleness_policy,
        window=derived.staleness_window if config.staleness_policy == "window" else 0,
        order=config.selection_order,
        spare_groups=derived.additional_groups,
        spare_members=derived.members_started - derived.group_size,
        with_reward=config.with_reward,
        filter_zero_variance=derived.filter_zero_variance,
        max_gen_batches=config.max_num_gen_batches,
        scheduling=config.rollout_scheduling,
        replicate=config.is_num_return_sequences_expand,
        turn_barrier=config.env_scheduling == "barrier",
        dual_buffer=config.enable_dual_buffer,
        colocated=derived.hybrid,
        save_steps=config.save_steps,
        keep_checkpoints=config.save_total_limit,
        eval_steps=config.eval_steps,
        eval_tasks=config.val_batch_size or held_out,
        eval_answers=config.validation.generating_args.num_return_sequences or 1,
        eval_at_start=config.eval_at_start,
        eval_sampling=make_sampling_params(config.validation.generating_args, derived.max_new_tokens),
        pause_generation_for_validation=config.pause_generation_for_validation,
        sampling=make_sampling_params(config.actor_infer.generating_args, derived.max_new_tokens),
        reliability=config.reliability,
        seed=config.seed,
    )


def make_sampling_params(generating: GeneratingArgs, max_new_tokens: int) -> SamplingParams:
    """How the engines draw."""
    return SamplingParams(
        max_new_tokens=generating.max_new_tokens or max_new_tokens,
        temperature=generating.temperature,
        top_p=generating.top_p,
        top_k=generating.top_k,
        min_p=generating.min_p,
        stop=generating.stop,
        guidance=generating.guidance_scale,
    )
