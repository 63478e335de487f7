"""What follows from what was said: lengths, groups, headway, batch arithmetic, back ends.

Only fills in what is null; a value the user gave is never changed. Arithmetic that does not come out even is a
problem whose message shows the numbers. `checks` judges the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal

from headway.config.devices import place
from headway.config.document import Entry
from headway.config.draft import Draft
from headway.config.resolved import Derived
from headway.config.roles import GeneratingArgs
from headway.config.strategies import default_strategy, strategy_for
from headway.errors import ConfigError

_DEFAULT_LENGTH = 1024
_DEFAULT_ADDITIONAL_PROMPTS = 16
Norm = Literal["group", "batch", "none"]
_NORMS: dict[str, Norm] = {"grpo": "group", "step_reinforce": "group", "gigpo": "group", "reinforce_plus_plus": "batch"}


def derive(draft: Draft, mini_batch_groups: Entry | None, available: Collection[str]) -> Derived:
    """All derived values; `draft` has the tree with nulls filled in, and the problems."""
    lengths = _lengths(draft)
    groups = _groups(draft)
    headway = _headway(draft, groups["groups_per_step"])
    devices = place(draft)
    batch = _batch(draft, devices, groups, mini_batch_groups)
    algorithm = _algorithm(draft, groups["group_size"])
    _sampling(draft, lengths, groups["group_size"])
    _run(draft)
    return Derived(
        **lengths,
        **groups,
        **headway,
        **batch,
        **algorithm,
        devices=devices,
        hybrid=bool(draft.config.hybrid_engine),
        num_nodes=draft.config.num_nodes or 1,
        num_gpus_per_node=draft.config.num_gpus_per_node or 1,
        strategies=_strategies(draft, available),
    )


def _lengths(draft: Draft) -> dict[str, Any]:
    config = draft.config
    prompt, response, sequence = config.prompt_length, config.response_length, config.sequence_length
    if prompt is None:
        if sequence is not None and response is not None:
            prompt, reason = max(1, sequence - response), "sequence_length − response_length"
        elif sequence is not None:
            prompt, reason = max(1, min(_DEFAULT_LENGTH, sequence // 2)), "at most 1024 and half of sequence_length"
        else:
            prompt, reason = _DEFAULT_LENGTH, "no length is given"
        draft.derive("prompt_length", prompt, reason)
    if response is None:
        response = _DEFAULT_LENGTH if sequence is None else max(1, sequence - prompt)
        reason = "no response_length is given" if sequence is None else "sequence_length − prompt_length"
        draft.derive("response_length", response, reason)
    if sequence is None:
        sequence = prompt + response
        draft.derive("sequence_length", sequence, "prompt_length + response_length")
    key = "actor_infer.generating_args.max_new_tokens"
    if config.actor_infer.generating_args.max_new_tokens is None:
        draft.derive(key, response, "response_length")
    longest = draft.config.actor_infer.generating_args.max_new_tokens or response
    return {
        "prompt_length": prompt,
        "response_length": response,
        "sequence_length": sequence,
        "max_new_tokens": longest,
    }


def _groups(draft: Draft) -> dict[str, Any]:
    """B and the group: prompts and members, or trajectories and environments."""
    config, environments = draft.config, draft.config.train_env_manager
    answers = config.actor_infer.generating_args.num_return_sequences
    if environments is not None:
        size, redundancy = environments.group_size, environments.group_size_redundancy
        if draft.given("num_return_sequences_in_group") and config.num_return_sequences_in_group != size:
            draft.refuse("num_return_sequences_in_group", f"but train_env_manager.group_size = {size}", "keep one")
        if not draft.given("num_return_sequences_in_group"):
            draft.derive("num_return_sequences_in_group", size, "train_env_manager.group_size")
        per_step, rest = divmod(config.rollout_batch_size, size)
        if rest:
            problem = (
                f"trajectories are not whole groups: {config.rollout_batch_size} / group_size {size} leaves {rest}"
            )
            draft.refuse("rollout_batch_size", problem, f"a multiple of {size}")
    else:
        if answers is not None and not draft.given("num_return_sequences_in_group"):
            draft.derive("num_return_sequences_in_group", answers, "actor_infer.generating_args.num_return_sequences")
        size, redundancy = draft.config.num_return_sequences_in_group, config.num_return_sequences_redundancy
        per_step = config.rollout_batch_size
    if environments is not None and config.num_return_sequences_redundancy:
        redundancy = max(redundancy, config.num_return_sequences_redundancy)
    return {
        "pipeline": "rlvr" if environments is None else "agentic",
        "group_size": size,
        "members_started": size + redundancy,
        "groups_per_step": max(1, per_step),
        "samples_per_step": max(1, per_step) * size,
        "additional_groups": _additional(draft),
    }


def _additional(draft: Draft) -> int:
    config = draft.config
    if config.is_use_additional_prompts and config.max_additional_running_prompts == 0:
        draft.derive("max_additional_running_prompts", _DEFAULT_ADDITIONAL_PROMPTS, "is_use_additional_prompts")
    wanted = draft.config.max_additional_running_prompts
    if config.is_use_additional_prompts is None:
        draft.derive("is_use_additional_prompts", wanted > 0, f"max_additional_running_prompts is {wanted}")
    return wanted if draft.config.is_use_additional_prompts else 0


def _headway(draft: Draft, per_step: int) -> dict[str, Any]:
    alpha = draft.config.async_generation_ratio
    if draft.config.pipeline_depth is None:
        draft.derive("pipeline_depth", alpha, "async_generation_ratio")
    if draft.config.staleness_window is None:
        draft.derive("staleness_window", per_step, "groups of one step")
    depth = draft.config.pipeline_depth or 0.0
    slots = math.floor((1 + depth) * per_step + 1e-9)
    environments = draft.config.train_env_manager
    if environments is not None and environments.num_env_groups is None:
        draft.derive("train_env_manager.num_env_groups", slots, "slots")
    return {
        "alpha": alpha,
        "bound": math.floor(alpha),
        "depth": depth,
        "slots": slots,
        "staleness_window": draft.config.staleness_window or per_step,
    }


def _batch(
    draft: Draft, devices: dict[str, tuple[int, ...]], groups: dict[str, Any], mini: Entry | None
) -> dict[str, Any]:
    """How one training step is cut into optimizer steps, micro-batches and devices."""
    train, infer = draft.config.actor_train, draft.config.actor_infer
    sizes, engine = train.strategy_args.strategy_config, infer.strategy_args.strategy_config
    parallel = {
        "tensor": sizes.tensor_model_parallel_size,
        "pipeline": sizes.pipeline_model_parallel_size,
        "context": sizes.context_parallel_size,
    }
    ways = _divided(draft, "actor_train", len(devices["actor_train"]), parallel)
    engines = {"tensor": engine.tensor_model_parallel_size, "pipeline": engine.pipeline_model_parallel_size}
    replicas = _divided(draft, "actor_infer", len(devices["actor_infer"]), engines)
    samples, micro = groups["samples_per_step"], train.training_args.per_device_train_batch_size
    key = "actor_train.training_args.gradient_accumulation_steps"
    if train.training_args.gradient_accumulation_steps is None:
        whole, reason = samples, f"{samples} samples / ({micro} per device × {ways} data parallel)"
        if mini is not None:
            whole, reason = _mini_batch(draft, mini, groups, micro, ways)
        accumulation = max(1, whole // (micro * ways))
        draft.derive(key, accumulation, reason)
    accumulation = draft.config.actor_train.training_args.gradient_accumulation_steps or 1
    mini_batch = micro * accumulation * ways
    if samples % mini_batch:
        factors = f"{micro} per device × {accumulation} accumulation × {ways} data parallel"
        batch = f"{groups['groups_per_step']} groups × {groups['group_size']} members = {samples} samples"
        draft.refuse(
            "rollout_batch_size", f"batch not divisible: {batch}, one optimizer step takes {factors} = {mini_batch}"
        )
    return {
        "data_parallel": ways,
        "replicas": replicas,
        "mini_batch_samples": mini_batch,
        "optimizer_steps": max(1, samples // mini_batch) * draft.config.ppo_epochs,
    }


def _mini_batch(draft: Draft, mini: Entry, groups: dict[str, Any], micro: int, ways: int) -> tuple[int, str]:
    """Samples of one optimizer step, given in groups by the second dialect."""
    key, size = "actor_rollout_ref.actor.ppo_mini_batch_size", groups["group_size"]
    wanted = mini.value
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        problem = f"is not a count of prompts, {mini.origin}"
        draft.problems.append(ConfigError(problem, key=key, value=wanted, hint="expected an integer ≥ 1"))
        return groups["samples_per_step"], "the whole batch"
    if (wanted * size) % (micro * ways):
        factors = f"{micro} per device × {ways} data parallel"
        problem = f"{wanted} prompts × {size} members = {wanted * size} samples, not divisible by {factors}"
        draft.problems.append(ConfigError(problem, key=key, value=wanted, hint=f"a multiple of {micro * ways} samples"))
    return wanted * size, f"translated from {key} ({mini.origin})"


def _divided(draft: Draft, role: str, devices: int, sizes: dict[str, int]) -> int:
    """How many model copies a role has."""
    one = math.prod(sizes.values())
    if devices and devices % one == 0:
        return devices // one
    if devices:
        factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
        problem = f"{devices} devices are not whole copies of the model, one copy takes {factors} = {one}"
        draft.refuse(f"{role}.strategy_args.strategy_config.tensor_model_parallel_size", problem)
    return 1


def _algorithm(draft: Draft, group_size: int) -> dict[str, Any]:
    config = draft.config
    usual: Norm = _NORMS.get(config.adv_estimator, "none")
    reason = f"adv_estimator {config.adv_estimator}"
    if usual == "group" and group_size == 1:
        usual, reason = "batch", f"{reason}, and a group of one has no spread of its own"
    for key in ("norm_mean_type", "norm_std_type"):
        if getattr(config, key) is None:
            draft.derive(key, usual, reason)
    low, high = (3e-4, 4e-4) if config.pg_variant == "gspo" and not draft.given("pg_clip") else (config.pg_clip,) * 2
    for key, value in (("pg_clip_low", low), ("pg_clip_high", high)):
        if getattr(config, key) is None:
            draft.derive(key, value, "pg_clip" if value == config.pg_clip else f"pg_variant {config.pg_variant}")
    correction = config.train_infer_correction
    return {
        "norm_mean_type": draft.config.norm_mean_type,
        "norm_std_type": draft.config.norm_std_type,
        "pg_clip_low": draft.config.pg_clip_low,
        "pg_clip_high": draft.config.pg_clip_high,
        "filter_zero_variance": config.filter_zero_variance and group_size > 1,
        "needs_reference": config.use_kl_loss or config.add_token_level_kl,
        "needs_critic": config.adv_estimator == "gae",
        "needs_proximal": config.pg_variant == "decoupled_ppo"
        or correction.is_weight.enabled
        or any(one.enabled for one in correction.filters),
    }


def _sampling(draft: Draft, lengths: dict[str, int], group_size: int) -> None:
    """Answers per prompt, and the sampling of validation."""
    if draft.config.actor_infer.generating_args.num_return_sequences is None:
        answers = 1 if draft.config.train_env_manager is not None else group_size
        draft.derive(
            "actor_infer.generating_args.num_return_sequences",
            answers,
            "the group size" if answers > 1 else "one answer per request",
        )
    for field in dataclasses.fields(GeneratingArgs):
        key, source = f"validation.generating_args.{field.name}", f"actor_infer.generating_args.{field.name}"
        if field.name == "num_return_sequences":
            if draft.config.validation.generating_args.num_return_sequences is None:
                draft.derive(key, 1, "one answer per held-out prompt")
        elif not draft.given(key):
            draft.derive(key, getattr(draft.config.actor_infer.generating_args, field.name), source)


def _run(draft: Draft) -> None:
    """Names of models and directories."""
    config = draft.config
    if config.checkpoint_dir is None:
        draft.derive("checkpoint_dir", f"{config.output_dir.rstrip('/')}/checkpoints", "output_dir")
    for role in ("actor_train", "actor_infer", "reference", "critic"):
        source = "reward_pretrain" if role == "critic" and config.reward_pretrain is not None else "pretrain"
        if getattr(config, role).model_args.model_name_or_path is None and getattr(config, source) is not None:
            draft.derive(f"{role}.model_args.model_name_or_path", getattr(config, source), source)


def _strategies(draft: Draft, available: Collection[str]) -> dict[str, str]:
    """Back end of every role; a stand-in becomes a note, an unknown name a problem."""
    config, used = draft.config, {}
    names = {
        role: getattr(config, role).strategy_args.strategy_name
        for role in ("actor_train", "actor_infer", "reference", "critic")
    }
    names |= {f"rewards.{domain}": reward.strategy_args.strategy_name for domain, reward in config.rewards.items()}
    for role, name in names.items():
        if name is None:
            name = default_strategy(role)
            draft.derive(f"{role}.strategy_args.strategy_name", name, "the built-in back end")
        try:
            used[role], note = strategy_for(role, name, available)
        except ConfigError as problem:
            draft.problems.append(problem)
            continue
        if note is not None:
            draft.notes.append(note)
    return used
