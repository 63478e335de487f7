"""Checks relations between options after everything is derived, and changes nothing.

`check_config` refuses what cannot run, with the numbers that show why. `add_cautions` adds notes about what runs, but
perhaps not as the user expects. What depends on the machine is checked by `headway.launch`.
"""

from difflib import get_close_matches
from pathlib import Path

from headway.algorithm_traits import ADVANTAGE_TRAITS, LOSS_TRAITS
from headway.config.denoising_defaults import check_denoising
from headway.config.resolved_config import ConfigDraft, DerivedConfig, get_at_key
from headway.config.strategies import SERVER_STRATEGIES, uses_server
from headway.errors import ConfigError
from headway.registry import STAGES

_FILTER_ARGS = {
    "no_filter": (),
    "mean_filter": ("threshold_down", "threshold_up"),
    "std_filter": ("std_threshold",),
}
"""Arguments of the kinds of `query_filter_config`."""


def check_config(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Add every problem of the configuration to `draft.problems`."""
    _check_lengths(draft, derived)
    _check_headway(draft, derived)
    _check_groups(draft, derived)
    _check_sampling(draft, derived)
    _check_environments(draft)
    _check_group_filters(draft)
    _check_stages(draft)
    _check_algorithm(draft)
    _check_servers(draft, derived)
    _check_inflight(draft, derived)
    _check_models(draft, derived)
    _check_lending(draft, derived)
    check_denoising(draft)
    _check_transfer(draft, derived)
    _check_cluster(draft, derived)
    _note_idle_options(draft, derived)


def _note_idle_options(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Say which options that were given have no effect beside the others."""
    config, key = draft.config, "critic.device_mapping"
    if config.dual_clip_loss and not LOSS_TRAITS.get(config.pg_variant).reads_dual_clip:
        readers = " and ".join(name for name in LOSS_TRAITS.names() if LOSS_TRAITS.get(name).reads_dual_clip)
        draft.notes.append(f"dual_clip_loss: changes nothing with pg_variant: {config.pg_variant}; {readers} read it")
    if "turn" in config.list_sample_kinds() and not ADVANTAGE_TRAITS.get(config.adv_estimator).reads_turns:
        draft.notes.append(
            f"adv_estimator: {config.adv_estimator} gives every turn the reward of its episode; gigpo and "
            "step_reinforce compare turns"
        )
    if config.critic_warmup and not derived.needs_critic:
        reason = f"{config.adv_estimator} has no critic"
        draft.notes.append(f"critic_warmup: changes nothing with adv_estimator: {config.adv_estimator}; {reason}")
    if draft.given(key) and not derived.needs_critic:
        draft.notes.append(f"{key}: changes nothing with adv_estimator: {config.adv_estimator}, which has no critic")
    critic, train = derived.devices["critic"], derived.devices["actor_train"]
    if draft.given(key) and derived.needs_critic and critic != train and set(critic) & set(train):
        draft.notes.append(f"{key}: changes nothing here; it shares devices with actor_train, and stays with it")


def _check_lending(draft: ConfigDraft, derived: DerivedConfig) -> None:
    shared = set(derived.devices["actor_train"]) & set(derived.devices["actor_infer"])
    if draft.config.lend_idle_trainer and shared:
        problem = f"actor_train and actor_infer have devices {sorted(shared)} both: there is nothing to lend"
        draft.refuse("lend_idle_trainer", problem, "a device_mapping of its own for each")


def _check_stages(draft: ConfigDraft) -> None:
    """Refuse stages that no plugin registered, that are listed twice, or that stand behind a stage not there."""
    built_in = [name for name in STAGES.built_in if name != "param_update"]
    before = list(built_in)
    for index, stage in enumerate(draft.config.stages):
        if stage.name not in STAGES or stage.name in STAGES.built_in:
            names = [name for name in STAGES.names() if name not in STAGES.built_in]
            close = [f"did you mean {near}? " for near in get_close_matches(stage.name, names, 1)]
            hint = "".join(close) + f"one of {', '.join(names)}" if names else "plugins: [a module that registers it]"
            problem, key = "no plugin registered a stage of this name", f"stages[{index}].name"
            draft.problems.append(ConfigError(problem, key=key, value=stage.name, hint=hint))
        if stage.after not in before:
            problem, key, hint = "there is no such stage", f"stages[{index}].after", f"one of {', '.join(before)}"
            draft.problems.append(ConfigError(problem, key=key, value=stage.after, hint=hint))
        if stage.name in before[len(built_in) :]:
            problem, hint = "stands in the list already", "register the class under a second name"
            draft.problems.append(ConfigError(problem, key=f"stages[{index}].name", value=stage.name, hint=hint))
        before.append(stage.name)


def _check_lengths(draft: ConfigDraft, derived: DerivedConfig) -> None:
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


def _check_headway(draft: ConfigDraft, derived: DerivedConfig) -> None:
    config = draft.config
    if derived.pipeline_depth > derived.async_generation_ratio:
        problem = f"{derived.pipeline_depth:g} > async_generation_ratio {derived.async_generation_ratio:g}"
        draft.refuse("pipeline_depth", problem, "rollout would start more groups than the bound lets it train")
    if config.updates_per_sync - 1 > derived.pipeline_depth:
        older = config.updates_per_sync - 1
        problem = f"the last of {config.updates_per_sync} steps trains samples of weights that are {older} older"
        hint = f"async_generation_ratio and pipeline_depth of at least {older}"
        draft.refuse("updates_per_sync", f"{problem}, but pipeline_depth is {derived.pipeline_depth:g}", hint)
    if config.staleness_policy == "window" and derived.staleness_window > derived.slots:
        slots = f"{derived.slots} slots = ⌊(1 + {derived.pipeline_depth:g}) × {derived.groups_per_step}⌋"
        problem = f"{derived.staleness_window} groups > {slots}"
        draft.refuse("staleness_window", problem, "a window cannot look further than what is started")
    if config.staleness_policy in ("drop", "wait") and draft.given("staleness_window"):
        draft.refuse("staleness_window", f"is read only by staleness_policy: window, it is {config.staleness_policy}")
    weighted = config.train_infer_correction.is_weight.enabled
    uses_no_logps = config.denoising is not None and config.denoising.algorithm == "diffusion_nft"
    corrected = LOSS_TRAITS.get(config.pg_variant).corrects_off_policy or weighted or uses_no_logps
    if derived.async_generation_ratio > 0 and not corrected and not config.allow_uncorrected_async:
        corrected_losses = [name for name in LOSS_TRAITS.names() if LOSS_TRAITS.get(name).corrects_off_policy]
        draft.refuse(
            "pg_variant",
            f"has no off-policy correction, but async_generation_ratio = {config.async_generation_ratio:g} trains on "
            "old samples",
            f"one of {', '.join(sorted(corrected_losses))}; or train_infer_correction.is_weight.enabled; "
            "or allow_uncorrected_async: true",
        )


def _check_groups(draft: ConfigDraft, derived: DerivedConfig) -> None:
    config = draft.config
    answers = config.actor_infer.generating_args.num_return_sequences
    single = derived.pipeline == "agentic" and answers == 1
    greedy = int(ADVANTAGE_TRAITS.get(config.adv_estimator).needs_greedy_member)
    if greedy and derived.members_started > derived.group_size:
        problem = f"but adv_estimator {config.adv_estimator} waits for the greedy answer of every group"
        draft.refuse("num_return_sequences_redundancy", problem, "0")
    if answers is not None and answers not in (derived.group_size, derived.group_size - greedy) and not single:
        key = "actor_infer.generating_args.num_return_sequences"
        draft.refuse(key, f"but the group size is {derived.group_size}", f"leave it out, or {derived.group_size}")
    seats = config.actor_infer.strategy_args.strategy_config.max_num_seqs
    if seats is not None and derived.members_started > seats * derived.replicas:
        draft.notes.append(
            f"a group starts {derived.members_started} members but the engines hold "
            f"{derived.replicas} replicas × {seats} requests = {seats * derived.replicas}: members will queue"
        )
    estimator = ADVANTAGE_TRAITS.get(config.adv_estimator)
    size_key = "train_env_manager.group_size" if derived.pipeline == "agentic" else "num_return_sequences_in_group"
    if derived.group_size == 1 and estimator.needs_several_members:
        draft.refuse(
            "adv_estimator", "needs groups of several members, but the group size is 1", f"{size_key}: 2 or more"
        )
    elif derived.group_size == 1 and estimator.compares_group_members and derived.norm_mean_type != "none":
        compares = f"{config.adv_estimator} with groups of one compares with the batch"
        draft.notes.append(f"adv_estimator: {compares}; set {size_key} to compare within a group")


def _check_sampling(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Refuse greedy sampling of groups, whose members would all be the same answer."""
    sampling, base = draft.config.actor_infer.generating_args, "actor_infer.generating_args"
    if derived.pipeline == "denoising" or derived.group_size == 1:
        return
    for key, greedy, usual in (("temperature", sampling.temperature == 0, "1"), ("top_k", sampling.top_k == 1, "0")):
        if greedy:
            problem = f"is greedy: the {derived.group_size} members of a group would be equal and teach nothing"
            hint = f"{usual} is usual; validation.generating_args.{key} may be greedy by itself"
            draft.refuse(f"{base}.{key}", problem, hint)


def _check_environments(draft: ConfigDraft) -> None:
    config = draft.config
    for name, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
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
    if len(config.list_sample_kinds()) > 1:
        problem = "some of them have sample: turn and others sample: episode"
        draft.refuse("train_env_manager.tags", problem, "one kind of sample for all tags of a run")


def _check_group_filters(draft: ConfigDraft) -> None:
    for name, reward in draft.config.rewards.items():
        key, chosen = f"rewards.{name}.query_filter_config", reward.query_filter_config
        unknown = [one for one in chosen.filter_args if one not in _FILTER_ARGS[chosen.type]]
        if unknown:
            expected = f"expected {', '.join(_FILTER_ARGS[chosen.type]) or 'none'}"
            problem = f"{chosen.type} does not read {', '.join(unknown)}"
            draft.problems.append(
                ConfigError(problem, key=f"{key}.filter_args", value=dict(chosen.filter_args), hint=expected)
            )


def _check_algorithm(draft: ConfigDraft) -> None:
    config = draft.config
    if config.tis_lower_bound > config.tis_upper_bound:
        draft.refuse("tis_lower_bound", f"{config.tis_lower_bound:g} > tis_upper_bound {config.tis_upper_bound:g}")
    if config.clip_cov_low >= config.clip_cov_high:
        draft.refuse("clip_cov_low", f"{config.clip_cov_low:g} ≥ clip_cov_high {config.clip_cov_high:g}")
    low, high = config.normalized_reward_low, config.normalized_reward_high
    if low is not None and high is not None and low >= high:
        draft.refuse("normalized_reward_low", f"{low:g} ≥ normalized_reward_high {high:g}")
    for index, ratio in enumerate(config.train_infer_correction.filters):
        if ratio.measure == "ratio" and ratio.ratio_low > ratio.ratio_high:
            key = f"train_infer_correction.filters[{index}].ratio_low"
            draft.problems.append(ConfigError(f"> ratio_high {ratio.ratio_high:g}", key=key, value=ratio.ratio_low))
        if ratio.diff_low is not None and ratio.diff_high is not None and ratio.diff_low > ratio.diff_high:
            key = f"train_infer_correction.filters[{index}].diff_low"
            draft.problems.append(ConfigError(f"> diff_high {ratio.diff_high:g}", key=key, value=ratio.diff_low))
    trained = config.actor_train.model_args
    if trained.quantization is not None and trained.lora_rank is None:
        draft.refuse("actor_train.model_args.quantization", "weights in 4 bits are not trained", "with lora_rank")
    if config.actor_train.model_args.dtype == "fp16":
        problem = "small gradients vanish in it: there is no loss scaling, and fp32 would be trained instead"
        draft.refuse("actor_train.model_args.dtype", problem, "bf16 or fp32; actor_infer may have fp16")
    infer = config.actor_infer
    for name in ("dtype", "kv_cache_dtype"):
        if getattr(infer.model_args, name) == "fp8" and (reason := _find_fp8_problem(draft)):
            draft.refuse(f"actor_infer.model_args.{name}", reason, "bf16" if name == "dtype" else "auto")
    if infer.model_args.kv_cache_dtype == "fp8" and infer.model_args.dtype in ("fp16", "fp32"):
        problem = "goes with weights in bf16 or fp8"
        draft.refuse("actor_infer.model_args.kv_cache_dtype", problem, "actor_infer.model_args.dtype: bf16")


def _find_fp8_problem(draft: ConfigDraft) -> str | None:
    """Return why the engines of this run have no 8 bits; None if they may."""
    config = draft.config
    if uses_server(config.actor_infer.strategy_args.strategy_config):
        return "is an option of the native engine; servers quantize by their own server_args"
    if config.denoising is not None:
        return "engines of denoising models do not have it"
    return "CPUs do not multiply it" if config.device == "cpu" else None


def _check_models(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Refuse a served model or a reference model other than the one that is trained."""
    policy = draft.config.actor_train.model_args.model_name_or_path
    reasons = {"actor_infer": "engines serve the policy that is trained"}
    if derived.needs_reference:
        reasons["reference"] = "the reference is the initial policy"
    for role, reason in reasons.items():
        key = f"{role}.model_args.model_name_or_path"
        name = get_at_key(draft.config, key)
        if policy is not None and name is not None and Path(name) != Path(policy):
            draft.refuse(key, f"{reason}, which is {policy}", "leave it out; pretrain is the model of all three")


def _check_inflight(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Compare the wish with what engines do: the native one keeps its KV cache, vLLM and SGLang recompute it."""
    recomputes = derived.strategies.get("actor_infer") in SERVER_STRATEGIES
    if draft.config.inflight_update == "recompute" and not recomputes:
        problem = "the native engine goes on with the KV cache that a request has"
        draft.refuse("inflight_update", problem, "keep; vllm and sglang recompute in either case")
    elif draft.given("inflight_update") and draft.config.inflight_update == "keep" and recomputes:
        draft.notes.append(
            f"inflight_update: {derived.strategies['actor_infer']} recomputes KV after an update, always"
        )


def _check_servers(draft: ConfigDraft, derived: DerivedConfig) -> None:
    name, sampling = derived.strategies.get("actor_infer"), draft.config.actor_infer.generating_args
    if name in SERVER_STRATEGIES and derived.pipeline == "denoising":
        hint = "leave url and launch out: Headway's own engine makes images"
        draft.refuse("actor_infer.strategy_args.strategy_name", "serves no images", hint)
    options = {
        option.replace("-", "_") for option in draft.config.actor_infer.strategy_args.strategy_config.server_args
    }
    if name in SERVER_STRATEGIES and options & {"quantization", "kv_cache_dtype"}:
        draft.notes.append(
            f"actor_infer: {name} computes in fewer bits than the trainer; its log-probabilities are those of what it "
            "draws from, and pg_variant: tis corrects the difference"
        )
    if name in SERVER_STRATEGIES and options & {"enable_lora", "lora_modules", "lora_paths"}:
        hint = "leave it out: adapters travel merged into the weights (actor_train.model_args.lora_rank)"
        draft.refuse("actor_infer.strategy_args.strategy_config.server_args", "a run serves one policy", hint)
    if name == "sglang" and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
        draft.notes.append(
            "actor_infer: SGLang's log-probabilities are those before top_p, top_k and min_p, so that the behaviour "
            "policy is said to be wider than what was drawn from"
        )


_WITHIN_MACHINE = ("shared_memory", "cuda_ipc")
"""Transports that do not reach another machine."""
_TRANSFER = "weight_transfer"
_TRANSPORT_OPTIONS = {"directory": "disk", "address": "broadcast", "backend": "broadcast", "timeout_s": "broadcast"}
"""Options that one transport alone reads."""
_SERVER_TRANSPORTS = ("auto", "shared_memory", "disk", "cuda_ipc", "broadcast")


def _check_cluster(draft: ConfigDraft, derived: DerivedConfig) -> None:
    config, cluster = draft.config, draft.config.cluster
    transport = config.weight_transfer.transport
    if cluster.kind == "local":
        for name, value in (("address", cluster.address), ("runtime_env", cluster.runtime_env)):
            if value:
                draft.refuse(f"cluster.{name}", "is read only by cluster.kind: ray, it is local")
        if transport == "object_store":
            draft.refuse("weight_transfer.transport", "is Ray's, and cluster.kind is local", "cluster.kind: ray")
        return
    if config.processes is False:
        draft.refuse("processes", "is false, but trainer and engines on Ray are processes", "true, or leave it out")
    if transport in _WITHIN_MACHINE:
        problem = "does not reach another machine of the Ray cluster"
        draft.refuse("weight_transfer.transport", problem, "auto, object_store, disk or broadcast")
    if derived.strategies.get("actor_infer") in SERVER_STRATEGIES:
        problem = "servers are not started on Ray, nor given weights from there"
        draft.refuse("cluster.kind", problem, "local, or the strategy of our own engines")


def _check_transfer(draft: ConfigDraft, derived: DerivedConfig) -> None:
    transfer = draft.config.weight_transfer
    for name, transport in _TRANSPORT_OPTIONS.items():
        if get_at_key(transfer, name) is not None and transfer.transport != transport:
            draft.refuse(f"{_TRANSFER}.{name}", f"is read only by transport: {transport}, it is {transfer.transport}")
    if draft.config.processes is False and transfer.transport != "auto":
        problem = "processes is false, and inside one process weights are handed over"
        draft.refuse(f"{_TRANSFER}.transport", problem, "auto; or processes: true")
    if transfer.delta and (draft.config.processes is False or transfer.transport == "cuda_ipc"):
        why = "processes is false" if draft.config.processes is False else "transport is cuda_ipc"
        draft.refuse(f"{_TRANSFER}.delta", f"{why}: nothing travels that could be left out", "false")
    if derived.strategies.get("actor_infer") in SERVER_STRATEGIES:
        if transfer.transport not in _SERVER_TRANSPORTS:
            problem = "does not reach vLLM or SGLang"
            draft.refuse(f"{_TRANSFER}.transport", problem, f"one of {', '.join(_SERVER_TRANSPORTS)}")
        if transfer.delta:
            draft.refuse(f"{_TRANSFER}.delta", "servers load whole directories", "false")
        if transfer.transport == "broadcast" and not draft.config.actor_infer.strategy_args.strategy_config.in_process:
            draft.notes.append(f"{_TRANSFER}.transport: broadcast does not reach servers over HTTP, which load files")


def add_cautions(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Add notes on what runs, but perhaps not as the user expects. Each subject is one line."""
    _note_truncated_sampling(draft, derived)
    weighted = draft.config.pg_variant == "decoupled_ppo" and draft.config.decoupled_weight_type != "none"
    if weighted and draft.config.train_infer_correction.is_weight.enabled:
        draft.notes.append(
            "train_infer_correction.is_weight: decoupled_ppo has the weight exp(ℓ_p − ℓ_b) already, and is weighted by "
            "it twice; leave one of them out"
        )


def _note_truncated_sampling(draft: ConfigDraft, derived: DerivedConfig) -> None:
    """Note that truncated sampling shifts the ratio between trainer and engine.

    Engines report the probability of an action among those left to draw from, the trainer among all. The ratio of the
    two is the share that was left: at least `top_p`, and unknown with `top_k` or `min_p`.
    """
    config, sampling = draft.config, draft.config.actor_infer.generating_args
    if derived.pipeline == "denoising" or derived.strategies.get("actor_infer") == "sglang":
        return  # denoising draws no tokens, and SGLang reports probabilities among all actions
    unknown = sampling.top_k > 0 or sampling.min_p > 0
    outside = sampling.top_p < 1 - derived.pg_clip_low
    if (config.pg_variant == "ppo" and outside) or (config.pg_variant == "gspo" and (outside or unknown)):
        draft.notes.append(
            f"pg_variant: {config.pg_variant} with top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p "
            f"{sampling.min_p:g}: the engine's log-probabilities are of what was left to draw from, the trainer's of "
            f"all actions, so that ratios are below 1 on policy too; below 1 − {derived.pg_clip_low:g} (pg_clip_low) "
            "negative advantages have no gradient. top_p 1, top_k 0 and min_p 0 have none of this"
        )
