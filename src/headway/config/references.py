"""Replaces references `${name}` in the values that the user gave.

A reference may name a value, a whole section, or one relative to where it stands (`${.name}` is beside it, `${..name}`
one section above). A section that is referred to is merged with what is given below the reference. Of OmegaConf's
functions `oc.env`, `oc.select` and `now` are read.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from headway.config.document import ConfigEntries, ConfigEntry, KeyPath, is_reference, join_key, nest_values
from headway.errors import ConfigError

_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_NAME = re.compile(r"\.*[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_FUNCTION = re.compile(r"\s*(oc\.env|oc\.select|now)\s*:([^,]*)(?:,(.*))?", re.DOTALL)
_LONGEST_CHAIN = 100
_MISSING = object()


def resolve_references(
    entries: ConfigEntries,
    default_of: Callable[[str], Any],
    problems: list[ConfigError],
    unread: Callable[[KeyPath], bool] = lambda path: False,
) -> tuple[ConfigEntries, frozenset[str]]:
    """Return entries without references, and the first segments of the names that were referred to.

    A reference to an unknown name is no problem in an entry that is `unread`, nor in a variable that nothing uses.
    """
    resolver = _Resolver(entries, default_of)
    values: dict[KeyPath, ConfigEntry] = {}
    failed: dict[KeyPath, ConfigError] = {}
    for path, entry in entries.items():
        try:
            values[path] = replace(entry, value=resolver.value_at(path))
        except ConfigError as error:
            failed[path] = error
    cycles: set[frozenset[KeyPath]] = set()
    for path, problem in failed.items():
        if unread(path):
            values[path] = entries[path]
        elif not isinstance(problem, _Cycle):
            problems.append(problem)
        elif problem.members not in cycles:
            cycles.add(problem.members)
            problems.append(problem)
    return _flatten_sections(entries, values), frozenset(resolver.used)


def _flatten_sections(entries: ConfigEntries, values: Mapping[KeyPath, ConfigEntry]) -> ConfigEntries:
    """Return the values with every section that came through a reference as leaves; what is given below it wins."""
    resolved: ConfigEntries = {}
    for path, entry in sorted(values.items(), key=lambda item: len(item[0])):
        if isinstance(entry.value, Mapping) and entry.value and is_reference(entries[path].value):
            for below, value in _list_leaves(entry.value, path):
                resolved[below] = replace(entry, value=value)
        else:
            resolved[path] = entry
    order = {path: number for number, path in enumerate(entries)}
    last = len(order)
    return dict(sorted(resolved.items(), key=lambda item: order.get(item[0], last)))


def _list_leaves(section: Mapping[str, Any], path: KeyPath) -> list[tuple[KeyPath, Any]]:
    found: list[tuple[KeyPath, Any]] = []
    for key, value in section.items():
        here = (*path, str(key))
        found += _list_leaves(value, here) if isinstance(value, Mapping) and value else [(here, value)]
    return found


class _Cycle(ConfigError):
    """Values that refer to each other in a circle. A circle is reported once."""

    def __init__(self, circle: list[KeyPath], entry: ConfigEntry) -> None:
        self.members = frozenset(circle)
        shown = " → ".join(join_key(path) for path in (*circle, circle[0]))
        hint = "give one of them a value of its own"
        problem = f"refers to itself: {shown} [{entry.origin}]"
        super().__init__(problem, key=join_key(circle[0]), value=entry.value, hint=hint)


class _Resolver:
    """Resolves references depth first, with a stack that shows circles."""

    def __init__(self, entries: ConfigEntries, default_of: Callable[[str], Any]) -> None:
        self._entries = entries
        self._sections = {path[:length] for path in entries for length in range(1, len(path))}
        self._default_of = default_of
        self._done: dict[KeyPath, Any] = {}
        self._failed: dict[KeyPath, ConfigError] = {}
        self._stack: list[KeyPath] = []
        self.used: set[str] = set()

    def value_at(self, path: KeyPath) -> Any:
        """Return the resolved value of an entry."""
        if path in self._done:
            return self._done[path]
        if path in self._failed:
            raise self._failed[path]
        entry = self._entries[path]
        if path in self._stack:
            raise _Cycle(self._stack[self._stack.index(path) :], entry)
        if len(self._stack) >= _LONGEST_CHAIN:
            problem = f"is the end of a chain of more than {_LONGEST_CHAIN} references [{entry.origin}]"
            raise ConfigError(problem, key=join_key(path), value=entry.value, hint="write the value here")
        self._stack.append(path)
        try:
            self._done[path] = self._expand(entry.value, entry)
        except ConfigError as error:
            self._failed[path] = error
            raise
        finally:
            self._stack.pop()
        return self._done[path]

    def _expand(self, value: Any, entry: ConfigEntry) -> Any:
        if isinstance(value, str):
            return self._expand_text(value, entry)
        if isinstance(value, Mapping):
            return {key: self._expand(item, entry) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._expand(item, entry) for item in value]
        return value

    def _expand_text(self, text: str, entry: ConfigEntry) -> Any:
        for _ in range(_LONGEST_CHAIN):
            whole = _REFERENCE.fullmatch(text.strip())
            if whole:
                return self._look_up(whole.group(1), entry)
            expanded = _REFERENCE.sub(lambda match: str(self._look_up(match.group(1), entry)), text)
            if expanded == text:
                break
            text = expanded
        return text.replace("\\${", "${")

    def _look_up(self, text: str, entry: ConfigEntry) -> Any:
        name, otherwise = text.strip(), _MISSING
        if function := _FUNCTION.fullmatch(text):
            argument, default = function[2].strip(), function[3]
            otherwise = _MISSING if default is None else _parse_default(default)
            if function[1] == "now":
                return datetime.now().strftime(function[2])
            if function[1] == "oc.env":
                return self._read_variable(argument, otherwise, entry)
            name, otherwise = argument, None if default is None else otherwise
        if not _NAME.fullmatch(name):
            self._refuse(f"${{{text}}} is not a name", entry, "${name}, ${a.b}, ${.beside}, ${oc.env:NAME,default}")
        value = self._find(self._make_absolute(name, entry))
        if value is not _MISSING:
            return value
        try:
            return self._default_of(name)
        except KeyError:
            if otherwise is _MISSING:
                self._refuse(f"${{{text}}} names nothing that is set", entry, f"set {name}, or write the value here")
            return otherwise

    def _make_absolute(self, name: str, entry: ConfigEntry) -> KeyPath:
        """Return the path of a name; leading dots count from the section that the reference stands in."""
        plain = name.lstrip(".")
        dots, here = len(name) - len(plain), self._stack[-1]
        if dots > len(here):
            self._refuse(f"${{{name}}} is above the top", entry, "fewer dots")
        return (*here[: len(here) - dots], *plain.split(".")) if dots else tuple(plain.split("."))

    def _find(self, path: KeyPath) -> Any:
        """Return the value or section at `path`, looking through references to sections above it."""
        self.used.add(path[0])
        value = self.value_at(path) if path in self._entries else _MISSING
        if path in self._sections:
            below = {
                other[len(path) :]: self.value_at(other)
                for other in self._entries
                if len(other) > len(path) and other[: len(path)] == path
            }
            return _merge_sections(value, nest_values(below)) if isinstance(value, Mapping) else nest_values(below)
        if value is not _MISSING or len(path) == 1:
            return value
        for length in range(len(path) - 1, 0, -1):
            if path[:length] in self._entries and is_reference(self._entries[path[:length]].value):
                section = self.value_at(path[:length])
                for segment in path[length:]:
                    section = section.get(segment, _MISSING) if isinstance(section, Mapping) else _MISSING
                return section
        return _MISSING

    def _read_variable(self, name: str, otherwise: Any, entry: ConfigEntry) -> Any:
        if name not in os.environ and otherwise is _MISSING:
            self._refuse(f"the environment has no variable {name}", entry, f"export {name}=…, or ${{oc.env:{name},…}}")
        return os.environ.get(name, otherwise)

    def _refuse(self, problem: str, entry: ConfigEntry, hint: str) -> None:
        key = join_key(self._stack[-1])
        raise ConfigError(f"{problem} [{entry.origin}]", key=key, value=entry.value, hint=hint)


def _parse_default(text: str) -> Any:
    """Return the default of a function: a number, true, false, null, or text."""
    plain = text.strip()
    known = {"null": None, "true": True, "false": False}
    if plain.lower() in known:
        return known[plain.lower()]
    for number in (int, float):
        try:
            return number(plain)
        except ValueError:
            continue
    return plain.strip("'\"")


def _merge_sections(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge_sections(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
