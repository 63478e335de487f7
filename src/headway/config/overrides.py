"""Reads a source and puts overrides on top: mappings, and `key=value` text as people paste it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.config.document import (
    ConfigEntries,
    ConfigEntry,
    KeyPath,
    MergedEntries,
    Source,
    append_key,
    collect_entries,
)
from headway.config.yaml_source import parse_yaml_value, read_yaml_file, read_yaml_text
from headway.errors import ConfigError

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]*")


def read_source(source: Source, problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries of a file or mapping, and add what cannot be read to `problems`."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return collect_entries(_walk_values(source, (), "mapping"), problems)
    if isinstance(source, str | Path):
        return read_yaml_file(Path(source), problems)
    return read_yaml_text(source.read(), getattr(source, "name", "stream"), problems)


def _walk_values(values: Mapping[Any, Any], path: KeyPath, origin: str) -> Iterator[tuple[KeyPath, ConfigEntry]]:
    for key, value in values.items():
        here = append_key(path, str(key))
        if isinstance(value, Mapping) and value:
            yield from _walk_values(value, here, origin)
        else:
            yield here, ConfigEntry(value, origin)


def apply_overrides(
    entries: ConfigEntries, overrides: Iterable[str] | Mapping[str, Any], problems: list[ConfigError]
) -> ConfigEntries:
    """Return `entries` with overrides on top. A later one wins; null takes a whole section away, as `~` does."""
    merged = MergedEntries(entries)
    if isinstance(overrides, Mapping):
        given: Iterable[tuple[str, Any]] = overrides.items()
    else:
        lines = [overrides] if isinstance(overrides, str) else overrides
        given = [pair for text in lines for pair in parse_override(text, problems)]
    for key, value in given:
        path = tuple(key.removeprefix("~").split("."))
        if key.startswith("~") or (value is None and merged.has_section(path)):
            merged.remove(path)
            continue
        children = _walk_values(value, path, "override") if isinstance(value, Mapping) and value else None
        for child_path, entry in children or [(path, ConfigEntry(value, "override"))]:
            merged.set(child_path, entry)
    return merged.entries


def parse_override(text: str, problems: list[ConfigError]) -> list[tuple[str, Any]]:
    """Parse `key=value` text as people paste it: with a leading `+`, a trailing ` \\`, comments and several lines.

    `~key` removes what was given for the key before.
    """
    pairs = []
    for raw in text.splitlines():
        line = raw.strip().removesuffix("\\").strip()
        if not line or line.startswith("#"):
            continue
        if len(line) > 1 and line[0] == line[-1] and line[0] in "\"'":
            line = line[1:-1]
        key, equals, value = line.lstrip("+").partition("=")
        key = key.strip()
        if key.startswith("~") and _KEY.fullmatch(key[1:]):
            pairs.append((key, None))
            continue
        if not equals or not _KEY.fullmatch(key) or ".." in key or key.endswith("."):
            problems.append(ConfigError(f"override {line!r} is not of the form key=value", hint="such as seed=7"))
            continue
        try:
            pairs.append((key, parse_yaml_value(value)))
        except ConfigError as error:
            problems.append(ConfigError(str(error), key=key, value=value))
    return pairs
