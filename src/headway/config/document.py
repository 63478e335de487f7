"""Reads what the user wrote into flat entries: key path → value and where it was given.

Reads YAML files (line numbers kept, repeated keys refused), mappings and `key=value` overrides, and merges them.
Replaces references `${name}`. Knows nothing of the schema: names and types are checked later.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from headway.errors import ConfigError

KeyPath = tuple[str, ...]
"""Segments of a dotted key."""

Source = str | Path | TextIO | Mapping[str, Any] | None
"""A YAML file by name or open, or the same as a mapping; None is an empty one."""

DOTTED_ROOTS = frozenset({"actor_rollout_ref", "trainer", "data", "algorithm"})
"""First segments below which keys of a YAML file may be dotted at any depth; other keys only at the top."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]*")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+")


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One value the user gave."""

    value: Any
    """Scalar, list, or empty mapping; mappings with content are several entries."""
    origin: str
    """Where it was given: `file.yaml:12`, `override`, `mapping`, or what it was translated from."""


ConfigEntries = dict[KeyPath, ConfigEntry]
"""Everything the user gave."""


def join_key(path: KeyPath) -> str:
    """Return the key as the user types it."""
    return ".".join(path)


def nest_values(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return the values as sections within sections."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        spot = tree
        for segment in path[:-1]:
            spot = spot.setdefault(segment, {})
        spot[path[-1]] = value
    return tree


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1, except that `1e-6` is a number, as in every other format."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_source(source: Source, problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries of a file or mapping, and add what cannot be read to `problems`."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return _collect_entries(_walk_values(source, (), "mapping"), problems)
    if isinstance(source, str | Path):
        try:
            return read_yaml_text(Path(source).read_text(encoding="utf-8"), Path(source).name, problems)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.append(ConfigError(f"cannot read the file: {reason}", key="FILE", value=str(source)))
            return {}
    return read_yaml_text(source.read(), getattr(source, "name", "stream"), problems)


def read_yaml_text(text: str, name: str, problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries of YAML text; `name` stands for the file in messages."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            problems.append(ConfigError(f"{name} holds {kind}, not `key: value` lines"))
            return {}
        return _collect_entries(_walk_nodes(loader, node, (), name, problems), problems)
    except yaml.YAMLError as error:
        problems.append(ConfigError(_syntax_message(error, name)))
        return {}
    except RecursionError:
        problems.append(ConfigError(f"{name}: not valid YAML here: an anchor contains itself, or nesting has no end"))
        return {}
    finally:
        loader.dispose()


def _syntax_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else name
    return f"{where}: not valid YAML: {what}"


def _append_key(path: KeyPath, key: str) -> KeyPath:
    """Append `key` to `path`, split at its dots where dotted keys are allowed."""
    if not path or path[0] in DOTTED_ROOTS:
        return (*path, *key.split("."))
    return (*path, key)


def _walk_nodes(
    loader: _Loader, node: yaml.MappingNode, path: KeyPath, name: str, problems: list[ConfigError]
) -> Iterator[tuple[KeyPath, ConfigEntry]]:
    for key, child in _list_children(loader, node, path, name, problems).items():
        here = _append_key(path, key)
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _walk_nodes(loader, child, here, name, problems)
        else:
            value = _construct_value(loader, child, here, name, problems)
            yield here, ConfigEntry(value, f"{name}:{child.start_mark.line + 1}")


def _list_children(
    loader: _Loader, node: yaml.MappingNode, path: KeyPath, name: str, problems: list[ConfigError]
) -> dict[str, yaml.Node]:
    """Return children by key, expand merge keys and report repeated keys."""
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines and key_node.tag != "tag:yaml.org,2002:merge":
            where = f"{name}:{lines[key]} and {name}:{line}"
            problems.append(ConfigError(f"{join_key((*path, key))}: given twice, at {where} (keep one of them)"))
        lines[key] = line
    loader.flatten_mapping(node)
    return {str(key_node.value): child for key_node, child in node.value}


def _construct_value(loader: _Loader, node: yaml.Node, path: KeyPath, name: str, problems: list[ConfigError]) -> Any:
    if isinstance(node, yaml.MappingNode):
        pairs = _list_children(loader, node, path, name, problems)
        return {key: _construct_value(loader, child, (*path, key), name, problems) for key, child in pairs.items()}
    if isinstance(node, yaml.SequenceNode):
        return [_construct_value(loader, child, path, name, problems) for child in node.value]
    return loader.construct_object(node, deep=True)


def _walk_values(values: Mapping[Any, Any], path: KeyPath, origin: str) -> Iterator[tuple[KeyPath, ConfigEntry]]:
    for key, value in values.items():
        here = _append_key(path, str(key))
        if isinstance(value, Mapping) and value:
            yield from _walk_values(value, here, origin)
        else:
            yield here, ConfigEntry(value, origin)


def _collect_entries(found: Iterable[tuple[KeyPath, ConfigEntry]], problems: list[ConfigError]) -> ConfigEntries:
    entries: ConfigEntries = {}
    for path, entry in found:
        if path in entries:
            where = f"{entries[path].origin} and {entry.origin}"
            problems.append(ConfigError(f"{join_key(path)}: given twice, at {where} (keep one of them)"))
        _set_entry(entries, path, entry)
    return entries


def _set_entry(entries: ConfigEntries, path: KeyPath, entry: ConfigEntry) -> None:
    """Set one entry, and remove entries above and below it."""
    for length in range(1, len(path)):
        entries.pop(path[:length], None)
    for other in [other for other in entries if len(other) > len(path) and other[: len(path)] == path]:
        del entries[other]
    entries[path] = entry


def apply_overrides(
    entries: ConfigEntries, overrides: Iterable[str] | Mapping[str, Any], problems: list[ConfigError]
) -> ConfigEntries:
    """Return `entries` with overrides on top. A later override wins over an earlier one."""
    merged = dict(entries)
    if isinstance(overrides, Mapping):
        given: Iterable[tuple[str, Any]] = overrides.items()
    else:
        lines = [overrides] if isinstance(overrides, str) else overrides
        given = [pair for text in lines for pair in parse_override(text, problems)]
    for key, value in given:
        path = tuple(key.split("."))
        children = _walk_values(value, path, "override") if isinstance(value, Mapping) and value else None
        for child_path, entry in children or [(path, ConfigEntry(value, "override"))]:
            _set_entry(merged, child_path, entry)
    return merged


def parse_override(text: str, problems: list[ConfigError]) -> list[tuple[str, Any]]:
    """Parse `key=value` text as people paste it: with a leading `+`, a trailing ` \\`, comments and several lines."""
    pairs = []
    for raw in text.splitlines():
        line = raw.strip().removesuffix("\\").strip()
        if not line or line.startswith("#"):
            continue
        if len(line) > 1 and line[0] == line[-1] and line[0] in "\"'":
            line = line[1:-1]
        key, equals, value = line.lstrip("+").partition("=")
        key = key.strip()
        if not equals or not _KEY.fullmatch(key) or ".." in key or key.endswith("."):
            problems.append(ConfigError(f"override {line!r} is not of the form key=value", hint="such as seed=7"))
            continue
        try:
            pairs.append((key, yaml.load(value, _Loader)))
        except yaml.YAMLError as error:
            problems.append(ConfigError(_syntax_message(error, "the override"), key=key, value=value))
    return pairs


_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")


def resolve_references(
    entries: ConfigEntries,
    default_of: Callable[[str], Any],
    problems: list[ConfigError],
    unread: Callable[[KeyPath], bool] = lambda path: False,
) -> tuple[ConfigEntries, frozenset[str]]:
    """Return entries without references, and the first segments of the names that were referred to.

    A reference to an unknown name is no problem in an entry that is `unread`.
    """
    resolver = _Resolver(entries, default_of)
    resolved: ConfigEntries = {}
    cycles: set[frozenset[KeyPath]] = set()
    for path, entry in entries.items():
        try:
            resolved[path] = ConfigEntry(resolver.value_at(path), entry.origin)
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
        self._default_of = default_of
        self._done: dict[KeyPath, Any] = {}
        self._stack: list[KeyPath] = []
        self.used: set[str] = set()

    def value_at(self, path: KeyPath) -> Any:
        """Return the resolved value of an entry."""
        if path in self._done:
            return self._done[path]
        entry = self._entries[path]
        if path in self._stack:
            raise _Cycle(self._stack[self._stack.index(path) :], entry)
        self._stack.append(path)
        try:
            self._done[path] = self._expand(entry.value, entry)
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
        whole = _REFERENCE.fullmatch(text.strip())
        if whole:
            return self._look_up(whole.group(1), entry)
        expanded = _REFERENCE.sub(lambda match: str(self._look_up(match.group(1), entry)), text)
        return expanded.replace("\\${", "${")

    def _look_up(self, name: str, entry: ConfigEntry) -> Any:
        key = join_key(self._stack[-1])
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
            return nest_values({rest: self.value_at(other) for other, rest in below.items()})
        try:
            return self._default_of(name.strip())
        except KeyError:
            raise ConfigError(
                f"${{{name}}} names nothing that is set [{entry.origin}]",
                key=key,
                value=entry.value,
                hint=f"set {name.strip()}, or write the value here",
            ) from None
