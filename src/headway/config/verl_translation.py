"""Translates what several keys of verl say together, before single keys are translated by their table.

Devices of trainer and rollout, asynchrony, how long prompts are treated, the warm-up, rewards, the correction of the
mismatch between engine and trainer. A value that follows from such keys gives way to one of our own keys.
"""

from importlib.util import find_spec
from typing import Any

from headway.config.dialect_recognition import is_vision_model
from headway.config.document import ConfigEntries, ConfigEntry, join_key
from headway.config.foreign_entries import ForeignEntries
from headway.config.launch_arguments import LaunchArguments
from headway.config.verl_algorithm import translate_verl_algorithm
from headway.config.verl_reward_translation import REWARD_MODELS, find_own_manager, translate_verl_rewards
from headway.config.verl_tool_translation import find_missing_loop, translate_verl_tools
from headway.errors import ConfigError

_ROLLOUT, _ACTOR, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
_MINI_BATCH, _STEPS = f"{_ACTOR}.ppo_mini_batch_size", "trainer.total_training_steps"
_FUNCTION = "custom_reward_function.path"
_NODE = 8
_TRACKERS = {name: name for name in ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")} | {"file": "jsonl"}
"""Loggers of verl and our trackers."""
_LORA_ALPHA = 16
_OLD_CAP, _OLD_LEVELS = "algorithm.rollout_is_threshold", {name: name for name in ("token", "sequence", "geometric")}
_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Layers of Megatron and the layers of transformers that they are made of."""
_OTHER_TRAINERS = ("veomni", "torchtitan", "automodel", "mindspeed")


def find_missing_feature(entries: ConfigEntries) -> ConfigError | None:
    """Return the problem of a command line that asks for a kind of rollout or reward that is not offered."""
    values = {join_key(path): entry.value for path, entry in entries.items()}
    model = str(values.get(f"{_MODEL}.path") or "")
    for key in ("data.image_key", "data.video_key", "data.audio_key"):
        if values.get(key):
            return _refuse(key, values[key], "vision and audio in prompts")
    tools = str(values.get(f"{_ROLLOUT}.multi_turn.tool_config_path") or "")
    if any(word in tools for word in ("image", "geo3k")):
        return _refuse(f"{_ROLLOUT}.multi_turn.tool_config_path", tools, "tools that show pictures")
    if is_vision_model(model):
        return _refuse(f"{_MODEL}.path", model, "vision-language models")
    for section in ("", ".fsdp_config", ".megatron", ".veomni"):
        if values.get(key := f"{_ACTOR}{section}.qat.enable") is True:
            return _refuse(key, True, "training of quantized weights (QAT)")
    if values.get(f"{_ROLLOUT}.name") == "vllm_omni":
        alternative = "GeRL's command lines with rollout.name=diffusers are read"
        return _refuse(f"{_ROLLOUT}.name", "vllm_omni", "pictures by vLLM-Omni", alternative)
    if (manager := find_own_manager(values)) is not None:
        return _refuse(*manager, "a reward manager of your own", "rewards.<domain>.reward_fn: module:function")
    for key in REWARD_MODELS:
        if values.get(f"{key}.enable") is True and any(values.get(f"{root}{_FUNCTION}") for root in ("", "reward.")):
            alternative = "rewards.<domain>.reward_fn: judge asks a model, served here or behind a URL"
            return _refuse(f"{key}.enable", True, "a function that asks verl's own reward model", alternative)
    if (loop := find_missing_loop(values)) is not None:
        return _refuse(*loop)
    if any(path[0] == "env" for path in entries):
        return _refuse("env", "…", "robots and their simulators")
    return None


def _refuse(key: str, value: Any, feature: str, hint: str = "") -> ConfigError:
    return ConfigError(f"asks for {feature}, not offered here", key=key, value=value, hint=hint)


def translate_verl(
    entries: ConfigEntries, launch: LaunchArguments, notes: list[str], problems: list[ConfigError]
) -> ConfigEntries:
    """Return the entries with joint keys of verl replaced by ours."""
    given = ForeignEntries(entries, notes, problems)
    _translate_trainer_mode(given)
    _translate_fully_async(given, launch)
    _translate_pools(given)
    for key, others, ours in (
        (f"{_ROLLOUT}.name", ("trtllm",), "native"),
        (f"{_ACTOR}.strategy", _OTHER_TRAINERS, "fsdp2"),
    ):
        if (name := given.get(key)) in others:
            given.entries[tuple(key.split("."))] = ConfigEntry(ours, f"translated from {key}: {name}")
            given.notes.append(f"{key}: {name} is not in this build, {ours} is used instead")
    _check_kl_control(given)
    _translate_correction(given)
    translate_verl_algorithm(given)
    _translate_long_prompts(given)
    _translate_adapters(given)
    translate_verl_rewards(given)
    if given.get(f"{_ROLLOUT}.name") != "diffusers":
        _choose_mini_batch(given)
    translate_verl_tools(given, launch)
    _note_clip(given)
    _translate_epochs(given)
    _translate_trackers(given)
    if isinstance(name := given.get("trainer.experiment_name"), str) and (name := name.replace("/", "-").strip(". ")):
        given.give("output_dir", f"./output/{name}", "trainer.experiment_name")  # one directory for each, as there
    for role, key in (("actor_train", _ACTOR), ("critic", "critic")):
        _translate_warmup(given, role, key)
        _translate_optimizer(given, role, key)
    return given.entries


def _translate_trainer_mode(given: ForeignEntries) -> None:
    """Translate the newer trainer, whose mode says how far rollout runs ahead and on which devices."""
    base = "trainer.v1"
    mode = given.take(f"{base}.trainer_mode")
    if mode == "fully_async":
        for theirs, key in (("staleness_threshold",) * 2, ("parameter_sync_step", "trigger_parameter_sync_step")):
            if (entry := given.entries.pop(("trainer", "v1", mode, theirs), None)) is not None:
                given.entries[("async_training", key)] = entry
    elif mode in ("colocate_async", "separate_async"):
        batches = given.take_number(f"{base}.{mode}.num_warmup_batches", 1, 0)
        most = given.take_number(f"{base}.sampler.max_off_policy_threshold", 8, 0)
        given.give("async_generation_ratio", min(batches, most), f"{base}.{mode}.num_warmup_batches")
        if mode == "separate_async":
            given.take("actor_rollout_ref.hybrid_engine")
            given.give("hybrid_engine", False, f"{base}.trainer_mode")
            if given.take(f"{base}.{mode}.hybrid_rollout.enable_switch") is True:
                given.give("lend_idle_trainer", True, f"{base}.{mode}.hybrid_rollout.enable_switch")
        elif batches:
            note = "rollout has devices of its own here, since it goes on while training runs"
            given.notes.append(f"{base}.trainer_mode: {note}")
    elif mode not in (None, "sync"):
        hint = "sync, colocate_async, separate_async, fully_async"
        given.problems.append(ConfigError("is not known", key=f"{base}.trainer_mode", value=mode, hint=hint))


def _translate_fully_async(given: ForeignEntries, launch: LaunchArguments) -> None:
    """Translate the streaming trainer: k updates of `require_batches` mini-batches between two weight syncs.

    Rollout may have (1 + staleness_threshold) · k batches under way, which are 1 + pipeline_depth batches here.
    """
    base = "async_training"
    if not launch.is_fully_async and not given.has_below(base):
        return
    staleness = given.take_number(f"{base}.staleness_threshold", 0.1, 0)
    updates = int(given.take_number(f"{base}.trigger_parameter_sync_step", 4, 1))
    batches = int(given.take_number(f"{base}.require_batches", 1, 1))
    mini_batch = given.get(_MINI_BATCH) or 256
    batch = batches * mini_batch if isinstance(mini_batch, int) else 1
    given.take("data.train_batch_size")
    given.give("rollout_batch_size", batch, f"{base}.require_batches × {_MINI_BATCH}")
    given.give("updates_per_sync", updates, f"{base}.trigger_parameter_sync_step")
    ahead = round((1 + staleness) * updates - 1, 6)
    given.give("async_generation_ratio", ahead, f"(1 + {base}.staleness_threshold) × trigger_parameter_sync_step − 1")
    given.give("hybrid_engine", False, base)
    if (total := given.take_number("rollout.total_rollout_steps", 0, 0)) and given.get(_STEPS) is None:
        given.give("max_steps", max(1, int(total // batch)), f"rollout.total_rollout_steps / {batch} prompts")
    if "test_freq" in {path[-1] for path in given.entries if path[0] == "rollout"}:
        frequency = given.take_number("rollout.test_freq", 0, -1)
        given.take("trainer.test_freq")
        given.give("eval_steps", int(max(0, frequency) * updates), "rollout.test_freq × trigger_parameter_sync_step")
    if given.take(f"{base}.partial_rollout") is False:
        given.notes.append(f"{base}.partial_rollout: requests in flight go on with the new weights, as with true")
    if given.take(f"{base}.use_rollout_log_probs") is False:
        given.notes.append(f"{base}.use_rollout_log_probs: the engine's are used; pg_variant: decoupled_ppo has both")


def _translate_pools(given: ForeignEntries) -> None:
    """Translate devices that rollout has beside those of the trainer."""
    sources = ("rollout", _ROLLOUT)
    rollout = next((root for root in sources if given.get(f"{root}.n_gpus_per_node")), None)
    if rollout is None or given.get("actor_rollout_ref.hybrid_engine") is True:
        for root in sources:
            given.take(f"{root}.nnodes"), given.take(f"{root}.n_gpus_per_node")
        return
    actor = f"{_ACTOR}.n_gpus_per_node"
    trainer = _ACTOR if given.get(actor) else "trainer"
    sizes = [int(given.take_number(f"{root}.n_gpus_per_node", _NODE, 1, 1024)) for root in (trainer, rollout)]
    nodes = [int(given.take_number(f"{root}.nnodes", 1, 1, 1000)) for root in (trainer, rollout)]
    for root in ("trainer", _ACTOR, *sources):
        given.take(f"{root}.nnodes"), given.take(f"{root}.n_gpus_per_node")
    train, infer = (size * count for size, count in zip(sizes, nodes, strict=True))
    together = nodes[0] == nodes[1] and sum(sizes) <= _NODE
    per_node = sum(sizes) if together else max(sizes)
    why = f"{trainer} and {rollout}, nnodes × n_gpus_per_node"
    given.give("actor_train.device_mapping", list(range(train)), why)
    given.give("actor_infer.device_mapping", list(range(train, train + infer)), why)
    given.give("num_gpus_per_node", per_node, why)
    given.give("num_nodes", -(-(train + infer) // per_node), why)


def _choose_mini_batch(given: ForeignEntries) -> None:
    """Take 256 prompts for an optimizer step that has no size, as verl does, where they divide the batch."""
    batch = given.get("data.train_batch_size")
    batch = batch if isinstance(batch, int) else 1024
    if given.get(_MINI_BATCH) is None and given.get(f"{_MODEL}.path") is not None and batch % 256 == 0 < batch:
        given.entries[tuple(_MINI_BATCH.split("."))] = ConfigEntry(256, "default of verl")


def _check_kl_control(given: ForeignEntries) -> None:
    kind, base = given.get("algorithm.kl_ctrl.type"), "algorithm.kl_ctrl"
    if kind == "adaptive" and given.get(f"{base}.target_kl") is None:
        problem, hint = "needs a target", f"{base}.target_kl, which is 0.1 in verl's own file"
        given.problems.append(ConfigError(problem, key=f"{base}.type", value=kind, hint=hint))


def _translate_correction(given: ForeignEntries) -> None:
    """Translate the weight exp(recomputed − engine) and the masks on it; in bypass mode nothing is recomputed."""
    base, loss = "algorithm.rollout_correction", f"{_ACTOR}.policy_loss.loss_mode"
    weight, has_cap = given.take(f"{base}.rollout_is"), given.get(f"{base}.rollout_is_threshold") is not None
    cap = given.take_number(f"{base}.rollout_is_threshold", 2.0, 0)
    masks, bounds = given.take(f"{base}.rollout_rs"), given.take(f"{base}.rollout_rs_threshold")
    lower = given.take(f"{base}.rollout_rs_threshold_lower")
    bypass = given.take(f"{base}.bypass_mode") is True or given.get(loss) == "bypass_mode"
    kind, normalize = given.take(f"{base}.loss_type"), given.take(f"{base}.rollout_is_batch_normalize")
    given.take("async_training.compute_prox_log_prob")
    if given.take("algorithm.rollout_is") is True:  # names of 2025
        weight, cap = given.take("algorithm.rollout_is_level") or "token", given.take_number(_OLD_CAP, cap, 0)
    if (old := given.take_number(f"{_ACTOR}.tis_imp_ratio_cap", -1, -1)) > 0:
        weight, cap = "token", old
    if normalize and not weight:
        given.notes.append(f"{base}.rollout_is_batch_normalize: changes nothing without rollout_is, as in verl")
    if has_cap and not weight:
        given.notes.append(f"{base}.rollout_is_threshold: changes nothing without rollout_is, as in verl")
    if weight not in (None, "token", "sequence", "geometric"):
        given.problems.append(
            ConfigError("is not known", key=f"{base}.rollout_is", value=weight, hint="token, sequence")
        )
    elif given.get(loss) not in (None, "vanilla", "bypass_mode"):
        if weight:
            note = f"changes nothing with {given.get(loss)}, whose ratio is to the engine's log-probabilities already"
            given.notes.append(f"{base}.rollout_is: {note}")
    elif bypass:
        _translate_bypass(given, weight, cap, normalize, is_reinforce=kind == "reinforce")
    elif weight:
        given.take(loss)
        given.give("pg_variant", "decoupled_ppo", f"{base}.rollout_is")
        given.give("decoupled_weight_type", "none" if normalize else weight, f"{base}.rollout_is")
        if normalize:
            _give_weight(given, weight, cap, normalize)
        else:
            given.give("decoupled_weight_cap", cap, f"{base}.rollout_is_threshold")
    if masks:
        _translate_masks(given, base, str(masks).strip("'\""), str(bounds).strip("'\""), lower)


def _give_weight(given: ForeignEntries, weight: str, cap: float, normalize: Any) -> None:
    """Put a weight around the loss; `normalize` divides it by its mean over the batch."""
    base, ours = "algorithm.rollout_correction", "train_infer_correction.is_weight"
    given.give(f"{ours}.enabled", True, f"{base}.rollout_is")
    given.give(f"{ours}.weight_type", weight, f"{base}.rollout_is")
    given.give(f"{ours}.upper_bound", cap, f"{base}.rollout_is_threshold")
    if normalize:
        given.give(f"{ours}.batch_normalize", normalize, f"{base}.rollout_is_batch_normalize")


def _translate_bypass(
    given: ForeignEntries, weight: str | None, cap: float, normalize: Any, *, is_reinforce: bool
) -> None:
    """Translate losses whose ratio is to the engine's log-probabilities: PPO's own, or a weighted REINFORCE."""
    base = "algorithm.rollout_correction"
    given.take(f"{_ACTOR}.policy_loss.loss_mode")
    if not is_reinforce:
        if weight:
            given.notes.append(f"{base}.rollout_is: changes nothing with bypass_mode, whose loss clips that ratio")
        return
    is_plain = weight == "token" and not normalize
    given.give("pg_variant", "tis" if is_plain else "vanilla", f"{base}.loss_type: reinforce")
    if is_plain:
        given.give("tis_upper_bound", cap, f"{base}.rollout_is_threshold")
    elif weight:
        _give_weight(given, weight, cap, normalize)


def _translate_masks(given: ForeignEntries, base: str, masks: str, bounds: str, lower: Any) -> None:
    """Translate masks: `seq_mean_k3` bounds the mean of k3; k1 bounds engine over trainer, the inverse of ours."""
    levels = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "largest"}
    names = [name.strip() for name in masks.split(",")]
    given_bounds = [bound.strip() for bound in bounds.split(",")]
    filters, unknown = [], []
    for name, bound in zip(names, given_bounds * (len(names) if len(given_bounds) == 1 else 1), strict=False):
        level, _, measure = name.rpartition("_")
        low, _, high = bound.partition("_")
        try:
            upper = float(high or low)
            if measure in ("k2", "k3"):
                filters.append({"agg_type": levels[level], "measure": measure, "ratio_high": upper})
                continue
            below = float(low) if high else float(lower) if lower is not None else 1 / upper
            if measure == "k1":
                below, upper = 1 / upper, 1 / below
            agg_type = levels[level] if measure == "k1" else _OLD_LEVELS[name]
            filters.append({"agg_type": agg_type, "ratio_low": below, "ratio_high": upper})
        except (KeyError, ValueError, ZeroDivisionError):
            unknown.append(name)
    if filters:
        given.give("train_infer_correction.filters", filters, f"{base}.rollout_rs")
    if unknown:
        known = "token, seq_sum, seq_mean and seq_max with k1, k2 and k3 are"
        given.notes.append(f"{base}.rollout_rs: {', '.join(unknown)} changes nothing here; {known} known")


def _translate_long_prompts(given: ForeignEntries) -> None:
    """Translate whether prompts over the length are left out, cut or refused; verl refuses them unless told."""
    cut, keys = given.take("data.truncation"), ("actor_train.data_args.too_long", "validation.data_args.too_long")
    drop = given.take("data.filter_overlong_prompts")
    if cut in ("right", "middle") and not drop:
        given.notes.append(f"data.truncation: {cut} is not offered; the beginning of a long prompt is cut, as by left")
    choice = "drop" if drop is True else "error" if cut in (None, "error") else "truncate"
    if cut is not None or drop is not None:
        for key in keys:
            given.give(key, choice, "data.filter_overlong_prompts" if drop is True else "data.truncation")


def _translate_adapters(given: ForeignEntries) -> None:
    rank, base = given.get(f"{_MODEL}.lora_rank"), "actor_train.model_args"
    if rank is None and (rank := given.take(f"{_MODEL}.lora.rank")) is not None and rank != 0:
        given.give(f"{base}.lora_rank", rank, f"{_MODEL}.lora.rank")
    if (alpha := given.take(f"{_MODEL}.lora.alpha")) and rank:
        given.give(f"{base}.lora_alpha", alpha, f"{_MODEL}.lora.alpha")
    targets, layers = given.take(f"{_MODEL}.target_modules"), given.take(f"{_MODEL}.lora.target_modules")
    if isinstance(layers, list) and not {*map(str, layers)} >= _MEGATRON_LAYERS.keys():  # all of them are the default
        targets = [ours for name in layers for ours in _MEGATRON_LAYERS.get(str(name), (str(name),))]
    if not rank:
        for key in ("lora_rank", "lora_alpha"):
            given.take(f"{_MODEL}.{key}")
            if rank == 0:  # off, whatever the default is
                given.give(f"{base}.{key}", None, f"{_MODEL}.lora_rank: 0")
        return
    if alpha is None and given.get(f"{_MODEL}.lora_alpha") is None:
        given.give_default(f"{base}.lora_alpha", _LORA_ALPHA, "verl")
    if targets:
        given.give(f"{base}.lora_target", targets, f"{_MODEL}.target_modules")


def _note_clip(given: ForeignEntries) -> None:
    """Say that one clip for both sides is taken at its word, which verl overrides by its defaults for the sides."""
    clip, sides = given.get(f"{_ACTOR}.clip_ratio"), ("clip_ratio_low", "clip_ratio_high")
    if given.get(f"{_ACTOR}.policy_loss.loss_mode") == "cppo":  # which reads no other clip
        return
    if clip not in (None, 0.2) and all(given.get(f"{_ACTOR}.{side}") is None for side in sides):
        note = f"holds on both sides here; in verl clip_ratio_low and clip_ratio_high stay 0.2 beside {clip}"
        given.notes.append(f"{_ACTOR}.clip_ratio: {note}")


def _translate_epochs(given: ForeignEntries) -> None:
    """Translate passes over the data, which end a run beside the steps."""
    epochs, other = given.take("trainer.total_epochs"), given.take("rollout.total_epochs")
    if (epochs := other if epochs is None else epochs) is not None:
        given.give("max_epochs", epochs, "trainer.total_epochs")
    if given.get("trainer.val_before_train") is True and given.get("trainer.test_freq") in (None, -1, 0):
        note = "changes nothing without trainer.test_freq; `headway eval` validates"
        given.notes.append(f"trainer.val_before_train: {note}")


def _translate_trackers(given: ForeignEntries) -> None:
    """Translate loggers into trackers; those that are not installed are named, and the console always shows a run."""
    key, given_names = "trainer.logger", given.take("trainer.logger")
    names = list(map(str, given_names if isinstance(given_names, list) else [given_names or "console"]))
    known = [_TRACKERS[name] for name in names if name in _TRACKERS]
    chosen = [name for name in known if name == "jsonl" or find_spec(name) is not None]
    if chosen:
        given.give("track_with", chosen, key)
    where = "metrics go to the run directory, and `headway report` shows them"
    if missing := [name for name in known if name not in chosen]:
        given.notes.append(f"{key}: {', '.join(missing)} is not installed for this interpreter; {where}")
    if unknown := [name for name in names if name not in _TRACKERS and name != "console"]:
        given.notes.append(f"{key}: {', '.join(unknown)[:200]} changes nothing here; {where}")
    if (project := given.take("trainer.project_name")) is not None:
        given.give("track_project", project, "trainer.project_name")


def _translate_optimizer(given: ForeignEntries, role: str, key: str) -> None:
    """Translate the two decay rates of Adam, and the clip of gradients that Megatron's optimizer has."""
    base, betas = f"{role}.training_args", given.take(f"{key}.optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            given.give(f"{base}.{name}", beta, f"{key}.optim.betas")
    if (clip := given.take(f"{key}.optim.clip_grad")) is not None and given.get(f"{key}.grad_clip") is None:
        given.give(f"{base}.max_grad_norm", clip, f"{key}.optim.clip_grad")


def _translate_warmup(given: ForeignEntries, role: str, key: str) -> None:
    ratio, warmup = given.take(f"{key}.optim.lr_warmup_steps_ratio"), given.get(f"{key}.optim.lr_warmup_steps")
    if ratio and (not isinstance(warmup, int) or warmup <= 0):
        given.take(f"{key}.optim.lr_warmup_steps")
        given.give(f"{role}.training_args.warmup_ratio", ratio, f"{key}.optim.lr_warmup_steps_ratio")
