"""The second dialect: `actor_rollout_ref.* / trainer.* / data.* / algorithm.*` onto our tree.

Plain renames are rows of `dialect_keys`; here are the few keys that only make sense together (how asynchronous the
run is) and the rule for conflicts: one value given by two keys is fine if it is the same, otherwise an error that
names both. Nothing wins silently. What a key merely implies gives way to what another key says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headway.config.dialects.foreign_keys import generalize_path
from headway.config.dialects.rules import EARLIER_NAMES, KEY_RULES, MAPPING_KEYS, UNSET, VALUE_REWRITES, KeyRule
from headway.config.document import DOTTED_ROOTS, ConfigEntries, ConfigEntry, KeyPath, join_key
from headway.errors import ConfigError

_ALPHA = "async_generation_ratio"
_HYBRID_KEYS = ("actor_rollout_ref.hybrid_engine", "hybrid_engine")
_STRATEGY_KEYS = ("actor_rollout_ref.rollout.async_strategy", "actor_rollout_ref.async_strategy")
_MODE, _PIPELINE = "actor_rollout_ref.rollout.mode", "actor_rollout_ref.async_pipeline"
_AHEAD = "trainer.generate_ahead_steps"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_REWARD_FILE, _REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
_KL_TYPE, _KL_TARGET = "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl"
_GROUPING, _METHOD = "reward_normalization.grouping", "reward_normalization.method"
_TOGETHER = frozenset(
    {*_STRATEGY_KEYS, _MODE, _PIPELINE, _AHEAD, _MINI_BATCH}
    | {_REWARD_FILE, _REWARD_NAME, _GROUPING, _METHOD, _KL_TYPE, _KL_TARGET}
)


@dataclass(frozen=True, slots=True)
class _Claim:
    """One of our keys, set by one of theirs."""

    target: str
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
    """Entries in our own words, and what they could not carry."""

    entries: ConfigEntries = field(default_factory=dict)
    mini_batch_groups: ConfigEntry | None = None
    """Groups of one optimizer step; `derive` turns it into gradient_accumulation_steps."""


def translate(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> Translation:
    """Everything in our own words; unknown keys stay for the schema to refuse."""
    translation = Translation()
    claims: list[_Claim] = []
    by_key = {join_key(path): entry for path, entry in entries.items()}
    for old in EARLIER_NAMES.keys() & {path[0] for path in entries}:
        notes.append(f"{old}: is called {EARLIER_NAMES[old]} now; the old name is still read")
    for path, entry in entries.items():
        key = join_key(path)
        rules = KEY_RULES.get(key) or KEY_RULES.get(join_key(generalize_path(path))) or _inside(path)
        if key in _TOGETHER or (rules is None and path[0] in DOTTED_ROOTS and entry.value is None):
            continue
        if rules is None:
            translation.entries[path] = _spelt_our_way(path, entry)
        for rule in rules or ():
            claims += _claimed(rule, path, entry, problems)
    claims += _asynchrony(by_key, notes, problems) + _reward_function(by_key)
    claims += _normalisation(by_key, problems) + _kl_control(by_key, problems)
    translation.mini_batch_groups = by_key.get(_MINI_BATCH)
    _settle(translation.entries, claims, problems)
    _check_fully_async(translation.entries, by_key, problems)
    return translation


def _inside(path: KeyPath) -> tuple[KeyRule, ...] | None:
    """Of a name inside one of `MAPPING_KEYS`."""
    for length in range(1, len(path)):
        if (mapping := join_key(path[:length])) in MAPPING_KEYS:
            return tuple(KeyRule(f"{rule.target}.{join_key(path[length:])}") for rule in KEY_RULES[mapping])
    return None


def _spelt_our_way(path: KeyPath, entry: ConfigEntry) -> ConfigEntry:
    rewrite = VALUE_REWRITES.get(join_key(generalize_path(path)))
    return ConfigEntry(rewrite(entry.value), entry.origin) if rewrite is not None else entry


def _claimed(rule: KeyRule, path: KeyPath, entry: ConfigEntry, problems: list[ConfigError]) -> list[_Claim]:
    if entry.value is None:
        return []
    target = rule.target
    if target.startswith("*."):
        rest = len(generalize_path(path)) - 1
        target = join_key((*path[: len(path) - rest], *target.split(".")[1:]))
    try:
        value = rule.rewrite(entry.value)
    except ValueError as error:
        problem = f"has no counterpart here [{entry.origin}]"
        problems.append(ConfigError(problem, key=join_key(path), value=entry.value, hint=f"expected {error}"))
        return []
    return [] if value is UNSET else [_Claim(target, value, join_key(path), entry.origin)]


def _asynchrony(given: dict[str, ConfigEntry], notes: list[str], problems: list[ConfigError]) -> list[_Claim]:
    """α and the split of devices, from the five keys that speak about them."""
    claims: list[_Claim] = []
    hybrid = next((given[key].value for key in _HYBRID_KEYS if key in given), None)
    for key in _STRATEGY_KEYS:
        if key in given and given[key].value is not None:
            claims += _strategy(key, given[key], hybrid, problems)
    if _AHEAD in given:
        claims += _ahead(given[_AHEAD], problems)
    if _PIPELINE in given:
        entry = given[_PIPELINE]
        if isinstance(entry.value, bool):
            claims.append(_Claim(_ALPHA, int(entry.value), _PIPELINE, entry.origin, implied=entry.value))
        else:
            problems.append(_refused(_PIPELINE, entry, "true or false"))
    if _MODE in given:
        claims += _mode(given[_MODE], hybrid, notes, problems)
    return claims


def _strategy(key: str, entry: ConfigEntry, hybrid: Any, problems: list[ConfigError]) -> list[_Claim]:
    if entry.value not in ("one-step-off", "fully-async"):
        problems.append(_refused(key, entry, "one of one-step-off, fully-async"))
        return []
    if hybrid is True:
        problems.append(
            _refused(key, entry, "actor_rollout_ref.hybrid_engine=False, which gives rollout its own devices")
        )
        return []
    return [
        _Claim(_ALPHA, 1, key, entry.origin, implied=entry.value == "fully-async"),
        _Claim("hybrid_engine", False, key, entry.origin, implied=True),
    ]


def _ahead(entry: ConfigEntry, problems: list[ConfigError]) -> list[_Claim]:
    steps = entry.value
    if isinstance(steps, bool) or not isinstance(steps, int | float) or steps < 1:
        problems.append(_refused(_AHEAD, entry, "a number ≥ 1; k steps ahead are async_generation_ratio = k − 1"))
        return []
    return [_Claim(_ALPHA, steps - 1, _AHEAD, entry.origin)]


def _mode(entry: ConfigEntry, hybrid: Any, notes: list[str], problems: list[ConfigError]) -> list[_Claim]:
    if entry.value not in ("sync", "async"):
        problems.append(_refused(_MODE, entry, "one of sync, async"))
    elif entry.value == "async" and hybrid is False:
        # Decoupled pools run one step off unless something else is asked for.
        return [_Claim(_ALPHA, 1, _MODE, entry.origin, implied=True)]
    elif entry.value == "async" and hybrid is not False:
        notes.append(f"{_MODE}: actor and rollout share devices unless actor_rollout_ref.hybrid_engine=False is given")
    return []


def _reward_function(given: dict[str, ConfigEntry]) -> list[_Claim]:
    file, name = given.get(_REWARD_FILE), given.get(_REWARD_NAME)
    if file is None or file.value is None:
        return []
    function = name.value if name is not None and name.value is not None else "compute_score"
    return [_Claim("rewards.default.reward_fn", f"{file.value}:{function}", _REWARD_FILE, file.origin)]


def _kl_control(given: dict[str, ConfigEntry], problems: list[ConfigError]) -> list[_Claim]:
    """A target only counts with the adaptive controller; the fixed one is theirs by default."""
    kind, target = given.get(_KL_TYPE, ConfigEntry("fixed", "default")), given.get(_KL_TARGET)
    if kind.value not in ("fixed", "adaptive"):
        problems.append(_refused(_KL_TYPE, kind, "one of fixed, adaptive"))
    if kind.value != "adaptive" or target is None or target.value is None:
        return []
    return [_Claim("target_kl", target.value, _KL_TARGET, target.origin)]


def _normalisation(given: dict[str, ConfigEntry], problems: list[ConfigError]) -> list[_Claim]:
    """`reward_normalization`: over what (`grouping`), and how (`method`); the two say nothing alone."""
    method = given.get(_METHOD)
    if method is None:
        return []
    grouping = given.get(_GROUPING, ConfigEntry("state", method.origin))
    over = {"traj_group_id": "group", "state": "group", "batch": "batch"}.get(str(grouping.value))
    parts = {"identity": (0, 0), "mean": (1, 0), "mean_std": (1, 1)}.get(str(method.value))
    if over is None:
        problems.append(_refused(_GROUPING, grouping, "one of traj_group_id, state, batch"))
    if parts is None:
        problems.append(_refused(_METHOD, method, "one of identity, mean, mean_std"))
    if over is None or parts is None:
        return []
    pairs = zip(("norm_mean_type", "norm_std_type"), parts, strict=True)
    return [_Claim(key, over if part else "none", _METHOD, method.origin, implied=True) for key, part in pairs]


def _refused(key: str, entry: ConfigEntry, expected: str) -> ConfigError:
    return ConfigError(
        f"cannot be translated [{entry.origin}]", key=key, value=entry.value, hint=f"expected {expected}"
    )


def _settle(entries: ConfigEntries, claims: list[_Claim], problems: list[ConfigError]) -> None:
    """Put claims into `entries`; two different values for one key are a problem."""
    for claim in sorted(claims, key=lambda claim: claim.implied):
        path = tuple(claim.target.split("."))
        present = entries.get(path)
        if present is None:
            entries[path] = ConfigEntry(claim.value, claim.where)
        elif not claim.implied and not _equal(present.value, claim.value):
            problems.append(
                ConfigError(
                    f"given as {present.value!r} ({present.origin}) and as {claim.value!r} ({claim.where})",
                    key=claim.target,
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
            problems.append(_refused(key, given[key], f"{_ALPHA} > 0 beside it, it is 0 ({alpha.origin})"))


def suggest_dialect_key(path: KeyPath) -> str | None:
    """A key of the second dialect that an unknown one may have been meant to be."""
    if path[0] not in DOTTED_ROOTS:
        return None
    close = get_close_matches(join_key(path), [*KEY_RULES, *_TOGETHER], 1, 0.7)
    return (
        f"did you mean {close[0]}?"
        if close
        else "neither translated nor known; see the table of keys in docs/configuration.md"
    )
