"""Translates keys of other frameworks onto our tree, by the tables of `headway.config.dialect_tables`.

Keys without effect are set aside and each is named once in a note. Renamed keys are rows of the tables; this module
has the few keys of verl that only make sense together, such as how asynchronous a run is. One value given by two keys
is fine if it is the same, otherwise it is an error that names both: no key wins silently. A value that a key merely
implies gives way to a value that another key gives.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headway.config.dialect_tables import (
    EARLIER_NAMES,
    FOREIGN_KEYS,
    KEY_RULES,
    UNSET,
    VALUE_REWRITES,
    ForeignKey,
    KeyRule,
)
from headway.config.document import DOTTED_ROOTS, ConfigEntries, ConfigEntry, KeyPath, find_near_name, join_key
from headway.errors import ConfigError

_MAPPING_KEYS = frozenset(
    {"data.apply_chat_template_kwargs", "train_env_manager.generating_args", "val_env_manager.generating_args"}
) | frozenset(EARLIER_NAMES)
"""Foreign keys whose values have names of their own: what is below them is below what they set."""
_ROLES = frozenset({"actor_train", "actor_infer", "reference", "critic", "validation", "reward"})
"""First segments for which a leading `*` stands; below `rewards` it stands for two segments."""

_ALPHA = "async_generation_ratio"
_HYBRID_KEYS = ("actor_rollout_ref.hybrid_engine", "hybrid_engine")
_STRATEGY_KEYS = ("actor_rollout_ref.rollout.async_strategy", "actor_rollout_ref.async_strategy")
_MODE, _PIPELINE = "actor_rollout_ref.rollout.mode", "actor_rollout_ref.async_pipeline"
_AHEAD = "trainer.generate_ahead_steps"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_REWARD_FILE, _REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
_KL_TYPE, _KL_TARGET = "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"
_ASYMMETRIC_CLIP = {"normalized_reward_low": -1.0, "normalized_reward_high": 3.0}
"""Bounds that ROLL's `asym_clip` sets."""
_GROUPING, _METHOD = "reward_normalization.grouping", "reward_normalization.method"
_JOINT_KEYS = frozenset(
    {*_STRATEGY_KEYS, _MODE, _PIPELINE, _AHEAD, _MINI_BATCH}
    | {_REWARD_FILE, _REWARD_NAME, _GROUPING, _METHOD, _KL_TYPE, _KL_TARGET}
)


def _generalize_path(path: KeyPath) -> KeyPath:
    """Return the path as the tables write it: the name of a role, reward or environment becomes `*`."""
    if path[0] in _ROLES:
        return ("*", *path[1:])
    if path[0] == "rewards" and len(path) > 2:
        return ("*", *path[2:])
    if path[0] == "custom_envs" and len(path) > 2:
        return ("custom_envs", "*", *path[2:])
    return path


def _generalize_domain(path: KeyPath) -> KeyPath:
    """Return the path of a reward as rows for rewards alone write it: `rewards.*`."""
    return ("rewards", "*", *path[2:]) if path[0] == "rewards" and len(path) > 2 else path


def _find_foreign_key(path: KeyPath) -> tuple[ForeignKey, KeyPath] | None:
    """Return the row for `path` or for the longest key above it, and the part of `path` that the row stands for."""
    for name in (path, _generalize_domain(path), _generalize_path(path)):
        for length in range(len(name), 0, -1):
            if (row := FOREIGN_KEYS.get(join_key(name[:length]))) is not None:
                return row, path[: length + len(path) - len(name)]
    return None


def is_foreign_key(path: KeyPath) -> bool:
    """Return whether nothing here reads the key, so that its value cannot matter."""
    found = _find_foreign_key(path)
    return found is not None and found[0].only is UNSET and join_key(path) not in KEY_RULES


def set_foreign_keys_aside(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries without foreign keys. Each of those becomes a note, or a problem where its value matters."""
    kept: ConfigEntries = {}
    noted: dict[str, dict[str, None]] = {}
    for path, entry in entries.items():
        found = None if join_key(path) in KEY_RULES else _find_foreign_key(path)
        if found is None:
            kept[path] = entry
            continue
        row, covered = found
        if entry.value is None or entry.value in row.silent:
            continue
        if row.only is UNSET:
            noted.setdefault(row.reason, {})[join_key(covered)] = None
        elif entry.value != row.only:
            problem, hint = f"cannot be done [{entry.origin}]", f"only {row.only!r} is possible: {row.reason}"
            problems.append(ConfigError(problem, key=join_key(path), value=entry.value, hint=hint))
    for reason, keys in noted.items():
        notes.append(f"{', '.join(keys)}: change{'s' if len(keys) == 1 else ''} nothing here; {reason}")
    return kept


@dataclass(frozen=True, slots=True)
class _Claim:
    """A value for one of our keys that a foreign key sets."""

    target: str | KeyPath
    value: Any
    source: str
    origin: str
    implied: bool = False
    """Gives way to any other claim."""

    @property
    def where(self) -> str:
        return f"translated from {self.source} ({self.origin})"


@dataclass(slots=True)
class Translation:
    """Entries under our own keys, and what they could not carry."""

    entries: ConfigEntries = field(default_factory=dict)
    mini_batch_groups: ConfigEntry | None = None
    """Groups of one optimizer step; derivation turns it into gradient_accumulation_steps."""


def translate(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> Translation:
    """Return all entries under our own keys. Unknown keys stay for the schema to refuse."""
    translation = Translation()
    claims: list[_Claim] = []
    by_key = {join_key(path): entry for path, entry in entries.items()}
    for old in EARLIER_NAMES.keys() & {path[0] for path in entries}:
        notes.append(f"{old}: is called {EARLIER_NAMES[old]} now; the old name is still read")
    for path, entry in entries.items():
        key = join_key(path)
        names = (path, _generalize_domain(path), _generalize_path(path))
        rules = next(filter(None, map(KEY_RULES.get, map(join_key, names))), None) or _find_mapping_rules(path)
        if key in _JOINT_KEYS or (rules is None and path[0] in DOTTED_ROOTS and entry.value is None):
            continue
        if rules is None:
            translation.entries[path] = _rewrite_value(path, entry)
        for rule in rules or ():
            claims += _apply_rule(rule, path, entry, problems)
    claims += _translate_asynchrony(by_key, notes, problems) + _translate_reward_function(by_key)
    claims += _translate_normalization(by_key, problems) + _translate_kl_control(by_key, problems)
    translation.mini_batch_groups = by_key.get(_MINI_BATCH)
    _settle_claims(translation.entries, claims, problems)
    _check_fully_async(translation.entries, by_key, problems)
    return translation


def _find_mapping_rules(path: KeyPath) -> tuple[KeyRule, ...] | None:
    """Return the rules for a name inside one of `_MAPPING_KEYS`."""
    for length in range(1, len(path)):
        if (mapping := join_key(path[:length])) in _MAPPING_KEYS:
            return tuple(KeyRule(f"{rule.target}.{join_key(path[length:])}") for rule in KEY_RULES[mapping])
    return None


def _rewrite_value(path: KeyPath, entry: ConfigEntry) -> ConfigEntry:
    rewrite = VALUE_REWRITES.get(join_key(_generalize_path(path)))
    return ConfigEntry(rewrite(entry.value), entry.origin) if rewrite is not None else entry


def _apply_rule(rule: KeyRule, path: KeyPath, entry: ConfigEntry, problems: list[ConfigError]) -> list[_Claim]:
    if entry.value is None:
        return []
    target, place = rule.target, tuple(rule.target.split("."))
    if target.startswith("*."):
        rest = len(_generalize_path(path)) - 1
        place = (*path[: len(path) - rest], *target.split(".")[1:])
    elif target.startswith("rewards.*."):
        place = ("rewards", path[1], *target.split(".")[2:])
    try:
        value = rule.rewrite(entry.value)
    except ValueError as error:
        problem = f"has no counterpart here [{entry.origin}]"
        problems.append(ConfigError(problem, key=join_key(path), value=entry.value, hint=f"expected {error}"))
        return []
    return [] if value is UNSET else [_Claim(place, value, join_key(path), entry.origin)]


def _translate_asynchrony(given: dict[str, ConfigEntry], notes: list[str], problems: list[ConfigError]) -> list[_Claim]:
    """Translate the five keys about α and the split of devices."""
    claims: list[_Claim] = []
    hybrid = next((given[key].value for key in _HYBRID_KEYS if key in given), None)
    for key in _STRATEGY_KEYS:
        if key in given and given[key].value is not None:
            claims += _translate_strategy(key, given[key], hybrid, problems)
    if _AHEAD in given:
        claims += _translate_ahead(given[_AHEAD], problems)
    if _PIPELINE in given:
        entry = given[_PIPELINE]
        if isinstance(entry.value, bool):
            claims.append(_Claim(_ALPHA, int(entry.value), _PIPELINE, entry.origin, implied=entry.value))
        else:
            problems.append(_make_problem(_PIPELINE, entry, "true or false"))
    if _MODE in given:
        claims += _translate_mode(given[_MODE], hybrid, notes, problems)
    return claims


def _translate_strategy(key: str, entry: ConfigEntry, hybrid: Any, problems: list[ConfigError]) -> list[_Claim]:
    if entry.value not in ("one-step-off", "fully-async"):
        problems.append(_make_problem(key, entry, "one of one-step-off, fully-async"))
        return []
    if hybrid is True:
        problems.append(
            _make_problem(key, entry, "actor_rollout_ref.hybrid_engine=False, which gives rollout its own devices")
        )
        return []
    return [
        _Claim(_ALPHA, 1, key, entry.origin, implied=entry.value == "fully-async"),
        _Claim("hybrid_engine", False, key, entry.origin, implied=True),
    ]


def _translate_ahead(entry: ConfigEntry, problems: list[ConfigError]) -> list[_Claim]:
    steps = entry.value
    if isinstance(steps, bool) or not isinstance(steps, int | float) or steps < 1:
        problems.append(_make_problem(_AHEAD, entry, "a number ≥ 1; k steps ahead are async_generation_ratio = k − 1"))
        return []
    return [_Claim(_ALPHA, steps - 1, _AHEAD, entry.origin)]


def _translate_mode(entry: ConfigEntry, hybrid: Any, notes: list[str], problems: list[ConfigError]) -> list[_Claim]:
    if entry.value not in ("sync", "async"):
        problems.append(_make_problem(_MODE, entry, "one of sync, async"))
    elif entry.value == "async" and hybrid is False:
        # Separate devices run one step off unless another key asks for something else.
        return [_Claim(_ALPHA, 1, _MODE, entry.origin, implied=True)]
    elif entry.value == "async" and hybrid is not False:
        notes.append(f"{_MODE}: actor and rollout share devices unless actor_rollout_ref.hybrid_engine=False is given")
    return []


def _translate_reward_function(given: dict[str, ConfigEntry]) -> list[_Claim]:
    file, name = given.get(_REWARD_FILE), given.get(_REWARD_NAME)
    if file is None or file.value is None:
        return []
    function = name.value if name is not None and name.value is not None else "compute_score"
    return [_Claim("rewards.default.reward_fn", f"{file.value}:{function}", _REWARD_FILE, file.origin)]


def _translate_kl_control(given: dict[str, ConfigEntry], problems: list[ConfigError]) -> list[_Claim]:
    """Translate the KL target, which only counts with the adaptive controller; verl's default is the fixed one."""
    kind, target = given.get(_KL_TYPE, ConfigEntry("fixed", "default")), given.get(_KL_TARGET)
    if kind.value not in ("fixed", "adaptive"):
        problems.append(_make_problem(_KL_TYPE, kind, "one of fixed, adaptive"))
    if kind.value != "adaptive" or target is None or target.value is None:
        return []
    return [_Claim("target_kl", target.value, _KL_TARGET, target.origin)]


def _translate_normalization(given: dict[str, ConfigEntry], problems: list[ConfigError]) -> list[_Claim]:
    """Translate `reward_normalization`: `grouping` says over what, `method` says how."""
    method = given.get(_METHOD)
    if method is None:
        return []
    grouping = given.get(_GROUPING, ConfigEntry("state", method.origin))
    over = {"traj_group_id": "group", "state": "group", "batch": "batch", "tags": "domain"}.get(str(grouping.value))
    known = {"identity": (0, 0), "mean": (1, 0), "mean_std": (1, 1), "asym_clip": (1, 1)}
    parts = known.get(str(method.value))
    if over is None:
        problems.append(_make_problem(_GROUPING, grouping, "one of traj_group_id, state, tags, batch"))
    if parts is None:
        problems.append(_make_problem(_METHOD, method, f"one of {', '.join(known)}"))
    if over is None or parts is None:
        return []
    pairs = zip(("norm_mean_type", "norm_std_type"), parts, strict=True)
    found = [_Claim(key, over if part else "none", _METHOD, method.origin, implied=True) for key, part in pairs]
    bounds = _ASYMMETRIC_CLIP if method.value == "asym_clip" else {}
    return found + [_Claim(key, bound, _METHOD, method.origin, implied=True) for key, bound in bounds.items()]


def _make_problem(key: str, entry: ConfigEntry, expected: str) -> ConfigError:
    return ConfigError(
        f"cannot be translated [{entry.origin}]", key=key, value=entry.value, hint=f"expected {expected}"
    )


def _settle_claims(entries: ConfigEntries, claims: list[_Claim], problems: list[ConfigError]) -> None:
    """Put claims into `entries`. Two different values for one key are a problem."""
    for claim in sorted(claims, key=lambda claim: claim.implied):
        path = tuple(claim.target.split(".")) if isinstance(claim.target, str) else claim.target
        present = entries.get(path)
        if present is None:
            entries[path] = ConfigEntry(claim.value, claim.where)
        elif not claim.implied and not _equal(present.value, claim.value):
            problems.append(
                ConfigError(
                    f"given as {present.value!r} ({present.origin}) and as {claim.value!r} ({claim.where})",
                    key=join_key(path),
                    value=present.value,
                    hint="keep one of them",
                )
            )


def _equal(one: Any, other: Any) -> bool:
    try:
        return one == other or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _check_fully_async(entries: ConfigEntries, given: dict[str, ConfigEntry], problems: list[ConfigError]) -> None:
    for key in _STRATEGY_KEYS:
        alpha = entries.get((_ALPHA,))
        if key in given and given[key].value == "fully-async" and alpha is not None and _equal(alpha.value, 0):
            problems.append(_make_problem(key, given[key], f"{_ALPHA} > 0 beside it, it is 0 ({alpha.origin})"))


def suggest_dialect_key(path: KeyPath) -> str | None:
    """Return a hint for an unknown key of verl, or `None` for a key of ours. The last parts of keys are compared."""
    if path[0] not in DOTTED_ROOTS:
        return None
    known = [key for key in (*KEY_RULES, *_JOINT_KEYS) if key.split(".")[0] == path[0]]
    close = find_near_name(path[-1], {key.rpartition(".")[2] for key in known})
    near = [key for key in known if key.rpartition(".")[2] == close]
    if near:
        return f"did you mean {get_close_matches(join_key(path), near, 1, 0)[0]}?"
    return "neither translated nor known; see the table of keys in docs/configuration.md"
