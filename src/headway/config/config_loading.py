"""Loads a configuration that can run from a file or a mapping, with overrides.

    read → overrides → ${} → plugins → foreign keys set aside → translated → typed tree → derived → checked

Problems are collected along the way and raised together as `ConfigErrors`; arithmetic is judged only once every
single value is right. Notes do not stop anything.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config.config_checks import add_cautions, check_config
from headway.config.config_tree import build_tree
from headway.config.derivation import derive_config
from headway.config.dialect_recognition import (
    apply_dialect_defaults,
    find_other_pipeline,
    find_vision,
    is_verl_as_a_whole,
    recognize_dialect,
    set_unknown_keys_aside,
)
from headway.config.document import DOTTED_ROOTS, ConfigEntries, KeyPath, Source, join_key
from headway.config.field_types import get_fields
from headway.config.gerl_translation import translate_gerl
from headway.config.launch_arguments import split_launch_arguments
from headway.config.overrides import apply_overrides, read_source
from headway.config.references import resolve_references
from headway.config.resolved_config import ConfigDraft, ResolvedConfig, get_at_key, list_leaves
from headway.config.roll_algorithm import translate_roll_algorithm
from headway.config.roll_translation import translate_roll
from headway.config.schema import Config
from headway.config.translation import is_foreign_key, set_foreign_keys_aside, suggest_dialect_key, translate
from headway.config.verl_translation import find_missing_feature, translate_verl
from headway.errors import ConfigError, ConfigErrors
from headway.plugins import find_plugin, load_plugins


def load_config(source: Source = None, overrides: Iterable[str] | Mapping[str, Any] = ()) -> ResolvedConfig:
    """Load `source` (a YAML file by name or open, or a mapping) with `overrides` on top.

    Raise `ConfigErrors` with every problem found.
    """
    problems: list[ConfigError] = []
    notes: list[str] = []
    overrides, launch = split_launch_arguments(overrides)
    if other := launch.find_other_pipeline():
        raise ConfigErrors([other])
    source = launch.choose_source(source, notes, problems)
    entries = launch.add_to(apply_overrides(read_source(source, problems), overrides, problems))
    entries, used = resolve_references(entries, _get_default, problems, unread=_is_unread)
    _load_plugins(entries, source, problems)
    entries = _without_variables(entries, used)
    dialect, has_defaults = recognize_dialect(entries), is_verl_as_a_whole(entries)
    find_missing = {"verl": find_missing_feature, "gerl": find_missing_feature, "roll": find_vision}.get(
        dialect or "", lambda _: None
    )
    if other := find_other_pipeline(entries) or find_missing(entries):
        raise ConfigErrors([other])
    if dialect in ("verl", "gerl"):
        entries = translate_verl(entries, launch, notes, problems)
    if dialect == "gerl":
        entries = translate_gerl(entries, notes, problems)
    if dialect == "roll":
        entries = translate_roll_algorithm(translate_roll(entries, notes, problems), notes, problems)
    entries = set_foreign_keys_aside(entries, notes, problems)
    translation = translate(entries, notes, problems)
    entries = translation.entries
    if dialect is not None:
        entries = set_unknown_keys_aside(entries, notes)
        if dialect != "verl" or has_defaults:
            entries = apply_dialect_defaults(entries, dialect, notes)
    entries = _without_covered_keys(_without_unknown_dialect_keys(entries, problems), problems)
    config, provenance = build_tree(Config, entries, problems)
    if problems:
        raise ConfigErrors(problems)
    draft = ConfigDraft(config, provenance, notes, dialect)
    derived = derive_config(draft, translation.mini_batch_groups)
    check_config(draft, derived)
    if draft.problems:
        raise ConfigErrors(draft.problems)
    add_cautions(draft, derived)
    where = {key: draft.provenance.get(key, "default") for key, _ in list_leaves(draft.config)}
    return ResolvedConfig(config=draft.config, derived=derived, provenance=where, notes=tuple(notes))


def _load_plugins(entries: ConfigEntries, source: Source, problems: list[ConfigError]) -> None:
    """Import the plugins before anything judges a name that one of them may register."""
    entry = entries.get(("plugins",))
    given = entry.value if entry is not None else []
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    directory = Path(source).parent if isinstance(source, str | Path) else None
    found = [find_plugin(name, directory) for name in names if isinstance(name, str)]
    if entry is not None and len(found) == len(names):
        entries["plugins",] = replace(entry, value=found)
    try:
        load_plugins(found)
    except ConfigError as error:
        problems.append(error)


_DEFAULTS = Config()
_KNOWN_ROOTS = get_fields(Config).keys() | DOTTED_ROOTS


def _get_default(name: str) -> Any:
    """Return the default of a leaf. Raise `KeyError` if the key is not a leaf with a default."""
    try:
        value = get_at_key(_DEFAULTS, name)
    except (AttributeError, KeyError):
        raise KeyError(name) from None
    if value is None or dataclasses.is_dataclass(value):
        raise KeyError(name)
    return value


def _without_variables(entries: ConfigEntries, used: Collection[str]) -> ConfigEntries:
    """Return entries without names that exist only to be referred to by `${}`."""
    return {
        path: entry
        for path, entry in entries.items()
        if path[0] in _KNOWN_ROOTS or is_foreign_key(path) or not (path[0] in used or entry.included)
    }


def _is_unread(path: KeyPath) -> bool:
    """Return whether a reference to nothing does no harm there: in a variable, or where nothing reads the value."""
    return is_foreign_key(path) or path[0] not in _KNOWN_ROOTS


def _without_unknown_dialect_keys(entries: ConfigEntries, problems: list[ConfigError]) -> ConfigEntries:
    """Return entries without keys of verl that nothing translates; each of those is a problem."""
    kept: ConfigEntries = {}
    for path, entry in entries.items():
        hint = suggest_dialect_key(path)
        if hint is None:
            kept[path] = entry
        else:
            problem = f"unknown key [{entry.origin}]"
            problems.append(ConfigError(problem, key=join_key(path), value=entry.value, hint=hint))
    return kept


def _without_covered_keys(entries: ConfigEntries, problems: list[ConfigError]) -> ConfigEntries:
    """Return entries none of which is below another; a value above one that the user gave is a problem."""
    empty = {path for path, entry in entries.items() if entry.value is None or entry.value == {}}
    sections = {path[:length] for path in entries.keys() - empty for length in range(1, len(path))}
    kept: ConfigEntries = {}
    for path, entry in entries.items():
        above = [path[:length] for length in range(1, len(path)) if path[:length] in entries]
        values = [other for other in above if other not in empty]
        if not values and not (path in empty and (above or path in sections)):
            kept[path] = entry
        elif values and path not in empty and not entry.origin.startswith("default of "):
            value, problem = entries[values[0]].value, f"is one value, and {join_key(path)} is given, too"
            where = f"{problem} [{entry.origin}]"
            problems.append(ConfigError(where, key=join_key(values[0]), value=value, hint="keep one of them"))
    return kept
