"""`${name}` and `${a.b}`: values that stand for other values.

A text that is one reference becomes the value itself, with its type; a reference inside a longer text becomes
text. Names are looked up among what the user gave, then among the schema's defaults. Nothing is evaluated and the
process environment is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headway.config.document import Entries, Entry, KeyPath, dotted
from headway.errors import ConfigError

_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")


def interpolate(
    entries: Entries,
    default_of: Callable[[str], Any],
    problems: list[ConfigError],
    unread: Callable[[KeyPath], bool] = lambda path: False,
) -> tuple[Entries, frozenset[str]]:
    """Entries without references, and the first segments of the names that were referred to.

    Where `unread` says that nobody reads an entry, a reference in it that leads nowhere is no problem.
    """
    resolver = _Resolver(entries, default_of)
    resolved: Entries = {}
    cycles: set[frozenset[KeyPath]] = set()
    for path, entry in entries.items():
        try:
            resolved[path] = Entry(resolver.value_at(path), entry.origin)
        except ConfigError as problem:
            if unread(path):
                resolved[path] = entry
            elif not isinstance(problem, _Cycle):
                problems.append(problem)
            elif problem.members not in cycles:
                cycles.add(problem.members)
                problems.append(problem)
    return resolved, frozenset(resolver.used)


class _Cycle(ConfigError):
    """Values that stand for each other; reported once, however many of them are looked at."""

    def __init__(self, circle: list[KeyPath], entry: Entry) -> None:
        self.members = frozenset(circle)
        shown = " → ".join(dotted(path) for path in (*circle, circle[0]))
        hint = "give one of them a value of its own"
        problem = f"refers to itself: {shown} [{entry.origin}]"
        super().__init__(problem, key=dotted(circle[0]), value=entry.value, hint=hint)


class _Resolver:
    """Depth-first resolution with a stack, so that a cycle is seen and named."""

    def __init__(self, entries: Entries, default_of: Callable[[str], Any]) -> None:
        self._entries = entries
        self._default_of = default_of
        self._done: dict[KeyPath, Any] = {}
        self._stack: list[KeyPath] = []
        self.used: set[str] = set()

    def value_at(self, path: KeyPath) -> Any:
        """The resolved value of an entry."""
        if path in self._done:
            return self._done[path]
        entry = self._entries[path]
        if path in self._stack:
            raise _Cycle(self._stack[self._stack.index(path) :], entry)
        self._stack.append(path)
        try:
            self._done[path] = self._expanded(entry.value, entry)
        finally:
            self._stack.pop()
        return self._done[path]

    def _expanded(self, value: Any, entry: Entry) -> Any:
        if isinstance(value, str):
            return self._expanded_text(value, entry)
        if isinstance(value, Mapping):
            return {key: self._expanded(item, entry) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._expanded(item, entry) for item in value]
        return value

    def _expanded_text(self, text: str, entry: Entry) -> Any:
        whole = _REFERENCE.fullmatch(text.strip())
        if whole:
            return self._looked_up(whole.group(1), entry)
        expanded = _REFERENCE.sub(lambda match: str(self._looked_up(match.group(1), entry)), text)
        return expanded.replace("\\${", "${")

    def _looked_up(self, name: str, entry: Entry) -> Any:
        key = dotted(self._stack[-1])
        if not _NAME.fullmatch(name.strip()):
            raise ConfigError(
                f"${{{name}}} is not a name [{entry.origin}]",
                key=key,
                value=entry.value,
                hint="${name} or ${a.b}; functions and environment variables are not read",
            )
        path = tuple(name.strip().split("."))
        self.used.add(path[0])
        if path in self._entries:
            return self.value_at(path)
        below = {other: other[len(path) :] for other in self._entries if other[: len(path)] == path}
        if below:
            return _nested({rest: self.value_at(other) for other, rest in below.items()})
        try:
            return self._default_of(name.strip())
        except KeyError:
            raise ConfigError(
                f"${{{name}}} names nothing that is set [{entry.origin}]",
                key=key,
                value=entry.value,
                hint=f"set {name.strip()}, or write the value here",
            ) from None


def _nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        spot = tree
        for segment in path[:-1]:
            spot = spot.setdefault(segment, {})
        spot[path[-1]] = value
    return tree
