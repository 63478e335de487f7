"""Derives what the user did not give: lengths, groups, headway, normalisation, back ends.

Derivation fills in nulls and never changes a value that the user gave. `device_layout` places roles on devices and
cuts the batch, `denoising_defaults` does what is special to denoising models, and `config_checks` judges the result.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast

from headway.algorithm_traits import ADVANTAGE_TRAITS, LOSS_TRAITS
from headway.config.config_blocks import EnvManagerConfig
from headway.config.denoising_defaults import derive_denoising
from headway.config.device_layout import GroupSizes, compute_step_sizes, place_roles
from headway.config.dialect_tables import ROLL_MARKS
from headway.config.document import ConfigEntry
from headway.config.resolved_config import ConfigDraft, DerivedConfig, get_at_key
from headway.config.reward_model_choice import derive_reward_models
from headway.config.roles import GeneratingArgs
from headway.config.strategies import (
    DEFAULT_STRATEGIES,
    SERVER_STRATEGIES,
    choose_server,
    choose_strategy,
    find_server_problems,
    uses_server,
)
from headway.errors import ConfigError

_DEFAULT_LENGTH = 1024
_DEFAULT_ADDITIONAL_PROMPTS = 16
_ROLES = ("actor_train", "actor_infer", "reference", "critic")
_POLICY = "actor_train.model_args.model_name_or_path"
_ANSWERS = "actor_infer.generating_args.num_return_sequences"
NormScope = Literal["group", "batch", "domain", "none"]


def derive_config(draft: ConfigDraft, mini_batch: ConfigEntry | None) -> DerivedConfig:
    """Return all derived values. Afterwards `draft` has the tree with nulls filled in, and the problems found.

    `mini_batch` is the size of an optimizer step in prompts, where verl's key gives it.
    """
    derive_denoising(draft)
    pipeline = _get_pipeline(draft)
    _derive_lengths(draft)
    groups = _derive_groups(draft)
    _derive_headway(draft, groups.per_step)
    before = len(draft.problems)
    devices = place_roles(draft)
    placed = len(draft.problems)
    step = compute_step_sizes(draft, devices, groups, mini_batch)
    if placed > before:
        del draft.problems[placed:]  # arithmetic on wrong devices would only repeat the problem
    _derive_algorithm(draft, groups.size)
    _derive_filter(draft, groups.size)
    _derive_sampling(draft, groups.size)
    _derive_names(draft)
    strategies = {**_choose_strategies(draft), **derive_reward_models(draft)}
    config, correction = draft.config, draft.config.train_infer_correction
    depth = config.pipeline_depth or 0.0
    slots = count_slots(depth, groups.per_step)
    return DerivedConfig(
        pipeline=pipeline,
        async_generation_ratio=config.async_generation_ratio,
        bound=compute_bound(config.async_generation_ratio),
        pipeline_depth=depth,
        slots=slots,
        groups_per_step=groups.per_step,
        group_size=groups.size,
        members_started=groups.members_started,
        additional_groups=_derive_redundant_groups(draft, groups.additional, slots),
        samples_per_step=groups.samples,
        staleness_window=config.staleness_window or groups.per_step,
        prompt_length=config.prompt_length or 1,
        response_length=config.response_length or 1,
        sequence_length=config.sequence_length or 1,
        max_new_tokens=config.actor_infer.generating_args.max_new_tokens or 1,
        devices=devices,
        hybrid_engine=bool(config.hybrid_engine),
        num_nodes=config.num_nodes or 1,
        num_gpus_per_node=config.num_gpus_per_node or 1,
        replicas=step.replicas,
        data_parallel=step.data_parallel,
        mini_batch_samples=step.mini_batch_samples,
        optimizer_steps=step.optimizer_steps,
        strategies=strategies,
        filter_zero_variance=bool(config.filter_zero_variance) and groups.size > 1,
        norm_mean_type=cast(NormScope, config.norm_mean_type),
        norm_std_type=cast(NormScope, config.norm_std_type),
        pg_clip_low=config.pg_clip_low or 0.0,
        pg_clip_high=config.pg_clip_high or 0.0,
        needs_reference=config.use_kl_loss or config.add_token_level_kl,
        needs_critic=ADVANTAGE_TRAITS.get(config.adv_estimator).needs_critic,
        needs_proximal=LOSS_TRAITS.get(config.pg_variant).needs_proximal
        or correction.is_weight.enabled
        or any(one.enabled for one in correction.filters),
    )


def _get_pipeline(draft: ConfigDraft) -> Literal["rlvr", "agentic", "denoising"]:
    if draft.config.denoising is not None:
        return "denoising"
    if draft.config.train_env_manager is None and _has_agentic_shape(draft):
        draft.derive(
            "train_env_manager", EnvManagerConfig(), "sequence_length, no data, no rewards: as files of agents"
        )
    return "rlvr" if draft.config.train_env_manager is None else "agentic"


def _has_agentic_shape(draft: ConfigDraft) -> bool:
    """Return whether the files of agents look like this: no data, no rewards, one length for a whole episode."""
    config, lengths = draft.config, ("prompt_length", "response_length")
    judged = config.rewards or config.actor_train.data_args.file_name or config.custom_envs
    return not judged and draft.given("sequence_length") and not any(map(draft.given, lengths))


def compute_bound(alpha: float) -> int:
    """Return ⌈α⌉, the largest lag of a trained sample; a rounding error in the last bit of α does not change it."""
    return math.ceil(alpha - 1e-9)


def count_slots(depth: float, groups_per_step: int) -> int:
    """Return ⌊(1 + depth)·B⌋; a rounding error in the last bit of `depth` does not change it."""
    return math.floor((1 + depth) * groups_per_step + 1e-9)


def _derive_lengths(draft: ConfigDraft) -> None:
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
        draft.derive("sequence_length", prompt + response, "prompt_length + response_length")
    if config.actor_infer.generating_args.max_new_tokens is None:
        draft.derive("actor_infer.generating_args.max_new_tokens", response, "response_length")


def _derive_groups(draft: ConfigDraft) -> GroupSizes:
    """Derive how many groups a step has and how large they are, from prompts or from trajectories."""
    config, manager, key = draft.config, draft.config.train_env_manager, "num_return_sequences_in_group"
    additional = _derive_additional(draft)
    if manager is None:
        answers = config.actor_infer.generating_args.num_return_sequences
        if answers is not None and not draft.given(key):
            draft.derive(key, answers, _ANSWERS)
        size = draft.config.num_return_sequences_in_group + _count_greedy_members(draft)
        started = size + config.num_return_sequences_redundancy
        return GroupSizes(per_step=config.rollout_batch_size, size=size, members_started=started, additional=additional)
    if draft.given(key) and not draft.given("train_env_manager.group_size"):
        draft.derive("train_env_manager.group_size", config.num_return_sequences_in_group, key)
        manager = dataclasses.replace(manager, group_size=config.num_return_sequences_in_group)
    size = manager.group_size + _count_greedy_members(draft)
    if not draft.given(key):
        draft.derive(key, manager.group_size, "train_env_manager.group_size")
    elif config.num_return_sequences_in_group != manager.group_size:
        draft.refuse(key, f"but train_env_manager.group_size = {manager.group_size}", "keep one of them")
    per_step, rest = divmod(config.rollout_batch_size, manager.group_size)
    if rest:
        fewer = "fewer than one group" if per_step == 0 else "not whole groups"
        batch = f"{config.rollout_batch_size} / group_size {manager.group_size}"
        draft.refuse(
            "rollout_batch_size",
            f"trajectories are {fewer}: {batch} leaves {rest}",
            f"expected a multiple of {manager.group_size}",
        )
    started = size + max(manager.group_size_redundancy, config.num_return_sequences_redundancy)
    return GroupSizes(per_step=max(1, per_step), size=size, members_started=started, additional=additional)


def _count_greedy_members(draft: ConfigDraft) -> int:
    """Return 1 where the estimator compares with a greedy answer, which is a further member of every group."""
    return int(ADVANTAGE_TRAITS.get(draft.config.adv_estimator).needs_greedy_member)


def _derive_additional(draft: ConfigDraft) -> int:
    """Return the number of redundant prompts. Either the switch or the number may be given alone."""
    config = draft.config
    if config.is_use_additional_prompts and config.max_additional_running_prompts == 0:
        draft.derive("max_additional_running_prompts", _DEFAULT_ADDITIONAL_PROMPTS, "is_use_additional_prompts")
    prompts = draft.config.max_additional_running_prompts
    if config.is_use_additional_prompts is None:
        draft.derive("is_use_additional_prompts", prompts > 0, f"max_additional_running_prompts is {prompts}")
    return prompts if draft.config.is_use_additional_prompts else 0


def _derive_redundant_groups(draft: ConfigDraft, additional: int, slots: int) -> int:
    """Return the number of redundant groups: groups of environments beyond the slots are redundant, too."""
    manager, key = draft.config.train_env_manager, "train_env_manager.num_env_groups"
    if manager is None or manager.num_env_groups is None or not draft.given(key):
        return additional
    surplus = manager.num_env_groups - slots
    if surplus > additional:
        draft.notes.append(
            f"{key} = {manager.num_env_groups}: {surplus} more than the {slots} slots, so {surplus} groups are "
            "redundant: the first to end are trained, the others are dropped and their tasks played again"
        )
    return max(additional, surplus)


def _derive_headway(draft: ConfigDraft, per_step: int) -> None:
    key = "pipeline_depth" if draft.config.pipeline_depth is not None else "async_generation_ratio"
    if draft.config.pipeline_depth is None:
        draft.derive("pipeline_depth", draft.config.async_generation_ratio, "async_generation_ratio")
    depth = draft.config.pipeline_depth or 0.0
    slots = count_slots(depth, per_step)
    if depth > 0 and slots == per_step:
        draft.notes.append(
            f"{key} = {depth:g} has no effect: ⌊(1 + {depth:g}) × {per_step}⌋ = {slots} groups are one step, "
            f"so that rollout does not run ahead; {1 / per_step:g} would start one group ahead"
        )
    if draft.config.staleness_window is None and draft.config.staleness_policy == "window":
        draft.derive("staleness_window", per_step, "groups of one step")
    manager = draft.config.train_env_manager
    if manager is not None and manager.num_env_groups is None:
        draft.derive("train_env_manager.num_env_groups", slots, "slots = (1 + pipeline_depth) × groups per step")


def _derive_algorithm(draft: ConfigDraft, group_size: int) -> None:
    config = draft.config
    usual: NormScope = ADVANTAGE_TRAITS.get(config.adv_estimator).default_norm
    reason = f"adv_estimator {config.adv_estimator}"
    if usual == "group" and group_size == 1:
        usual, reason = "batch", f"{reason}, and a group of one has no spread of its own"
    for key in ("norm_mean_type", "norm_std_type"):
        if getattr(config, key) is None:
            draft.derive(key, usual, reason)
    clips = None if draft.given("pg_clip") else LOSS_TRAITS.get(config.pg_variant).default_clip
    reason = "pg_clip" if clips is None else f"pg_variant {config.pg_variant}"
    for key, clip in zip(("pg_clip_low", "pg_clip_high"), clips or (config.pg_clip, config.pg_clip), strict=True):
        if getattr(config, key) is None:
            draft.derive(key, clip, reason)


def _derive_filter(draft: ConfigDraft, group_size: int) -> None:
    """Replace groups with equal rewards where they have no gradient; elsewhere only if the user asks for it."""
    signal, key = _explain_signal_of_equals(draft), "filter_zero_variance"
    if draft.config.filter_zero_variance is None:
        if group_size == 1:
            draft.derive(key, False, "groups of one")
        else:
            draft.derive(key, signal is None, signal or f"adv_estimator {draft.config.adv_estimator}")
    elif draft.config.filter_zero_variance and signal is not None and group_size > 1:
        draft.notes.append(f"{key}: groups with equal rewards are replaced although they would teach: {signal}")


def _explain_signal_of_equals(draft: ConfigDraft) -> str | None:
    """Return why a group whose rewards are all equal has advantages other than zero, or `None` if it has none."""
    estimator, centre = draft.config.adv_estimator, draft.config.norm_mean_type
    traits = ADVANTAGE_TRAITS.get(estimator)
    if traits.needs_critic:
        return f"{estimator} compares with the critic's values"
    if traits.reads_parts and draft.config.gdpo_parts:
        return f"{estimator} compares parts of rewards, which differ where their sums do not"
    if traits.reads_turns and draft.config.train_env_manager is not None:
        return f"{estimator} compares turns, which differ where episodes do not"
    if traits.needs_several_members or centre == "group":
        return None
    return f"{estimator} compares with the batch" if centre == "batch" else f"{estimator} compares with nothing"


def _derive_sampling(draft: ConfigDraft, group_size: int) -> None:
    """Derive the answers per prompt and the sampling of validation."""
    if draft.config.actor_infer.generating_args.num_return_sequences is None:
        agentic = draft.config.train_env_manager is not None
        draft.derive(_ANSWERS, 1 if agentic else group_size, "one answer per turn" if agentic else "the group size")
    for field in dataclasses.fields(GeneratingArgs):
        key, source = f"validation.generating_args.{field.name}", f"actor_infer.generating_args.{field.name}"
        if draft.given(key):
            continue
        if field.name == "num_return_sequences":
            draft.derive(key, 1, "one answer per held-out prompt")
        else:
            draft.derive(key, getattr(draft.config.actor_infer.generating_args, field.name), source)


def _derive_names(draft: ConfigDraft) -> None:
    """Derive the models of the roles and the directory of checkpoints, and say what decides the number of steps."""
    if draft.config.max_epochs is not None and not draft.given("max_steps"):
        draft.derive("max_steps", draft.config.max_steps, "max_epochs, when the data is read")
    config = draft.config
    if config.checkpoint_dir is None:
        draft.derive("checkpoint_dir", f"{config.output_dir.rstrip('/')}/checkpoints", "output_dir")
    policy = "pretrain" if config.actor_train.model_args.model_name_or_path is None else _POLICY
    sources = dict.fromkeys(_ROLES, policy) | {
        "critic": "pretrain" if config.reward_pretrain is None else "reward_pretrain"
    }
    for role, source in sources.items():
        name = get_at_key(config, source)
        if getattr(config, role).model_args.model_name_or_path is None and name is not None:
            draft.derive(f"{role}.model_args.model_name_or_path", name, source)


def _start_server(draft: ConfigDraft, name: str) -> bool:
    """Return whether vLLM or SGLang, asked for by its name, is installed and is started; a note says where it is not.

    Images are made by our own engines, and so is everything on a Ray cluster: other engines are on this machine.
    """
    key = "actor_infer.strategy_args.strategy_config"
    servers, config = draft.config.actor_infer.strategy_args.strategy_config, draft.config
    if config.denoising is not None or config.cluster.kind == "ray":
        why = "runs on this machine alone" if config.cluster.kind == "ray" else "makes no images"
        draft.notes.append(f"actor_infer.strategy_args.strategy_name: {name} {why}, native is used instead")
        return False
    try:
        option, note = choose_server(name, servers, strict=config.strict)
    except ConfigError as problem:
        draft.problems.append(problem)
        return False
    draft.notes += [note] if note else []
    if option:
        draft.derive(f"{key}.{option}", True, f"{name} is installed")
    return bool(option)


def _choose_strategies(draft: ConfigDraft) -> dict[str, str]:
    """Return the back end of each role. A substitute becomes a note, an unknown name a problem."""
    chosen = {}
    for role, default in DEFAULT_STRATEGIES.items():
        name = get_at_key(draft.config, f"{role}.strategy_args.strategy_name")
        if name is None:
            name = default
            draft.derive(f"{role}.strategy_args.strategy_name", name, "the built-in back end")
        if role == "actor_infer":
            servers = draft.config.actor_infer.strategy_args.strategy_config
            draft.problems += find_server_problems(name, servers)
            if uses_server(servers) or (name in SERVER_STRATEGIES and _start_server(draft, name)):
                chosen[role] = name
                continue
            if name in SERVER_STRATEGIES:
                chosen[role] = default
                continue
        try:
            chosen[role], note = choose_strategy(role, name)
        except ConfigError as problem:
            draft.problems.append(problem)
            continue
        if note is not None and draft.config.strict:
            key = f"{role}.strategy_args.strategy_name"
            draft.refuse(key, f"is not in this build, and strict is set: {chosen[role]} would stand in for it")
        elif note is not None:
            draft.notes.append(note)
            if name in ROLL_MARKS["strategies"]:  # what is stored is a file of our own
                key = f"{role}.strategy_args.strategy_name"
                draft.derive(key, chosen[role], f"translated from {key}: {name} ({draft.provenance.get(key)})")
    return chosen
