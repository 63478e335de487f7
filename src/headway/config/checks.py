"""Relations between options that cannot run, each refused with the numbers that show why.

Called after everything is derived; looks at one complete configuration and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from headway.config.clusters import check_cluster
from headway.config.denoising import check_denoising
from headway.config.draft import Draft, value_at
from headway.config.resolved import Derived
from headway.config.strategies import SERVERS
from headway.config.transfer import check_transfer
from headway.errors import ConfigError

CORRECTED = frozenset({"ppo", "decoupled_ppo", "tis", "cispo", "topr", "kimi15", "gspo"})
"""Losses whose ratio is against the behaviour policy."""


def check(draft: Draft, derived: Derived) -> None:
    """Add every problem of the configuration to `draft.problems`."""
    _check_lengths(draft, derived)
    _check_headway(draft, derived)
    _check_groups(draft, derived)
    _check_sampling(draft, derived)
    _check_environments(draft)
    _check_algorithm(draft)
    _check_servers(draft, derived)
    _check_inflight(draft, derived)
    _check_models(draft, derived)
    _check_precision(draft)
    _check_lending(draft, derived)
    check_denoising(draft)
    check_transfer(draft, derived)
    check_cluster(draft, derived)


def _check_lending(draft: Draft, derived: Derived) -> None:
    shared = set(derived.devices["actor_train"]) & set(derived.devices["actor_infer"])
    if draft.config.lend_idle_trainer and shared:
        problem = f"actor_train and actor_infer have devices {sorted(shared)} both: there is nothing to lend"
        draft.refuse("lend_idle_trainer", problem, "a device_mapping of its own for each")


def _check_lengths(draft: Draft, derived: Derived) -> None:
    prompt, response, sequence = derived.prompt_length, derived.response_length, derived.sequence_length
    if prompt + response > sequence:
        problem = (
            f"prompt_length {prompt} + response_length {response} = {prompt + response} > sequence_length {sequence}"
        )
        draft.refuse("sequence_length", problem, f"at least {prompt + response}, or shorter parts")
    longest = draft.config.model_max_length
    if longest is not None and sequence > longest:
        draft.refuse("sequence_length", f"{sequence} > model_max_length {longest}", "what the model can hold")
    if derived.max_new_tokens > response:
        key = "actor_infer.generating_args.max_new_tokens"
        draft.refuse(key, f"{derived.max_new_tokens} > response_length {response}", "a turn is part of the response")
    held_out = draft.config.validation.generating_args.max_new_tokens
    if held_out is not None and held_out > response and held_out != derived.max_new_tokens:
        draft.refuse("validation.generating_args.max_new_tokens", f"{held_out} > response_length {response}")
    for tag, kind in draft.config.custom_envs.items():
        if kind.max_tokens_per_step is not None and kind.max_tokens_per_step > response:
            key = f"custom_envs.{tag}.max_tokens_per_step"
            draft.refuse(key, f"{kind.max_tokens_per_step} > response_length {response}")


def _check_headway(draft: Draft, derived: Derived) -> None:
    config = draft.config
    if derived.depth > derived.alpha:
        problem = f"{derived.depth:g} > async_generation_ratio {derived.alpha:g}"
        draft.refuse("pipeline_depth", problem, "groups started deeper than the bound would all be dropped")
    if config.staleness_policy == "window" and derived.staleness_window > derived.slots:
        slots = f"{derived.slots} slots = ⌊(1 + {derived.depth:g}) × {derived.groups_per_step}⌋"
        problem = f"{derived.staleness_window} groups > {slots}"
        draft.refuse("staleness_window", problem, "a window cannot look further than what is started")
    if config.staleness_policy != "window" and draft.given("staleness_window"):
        draft.refuse("staleness_window", f"is read only by staleness_policy: window, it is {config.staleness_policy}")
    weighted = config.train_infer_correction.is_weight.enabled
    free = config.flow is not None and config.flow.algorithm == "diffusion_nft"  # of log-probabilities altogether
    corrected = config.pg_variant in CORRECTED or weighted or free
    if derived.alpha > 0 and not corrected and not config.allow_uncorrected_async:
        draft.refuse(
            "pg_variant",
            f"has no off-policy correction, but async_generation_ratio = {derived.alpha:g} trains on old samples",
            f"one of {', '.join(sorted(CORRECTED))}; or train_infer_correction.is_weight.enabled; "
            "or allow_uncorrected_async: true",
        )


def _check_groups(draft: Draft, derived: Derived) -> None:
    config = draft.config
    answers = config.actor_infer.generating_args.num_return_sequences
    single = derived.pipeline == "agentic" and answers == 1
    if answers is not None and answers != derived.group_size and not single:
        key = "actor_infer.generating_args.num_return_sequences"
        draft.refuse(key, f"but the group size is {derived.group_size}", f"leave it out, or {derived.group_size}")
    seats = config.actor_infer.strategy_args.strategy_config.max_num_seqs
    if seats is not None and derived.members_started > seats * derived.replicas:
        draft.notes.append(
            f"a group starts {derived.members_started} members but the engines hold "
            f"{derived.replicas} replicas × {seats} requests = {seats * derived.replicas}: members will queue"
        )
    if derived.group_size == 1 and config.adv_estimator in ("rloo", "grpo", "gigpo"):
        if config.adv_estimator == "rloo":
            draft.refuse("adv_estimator", "compares members of a group, but the group size is 1", "at least 2 members")
        else:
            draft.notes.append(
                f"adv_estimator: {config.adv_estimator} with groups of one compares with the batch; "
                "set num_return_sequences_in_group or train_env_manager.group_size to compare within a group"
            )


def _check_sampling(draft: Draft, derived: Derived) -> None:
    """Members of a group that are drawn without chance are one answer several times."""
    sampling, base = draft.config.actor_infer.generating_args, "actor_infer.generating_args"
    if derived.pipeline == "generative" or derived.group_size == 1:
        return
    for key, greedy, usual in (("temperature", sampling.temperature == 0, "1"), ("top_k", sampling.top_k == 1, "0")):
        if greedy:
            problem = f"is greedy: the {derived.group_size} members of a group would be equal and teach nothing"
            hint = f"{usual} is usual; validation.generating_args.{key} may be greedy by itself"
            draft.refuse(f"{base}.{key}", problem, hint)


def _check_environments(draft: Draft) -> None:
    config = draft.config
    for name in ("train_env_manager", "val_env_manager"):
        manager = getattr(config, name)
        if manager is None:
            continue
        parts = manager.num_groups_partition
        if parts and len(parts) != len(manager.tags):
            problem = f"{len(parts)} parts for {len(manager.tags)} tags {list(manager.tags)}"
            draft.refuse(f"{name}.num_groups_partition", problem, "one part per tag")
        elif parts and manager.num_env_groups is not None and sum(parts) != manager.num_env_groups:
            problem = f"{' + '.join(map(str, parts))} = {sum(parts)}, but num_env_groups = {manager.num_env_groups}"
            draft.refuse(f"{name}.num_groups_partition", problem)
        missing = [tag for tag in manager.tags if config.custom_envs and tag not in config.custom_envs]
        if missing:
            draft.refuse(f"{name}.tags", f"{missing} are not in custom_envs", f"one of {', '.join(config.custom_envs)}")


def _check_algorithm(draft: Draft) -> None:
    config = draft.config
    if config.tis_lower_bound > config.tis_upper_bound:
        draft.refuse("tis_lower_bound", f"{config.tis_lower_bound:g} > tis_upper_bound {config.tis_upper_bound:g}")
    for index, one in enumerate(config.train_infer_correction.filters):
        if one.ratio_low > one.ratio_high:
            key = f"train_infer_correction.filters[{index}].ratio_low"
            draft.problems.append(ConfigError(f"> ratio_high {one.ratio_high:g}", key=key, value=one.ratio_low))


def _check_models(draft: Draft, derived: Derived) -> None:
    """Whoever serves the policy, or keeps how it began, has the model that is trained."""
    policy = draft.config.actor_train.model_args.model_name_or_path
    reasons = {"actor_infer": "engines serve the policy that is trained"}
    if derived.needs_reference:
        reasons["reference"] = "the reference is the policy of the start"
    for role, reason in reasons.items():
        key = f"{role}.model_args.model_name_or_path"
        name = value_at(draft.config, key)
        if policy is not None and name is not None and Path(name) != Path(policy):
            draft.refuse(key, f"{reason}, which is {policy}", "leave it out; pretrain is the model of all three")


def _check_precision(draft: Draft) -> None:
    if draft.config.actor_train.model_args.dtype == "fp16":
        problem = "small gradients vanish in it: there is no loss scaling, and fp32 would be trained instead"
        draft.refuse("actor_train.model_args.dtype", problem, "bf16 or fp32; actor_infer may have fp16")


def _check_inflight(draft: Draft, derived: Derived) -> None:
    """Our own engine keeps KV under new weights; those of others fill it anew, whatever is asked for."""
    foreign = derived.strategies.get("actor_infer") in SERVERS
    if draft.config.inflight_update == "recompute" and not foreign:
        problem = "the native engine goes on with the KV cache that a request has"
        draft.refuse("inflight_update", problem, "keep; vllm and sglang recompute in either case")
    elif draft.given("inflight_update") and draft.config.inflight_update == "keep" and foreign:
        draft.notes.append(
            f"inflight_update: {derived.strategies['actor_infer']} recomputes KV after an update, always"
        )


def _check_servers(draft: Draft, derived: Derived) -> None:
    name, sampling = derived.strategies.get("actor_infer"), draft.config.actor_infer.generating_args
    if name in SERVERS and derived.pipeline == "generative":
        hint = "leave url and launch out: pictures are made by our own engine"
        draft.refuse("actor_infer.strategy_args.strategy_name", "serves no pictures", hint)
    if name == "sglang" and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
        draft.notes.append(
            "actor_infer: SGLang's log-probabilities are those before top_p, top_k and min_p, so that the behaviour "
            "policy is said to be wider than what was drawn from"
        )
