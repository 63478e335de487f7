"""Translates what several keys of ROLL say together about training, and its defaults that depend on other keys."""

import math
from typing import Any

from headway.config.config_tree import parse_devices
from headway.config.document import ConfigEntries
from headway.config.foreign_entries import ForeignEntries
from headway.errors import ConfigError

_NAME = "ROLL"
_MODEL = "actor_train.model_args"
_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
_LORA_RANK = 8
_MAX_STEPS = 500
_ANY_RATIO = 1e9


def translate_roll_algorithm(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries of a file of ROLL with joint keys replaced by ours."""
    given = ForeignEntries(entries, notes, problems)
    _translate_clip_range(given)
    _translate_adapters(given)
    _translate_filters(given)
    _translate_sampling(given)
    for role in ("actor_train", "critic"):
        _translate_warmup(given, role)
    _translate_estimator(given)
    if given.take("importance_sampling") == "seq":
        given.give("pg_variant", "gspo", "importance_sampling: seq")
    _choose_normalization(given)
    _separate_domains(given)
    _set_tracker_aside(given)
    _translate_topr(given)
    _translate_steps(given)
    _translate_shared_devices(given)
    _translate_critic_devices(given)
    _translate_server_devices(given)
    _replace_half_precision(given)
    for key in ("eval_steps", "save_steps"):  # none of them, if it is less than 0
        if isinstance(given.get(key), int) and given.get(key) < 0:
            given.give(key, 0 * given.take(key), f"{key} below 0")
    return given.entries


def _translate_clip_range(given: ForeignEntries) -> None:
    """Leave out the two sides of the clip, which only count with `use_pg_clip_range`."""
    if given.take("use_pg_clip_range") is True:
        return
    for key in ("pg_clip_low", "pg_clip_high"):
        if (value := given.take(key)) is not None and value != given.get("pg_clip"):
            given.notes.append(f"{key}: changes nothing without use_pg_clip_range: true, as in {_NAME}")


def _translate_adapters(given: ForeignEntries) -> None:
    """Train adapters where `lora_target` is given, as ROLL does; their rank alone asks for none."""
    if given.get(f"{_MODEL}.lora_target"):
        given.give_default(f"{_MODEL}.lora_rank", _LORA_RANK, _NAME)
    elif given.take(f"{_MODEL}.lora_rank") is not None:
        given.take(f"{_MODEL}.lora_alpha")
        given.notes.append(f"{_MODEL}.lora_rank: changes nothing without lora_target, as in {_NAME}")


def _translate_filters(given: ForeignEntries) -> None:
    """Translate masks on the mismatch of trainer and engine; one is off unless it says `enabled`."""
    key = ("train_infer_correction", "filters")
    entry = given.entries.get(key)
    if entry is None or not isinstance(entry.value, list):
        return
    rows = [{"enabled": False, **row} if isinstance(row, dict) else row for row in entry.value]
    del given.entries[key]
    given.give(".".join(key), [_translate_filter(row) for row in rows], f"{'.'.join(key)} ({entry.origin})")


def _translate_filter(row: Any) -> Any:
    """Give a mask its ranges; one that is not enabled is as wide as ratios and probabilities can be."""
    if not isinstance(row, dict):
        return row
    known = {name: value for name, value in row.items() if name not in ("ratio_enabled", "diff_enabled")}
    if row.get("ratio_enabled") is False:
        known |= {"ratio_low": 0.0, "ratio_high": _ANY_RATIO}
    if row.get("diff_enabled") is True:
        return {"diff_low": -0.2, "diff_high": 0.2} | known
    return {name: value for name, value in known.items() if not name.startswith("diff_")}


def _translate_sampling(given: ForeignEntries) -> None:
    for role in ("actor_infer", "validation"):
        if given.take(f"{role}.generating_args.do_sample") is False and given.get(
            f"{role}.generating_args.temperature"
        ):
            note = f"changes nothing here, as in {_NAME}; temperature 0 is greedy"
            given.notes.append(f"{role}.generating_args.do_sample: {note}")
        if given.has_below(f"{role}.generating_args"):
            for name, value in _SAMPLING.items():
                given.give_default(f"{role}.generating_args.{name}", value, _NAME)
    if given.take("val_greedy") is True:
        given.entries.pop(("validation", "generating_args", "temperature"), None)
        given.give("validation.generating_args.temperature", 0.0, "val_greedy")


def _translate_warmup(given: ForeignEntries, role: str) -> None:
    """Translate a share of all steps; `warmup_steps` counts if it is more than 0."""
    base = f"{role}.training_args"
    ratio, steps = given.take_number(f"{base}.warmup_ratio", 0, 0, 1), given.get("max_steps") or _MAX_STEPS
    if ratio and not given.get(f"{base}.warmup_steps") and isinstance(steps, int):
        given.take(f"{base}.warmup_steps")
        given.give(f"{base}.warmup_steps", math.ceil(ratio * steps), f"{base}.warmup_ratio × {steps} steps")
        given.give(f"{base}.warmup_unit", "training_steps", f"{base}.warmup_ratio")


def _translate_estimator(given: ForeignEntries) -> None:
    """Give estimators that differ from ours in nothing their names here."""
    name, undiscounted = given.get("adv_estimator"), given.get("gamma") in (None, 1)
    ours = {"skip_obs_gae": "gae", "agentic_reinforce": "reinforce" if undiscounted else None}.get(str(name))
    if ours is not None:
        given.take("adv_estimator")
        given.give("adv_estimator", ours, f"adv_estimator: {name}")


def _choose_normalization(given: ForeignEntries) -> None:
    """Normalize rewards only where ROLL does: within groups for grpo without agents, else if a key asks for it."""
    agentic, estimator = given.has_below("train_env_manager"), given.get("adv_estimator") or "gae"
    if not agentic and estimator not in ("gae", "reinforce"):
        return
    if given.get("reward_normalization.method") is not None or given.get("reward_norm") is not None:
        return
    for key in ("norm_mean_type", "norm_std_type"):
        if given.get(f"reward_normalization.{key}") is None:
            given.give_default(key, "none", _NAME)


def _separate_domains(given: ForeignEntries) -> None:
    """Normalize rewards and whiten advantages within each reward's samples, where there are several rewards."""
    names = {path[1] for path in given.entries if path[0] == "rewards" and len(path) > 2}
    if len(names) < 2 or given.has_below("train_env_manager"):
        return
    source = f"{len(names)} rewards, each normalized by itself"
    if given.get("reward_norm") == "batch":
        given.take("reward_norm")
        source, scopes = f"reward_norm: batch of {source}", {"norm_mean_type": "batch", "norm_std_type": "batch"}
    else:
        scopes = {key: given.get(key) for key in ("norm_mean_type", "norm_std_type")}
    for key in (key for key, scope in scopes.items() if scope == "batch"):
        given.take(key)
        given.give(key, "domain", source)
    if given.get("whiten_advantages") is True:
        given.give("whiten_by_domain", True, source)


def _set_tracker_aside(given: ForeignEntries) -> None:
    """Leave out a tracker that is not public."""
    if given.get("track_with") in ("ml_tracker", ["ml_tracker"]):
        given.take("track_with")
        note = "is no public tracker; metrics are in the run directory, and `headway report` shows them"
        given.notes.append(f"track_with: ml_tracker {note}")


def _translate_topr(given: ForeignEntries) -> None:
    """Translate the coefficients that older versions have for TOPR, where no other loss is added to it."""
    weights: dict[str, tuple[str, ...]] = {"topr_negative_weight": ("use_topr_neg_loss_coef",)}
    weights["topr_positive_weight"] = ("positive_loss_coef", "postive_loss_coef")
    found = {ours: next(filter(None, map(given.get, names)), 0.0) for ours, names in weights.items()}
    if not any(found.values()) or given.get("rl_loss_coef") != 0:
        if given.get("use_topr_loss") is True:
            given.take("use_topr_loss")
            given.give("pg_variant", "topr", "use_topr_loss")
        return
    given.give("pg_variant", "topr", "positive_loss_coef and use_topr_neg_loss_coef")
    for ours, names in weights.items():
        given.give(ours, found[ours], names[0])  # the schema refuses what is no number
    for name in ("rl_loss_coef", "use_topr_loss", *(name for names in weights.values() for name in names)):
        given.take(name)


def _translate_steps(given: ForeignEntries) -> None:
    """Give single steps their own rewards, as ROLL does: step_reinforce that discounts all later ones away."""
    tags, estimator = given.get("train_env_manager.tags"), given.get("adv_estimator")
    steps = isinstance(tags, list) and tags and all(given.get(f"custom_envs.{tag}.sample") == "turn" for tag in tags)
    if not steps or estimator not in ("grpo", "reinforce"):
        return
    source = f"adv_estimator: {estimator} of single steps"
    given.take("adv_estimator"), given.take("step_reward_gamma")
    given.give("adv_estimator", "step_reinforce", source)
    given.give("step_reward_gamma", 0.0, source)
    given.notes.append(f"{source} is step_reinforce with step_reward_gamma 0: a step has its own reward, as in {_NAME}")


def _translate_shared_devices(given: ForeignEntries) -> None:
    """Lend the devices of training to rollout that runs ahead and has them beside its own; else let both take turns."""
    keys = "actor_train.device_mapping", "actor_infer.device_mapping"
    train, infer = (parse_devices(str(given.get(key))) for key in keys)
    ahead = given.get("async_generation_ratio")
    if not isinstance(ahead, int | float) or not ahead or not train or not infer or set(train).isdisjoint(infer):
        return
    if not set(train) < set(infer):
        if given.get("hybrid_engine") is None:
            given.give("hybrid_engine", True, keys[1])
            given.notes.append(f"{keys[1]}: shares devices with actor_train, so both take turns although α > 0")
        return
    own = [device for device in infer if device not in train]
    given.take(keys[1])
    given.give(keys[1], own, f"{keys[1]} without those of actor_train")
    given.give("lend_idle_trainer", True, keys[1])
    given.notes.append(f"{keys[1]}: devices of actor_train generate while training waits (lend_idle_trainer)")


def _translate_critic_devices(given: ForeignEntries) -> None:
    """Cut a critic that has several devices over those of actor_train, since one process has one device here."""
    key = "critic.device_mapping"
    devices = parse_devices(str(given.get(key)))
    if devices and len(devices) > 1 and (given.get("adv_estimator") or "gae") == "gae":
        given.take(key)
        given.notes.append(f"{key}: changes nothing here; the critic is cut over the devices of actor_train")


def _translate_server_devices(given: ForeignEntries) -> None:
    """Cut the model of a server over the devices of one worker, as ROLL does for SGLang."""
    base, devices = "actor_infer.strategy_args", given.get("actor_infer.num_gpus_per_worker")
    if given.get(f"{base}.strategy_name") == "sglang" and isinstance(devices, int) and devices > 1:
        given.take("actor_infer.num_gpus_per_worker")
        if given.get(f"{base}.strategy_config.tp_size") is None:
            target = f"{base}.strategy_config.tensor_model_parallel_size"
            given.give(target, devices, "actor_infer.num_gpus_per_worker")


def _replace_half_precision(given: ForeignEntries) -> None:
    """Train in bf16 where fp16 is asked for, which would need a scaled loss."""
    key = "actor_train.model_args.dtype"
    if given.get(key) != "fp16":
        return
    given.take(key)
    given.give(key, "bf16", f"{key}: fp16")
    note = "bf16 is trained instead of fp16, whose small gradients vanish without a scaled loss"
    given.notes.append(f"{key}: {note}")
