"""What the user wrote, as flat entries: key path → value and where it was given.

`yaml_source` reads files, `overrides` reads mappings and `key=value` lines and merges them, and `references` replaces
`${name}`. None of them knows the schema: names and types are checked later.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, TextIO

from headway.errors import ConfigError

KeyPath = tuple[str, ...]
"""Segments of a dotted key."""

Source = str | Path | TextIO | Mapping[str, Any] | None
"""A YAML file by name or open, or the same as a mapping; None is an empty one."""

DOTTED_ROOTS = frozenset({"actor_rollout_ref", "trainer", "data", "algorithm"})
"""First segments below which keys of a YAML file may be dotted at any depth; other keys only at the top."""

_NEAR, _NEAR_WORD = 0.8, 0.7
"""How alike two names, and their words, are of which one may be a mistake for the other."""
_WHOLE_REFERENCE = re.compile(r"\s*\$\{.*\}\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One value the user gave."""

    value: Any
    """Scalar, list, or empty mapping; mappings with content are several entries."""
    origin: str
    """Where it was given: `file.yaml:12`, `override`, `mapping`, or what it was translated from."""
    included: bool = False
    """Whether a file that another one includes gives it; such a file may define variables that nobody uses."""


ConfigEntries = dict[KeyPath, ConfigEntry]
"""Everything the user gave."""


def join_key(path: KeyPath) -> str:
    """Return the key as the user types it."""
    return ".".join(path)


def append_key(path: KeyPath, key: str) -> KeyPath:
    """Append `key` to `path`, split at its dots where dotted keys are allowed."""
    if not path or path[0] in DOTTED_ROOTS:
        return (*path, *key.split("."))
    return (*path, key)


def nest_values(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return the values as sections within sections."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        spot = tree
        for segment in path[:-1]:
            spot = spot.setdefault(segment, {})
        spot[path[-1]] = value
    return tree


def find_near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` may be a mistake for: alike as a whole, and in each of its words.

    Where one has more words than the other, the first words are compared. Words of two letters may differ.
    """
    for one in get_close_matches(name, [*known], 3, _NEAR):
        words, others = name.split("_"), one.split("_")
        pairs = [*zip(words, others, strict=False)]
        pairs = [pair for pair in pairs if min(map(len, pair)) > 2] if len(words) == len(others) else pairs[:1]
        if all(SequenceMatcher(None, *pair).ratio() >= _NEAR_WORD for pair in pairs):
            return one
    return None


def is_reference(value: Any) -> bool:
    """Return whether a value is one reference, which may stand for a whole section."""
    return isinstance(value, str) and _WHOLE_REFERENCE.fullmatch(value) is not None


def collect_entries(found: Iterable[tuple[KeyPath, ConfigEntry]], problems: list[ConfigError]) -> ConfigEntries:
    """Return what was found as entries, and add keys that are given twice to `problems`."""
    merged = MergedEntries()
    for path, entry in found:
        if path in merged.entries:
            where = f"{merged.entries[path].origin} and {entry.origin}"
            problems.append(ConfigError(f"{join_key(path)}: given twice, at {where} (keep one of them)"))
        merged.set(path, entry)
    return merged.entries


class MergedEntries:
    """Entries on which later ones are put: a later one replaces what stood above and below it.

    A reference above stays, because what it stands for is merged with what is given below it.
    """

    def __init__(self, entries: ConfigEntries | None = None) -> None:
        self.entries: ConfigEntries = dict(entries or {})
        self._sections = {path[:length] for path in self.entries for length in range(1, len(path))}

    def set(self, path: KeyPath, entry: ConfigEntry) -> None:
        """Put one entry on top."""
        for length in range(1, len(path)):
            above = self.entries.get(path[:length])
            if above is not None and not is_reference(above.value):
                del self.entries[path[:length]]
            self._sections.add(path[:length])
        if path in self._sections:
            for other in [other for other in self.entries if len(other) > len(path) and other[: len(path)] == path]:
                del self.entries[other]
            self._sections = {section for section in self._sections if section[: len(path)] != path}
        self.entries[path] = entry

    def has_section(self, path: KeyPath) -> bool:
        """Return whether there are entries below `path`."""
        return path in self._sections and any(other[: len(path)] == path for other in self.entries)

    def remove(self, path: KeyPath) -> None:
        """Take away an entry and those below it."""
        for other in [other for other in self.entries if other[: len(path)] == path]:
            del self.entries[other]


def is_existing_file(path: Path) -> bool:
    """Return whether there is such a file; a name that no file can have names none."""
    try:
        return path.is_file()
    except OSError:
        return False
