"""Recognises whose configuration this is, and what follows from it.

A file of ROLL and a command line of verl mean what they mean there: a value that is not given is the default of their
project, and a key that nothing here reads is named in a note instead of refused. Keys that are nearly one of ours or
theirs are refused as mistakes all the same. A file of our own gets none of this.
"""

import re
from functools import cache
from typing import Any

from headway.config.dialect_tables import DIALECT_DEFAULTS, FOREIGN_KEYS, KEY_RULES, ROLL_MARKS
from headway.config.document import DOTTED_ROOTS, ConfigEntries, ConfigEntry, KeyPath, find_near_name, join_key
from headway.config.field_types import get_fields, iterate_options
from headway.config.schema import Config
from headway.errors import ConfigError

DIALECT_NAMES = {"roll": "ROLL", "verl": "verl", "gerl": "GeRL"}
"""Dialects with the names of their projects."""
_OPEN_SECTIONS = frozenset(
    {"strategy_config", "engine_kwargs", "megatron", "fsdp_config"}
    | {"override_transformer_config", "override_optimizer_config"}
)
"""Sections of settings for kernels, memory and parallelism, of which back ends have hundreds."""
_BATCH_KEYS = tuple(
    f"actor_train.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
)
_POLICY_ROOTS = frozenset({"pretrain", "actor_train", "actor_infer", "validation"})
_OTHER_PIPELINES = {
    "sft_train": "supervised fine-tuning",
    "student_train": "on-policy distillation",
    "student": "distillation",
    "teacher": "distillation",
    "chosen_key": "preference optimisation (DPO)",
    "reward_train": "training of a reward model",
}
_VISION_MODEL = re.compile(r"(?i)(?:^|[-_/.])(?:vl|omni|llava|internvl|glm-?4\.?1v|glm-?4v)(?:$|[-_/.\d])")


def recognize_dialect(entries: ConfigEntries) -> str | None:
    """Return `roll`, `verl` or `gerl` for a configuration that was written for that project, else `None`."""
    values = {join_key(path): entry.value for path, entry in entries.items()}
    if any(path[0] in DOTTED_ROOTS or path[0] == "async_training" for path in entries):
        diffusers = values.get("actor_rollout_ref.rollout.name") == "diffusers"
        return "gerl" if diffusers or values.get("algorithm.adv_estimator") == "flow_grpo" else "verl"
    for path, entry in entries.items():
        if path[0] in ROLL_MARKS["keys"] or (isinstance(entry.value, str) and entry.value.startswith("roll.")):
            return "roll"
        if path[-1] == "strategy_name" and path[0] != "rewards" and entry.value in ROLL_MARKS["strategies"]:
            return "roll"
    return None


def is_verl_as_a_whole(entries: ConfigEntries) -> bool:
    """Return whether it names its model or data as verl does, and is not one of our own with single keys of verl."""
    return any(tuple(key.split(".")) in entries for key in ("actor_rollout_ref.model.path", "data.train_files"))


def is_vision_model(name: object) -> bool:
    """Return whether the name of a model says that it reads pictures."""
    return isinstance(name, str) and _VISION_MODEL.search(name) is not None


def find_other_pipeline(entries: ConfigEntries) -> ConfigError | None:
    """Return the problem of a configuration for a kind of training that is not offered."""
    roots = {path[0]: entry for path, entry in reversed(entries.items())}
    for key, pipeline in _OTHER_PIPELINES.items():
        if key in roots:
            problem = f"{key}: this is a configuration for {pipeline}, which Headway does not offer"
            return ConfigError(f"{problem} [{roots[key].origin}]", hint="it trains with rewards: RLVR, agents, images")
    strategy = entries.get(("actor_train", "strategy_args", "strategy_name"))
    if strategy is not None and "diffusion" in str(strategy.value):
        problem = f"asks for ROLL's own pipeline of pictures and video, which is not read here [{strategy.origin}]"
        key, hint = (
            "actor_train.strategy_args.strategy_name",
            "images: docs/denoising.md; GeRL's command lines are read",
        )
        return ConfigError(problem, key=key, value=strategy.value, hint=hint)
    return None


def find_vision(entries: ConfigEntries) -> ConfigError | None:
    """Return the problem of a file of ROLL whose policy reads more than text."""
    for path, entry in entries.items():
        if path[0] in _POLICY_ROOTS and _asks_for_vision(path[-1], entry.value):
            problem = f"asks for pictures, video or sound in prompts, not offered here [{entry.origin}]"
            return ConfigError(problem, key=join_key(path), value=entry.value)
    return None


def _asks_for_vision(name: str, value: Any) -> bool:
    if name in ("pretrain", "model_name_or_path"):
        return is_vision_model(value)
    return name.startswith(("image_", "video_"))


def apply_dialect_defaults(entries: ConfigEntries, dialect: str, notes: list[str]) -> ConfigEntries:
    """Return the entries with the defaults of the project for what they do not give, and its meaning for the rest."""
    name, values = DIALECT_NAMES[dialect], {join_key(path): entry.value for path, entry in entries.items()}
    defaults = dict(DIALECT_DEFAULTS.get(dialect, {}))
    clip = values.get("pg_clip", 0.2)
    if dialect == "roll" and isinstance(clip, int | float):
        defaults["dual_clip_c"] = 1.0 + 2.0 * clip
    if dialect == "roll" and _only_plays(entries):
        for key in _BATCH_KEYS:  # there is no trainer whose samples the batch would have to fit
            defaults.pop(key, None)
        notes.append("actor_train: says nothing of training; ROLL only plays such a file, which `headway eval` does")
    if dialect != "gerl" and values.get("pg_variant", "ppo") == "ppo":
        notes.append(
            "pg_variant: the ratio is taken against the log-probabilities of the engine, which drew the samples; "
            f"{name} recomputes them with the trainer (decoupled_ppo reads both; without a weight, "
            "by decoupled_weight_type: none, it is theirs)"
        )
    if (
        dialect == "roll"
        and values.get("val_batch_size") is not None
        and not any(path[0] == "train_env_manager" for path in entries)
    ):
        notes.append(f"val_batch_size: changes nothing here; in {name} it is the batch size of a loader")
        entries = {path: entry for path, entry in entries.items() if path != ("val_batch_size",)}
    more = {
        tuple(key.split(".")): ConfigEntry(value, f"default of {name}")
        for key, value in defaults.items()
        if key not in values and value is not None
    }
    return {**entries, **more}


def _only_plays(entries: ConfigEntries) -> bool:
    """Return whether a file of agents names neither devices nor options of training."""
    given = {part for path in entries if path[0] == "actor_train" for part in path[1:3]}
    agents = any(path[0] == "train_env_manager" for path in entries)
    return agents and given.isdisjoint({"device_mapping", "strategy_args", "learning_rate"})


def set_unknown_keys_aside(entries: ConfigEntries, notes: list[str]) -> ConfigEntries:
    """Return the entries that are known or may be mistakes; all others are named in one note for each reason."""
    kept: ConfigEntries = {}
    unknown: dict[str, list[str]] = {}
    for path, entry in entries.items():
        if _is_known(path) or not (entry.value is None or _is_open(path) or _is_far_from_known(path)):
            kept[path] = entry
        elif entry.value is not None:
            reason = "kernels, memory and parallelism are chosen here" if _is_open(path) else "not known here"
            unknown.setdefault(reason, []).append(join_key(path))
    for reason, keys in unknown.items():
        notes.append(f"{', '.join(keys)}: change{'s' if len(keys) == 1 else ''} nothing here; {reason}")
    return kept


def _is_open(path: KeyPath) -> bool:
    return not _OPEN_SECTIONS.isdisjoint(path[:-1])


def _is_known(path: KeyPath, block: type = Config) -> bool:
    """Return whether `block` has the key, or a value above it that takes any."""
    if path[0] not in get_fields(block):
        return False
    shape, rest = get_fields(block)[path[0]].shape, path[1:]
    if shape.kind == "map" and shape.item is not None:
        shape, rest = shape.item, rest[1:]  # the first segment below is a name that the user chooses
    return shape.block is None or not rest or _is_known(rest, shape.block)


def _is_far_from_known(path: KeyPath) -> bool:
    """Return whether no known key differs from it in one segment alone that may be misspelt."""
    for known in _list_known_paths():
        if len(known) == len(path):
            others = [(one, other) for one, other in zip(path, known, strict=True) if one != other and other != "*"]
            if len(others) == 1 and find_near_name(others[0][0], [others[0][1]]) is not None:
                return False
    return True


@cache
def _list_known_paths() -> list[KeyPath]:
    keys = [*(option.key.replace("<name>", "*") for option in iterate_options(Config)), *KEY_RULES, *FOREIGN_KEYS]
    return [tuple(key.split(".")) for key in dict.fromkeys(keys)]
