"""From a file, a mapping and overrides to a configuration that can run.

    read → overrides → ${} → foreign keys aside → second dialect translated → typed tree → derived → checked

Problems are collected along the way and raised together as `ConfigErrors`; arithmetic is judged only once every
single value is right. Notes, in contrast, do not stop anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headway.config.cautions import caution
from headway.config.checks import check
from headway.config.derive import derive
from headway.config.dialect import suggest, translate
from headway.config.document import DOTTED_ROOTS, Entries, Source, apply_overrides, dotted, read
from headway.config.draft import Draft, value_at
from headway.config.foreign import is_foreign, set_aside
from headway.config.interpolate import interpolate
from headway.config.resolved import Resolved, leaves
from headway.config.schema import Config
from headway.config.shapes import fields_of
from headway.config.strategies import BUILT_IN
from headway.config.tree import build
from headway.errors import ConfigError, ConfigErrors


def load(
    source: Source = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    available: Collection[str] = BUILT_IN,
) -> Resolved:
    """The configuration in `source` (a YAML file by name or open, or a mapping) with `overrides` on top.

    `available` names the back ends this build can serve. Raises `ConfigErrors` with every problem found.
    """
    problems: list[ConfigError] = []
    notes: list[str] = []
    entries = apply_overrides(read(source, problems), overrides, problems)
    entries, used = interpolate(entries, _default_of, problems, unread=is_foreign)
    entries = set_aside(_without_variables(entries, used), notes, problems)
    translation = translate(entries, notes, problems)
    config, provenance = build(Config, _without_strangers(translation.entries, problems), problems)
    if problems:
        raise ConfigErrors(problems)
    draft = Draft(config, provenance, notes)
    derived = derive(draft, translation.mini_batch_groups, available)
    check(draft, derived)
    if draft.problems:
        raise ConfigErrors(draft.problems)
    caution(draft, derived)
    where = {key: draft.provenance.get(key, "default") for key, _ in leaves(draft.config)}
    return Resolved(config=draft.config, derived=derived, provenance=where, notes=tuple(notes))


_DEFAULTS = Config()


def _default_of(name: str) -> Any:
    """The schema's default of a leaf; `KeyError` where there is none to speak of."""
    try:
        value = value_at(_DEFAULTS, name)
    except (AttributeError, KeyError):
        raise KeyError(name) from None
    if value is None or dataclasses.is_dataclass(value):
        raise KeyError(name)
    return value


def _without_variables(entries: Entries, used: Collection[str]) -> Entries:
    """Entries without names that exist only to be referred to by `${}`."""
    known = fields_of(Config).keys() | DOTTED_ROOTS
    return {path: entry for path, entry in entries.items() if path[0] in known or path[0] not in used}


def _without_strangers(entries: Entries, problems: list[ConfigError]) -> Entries:
    """Entries without keys of the second dialect that nothing translates; each of those is a problem."""
    kept: Entries = {}
    for path, entry in entries.items():
        hint = suggest(path)
        if hint is None:
            kept[path] = entry
        else:
            problem = f"unknown key [{entry.origin}]"
            problems.append(ConfigError(problem, key=dotted(path), value=entry.value, hint=hint))
    return kept
