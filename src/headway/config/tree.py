"""From entries to the typed tree: names, types, ranges and choices are judged here, each against its field.

Every problem is collected, none hides another; a field with a problem keeps its default, so that the rest is still
judged. Relations between fields are not looked at here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from headway.config.document import Entries, Entry, KeyPath, dotted
from headway.config.schema import Config
from headway.config.shapes import Shape, fields_of, options
from headway.config.trl import HERE
from headway.errors import ConfigError

T = TypeVar("T")

Node = Entry | dict[str, Any]
"""One value, or a section of named nodes."""

_BAD = object()
_MOST_DEVICES = 1_000_000
_SAMPLING = "actor_infer.generating_args."
_RANGE_TEXT = re.compile(r"(?:list\s*\(\s*)?range\s*\(\s*([0-9,\s]*)\)\s*\)?")


def build(block: type[T], entries: Entries, problems: list[ConfigError]) -> tuple[T, dict[str, str]]:
    """The tree, and where each given leaf came from."""
    builder = _Builder(problems)
    tree: T = builder.block(block, nest(entries), ())
    return tree, builder.provenance


def nest(entries: Entries) -> dict[str, Any]:
    """Entries as sections within sections."""
    tree: dict[str, Any] = {}
    for path, entry in entries.items():
        spot = tree
        for segment in path[:-1]:
            spot = spot.setdefault(segment, {})
        spot[path[-1]] = entry
    return tree


def plain(node: Node) -> Any:
    """The values of a node without where they came from."""
    return {key: plain(child) for key, child in node.items()} if isinstance(node, dict) else node.value


def origin_of(node: Node) -> str:
    """Where a node was given; of a section, where its first value was."""
    while isinstance(node, dict):
        node = next(iter(node.values()), Entry(None, "nowhere"))
    return node.origin


class _Builder:
    """One pass over the tree; holds what is collected on the way."""

    def __init__(self, problems: list[ConfigError]) -> None:
        self._problems = problems
        self.provenance: dict[str, str] = {}

    def block(self, block: type, section: Mapping[str, Node], path: KeyPath) -> Any:
        """A dataclass from its section."""
        known = fields_of(block)
        values: dict[str, Any] = {}
        for name, node in section.items():
            if name not in known:
                self._unknown(block, (*path, name), node)
                continue
            value = self._value(known[name].shape, node, (*path, name))
            if value is not _BAD:
                values[name] = value
        for name, option in known.items():
            if option.default is dataclasses.MISSING and name not in values:
                if name not in section:
                    self._problems.append(ConfigError(f"{dotted((*path, name))}: missing ({option.shape.describe()})"))
                values[name] = None
        return block(**values)

    def _value(self, shape: Shape, node: Node, path: KeyPath) -> Any:
        if isinstance(node, Entry) and node.value is None and (shape.optional or not shape.is_leaf):
            if shape.is_leaf:
                self.provenance[dotted(path)] = node.origin
                return None
            return None if shape.optional else _BAD
        if (block := shape.block) is not None:
            return self._section(shape, node, path, lambda section: self.block(block, section, path))
        if shape.kind == "map":
            return self._section(shape, node, path, lambda section: self._mapping(shape, section, path))
        if isinstance(node, dict):
            return self._wrong("is a mapping", shape, node, path)
        value = self._leaf(shape, node.value, node, path)
        self.provenance[dotted(path)] = node.origin
        return value

    def _section(self, shape: Shape, node: Node, path: KeyPath, make: Callable[[Mapping[str, Node]], Any]) -> Any:
        if isinstance(node, Entry):
            if not isinstance(node.value, Mapping):
                return self._wrong("is not a mapping", shape, node, path)
            node = {str(key): _as_node(value, node.origin) for key, value in node.value.items()}
        return make(node)

    def _mapping(self, shape: Shape, section: Mapping[str, Node], path: KeyPath) -> Any:
        item = shape.item
        assert item is not None
        if item.kind == "any":
            self.provenance[dotted(path)] = origin_of(dict(section))
            return {key: plain(node) for key, node in section.items()}
        values = {}
        for key, node in section.items():
            empty = isinstance(node, Entry) and node.value is None and item.block is not None
            values[key] = self._value(item, {} if empty else node, (*path, key))
        if item.block is None:
            self.provenance[dotted(path)] = origin_of(dict(section))
        return {key: value for key, value in values.items() if value is not _BAD}

    def _leaf(self, shape: Shape, value: Any, node: Node, path: KeyPath) -> Any:
        if shape.kind == "list":
            return self._list(shape, value, node, path)
        if shape.block is not None:
            return self._value(shape, _as_node(value, origin_of(node)), path)
        made = _scalar(shape, value)
        if made is _BAD:
            return self._wrong(f"is not {_NOUNS[shape.kind]}", shape, node, path, value)
        if shape.range is not None and not shape.range.holds(made):
            return self._wrong("is out of range", shape, node, path, value)
        return made

    def _list(self, shape: Shape, value: Any, node: Node, path: KeyPath) -> Any:
        if shape.devices and isinstance(value, str):
            numbers = parse_devices(value)
            return self._wrong("is not a list", shape, node, path) if numbers is None else numbers
        item = shape.item
        assert item is not None
        if item.kind in ("text", "choice") and isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return self._wrong("is not a list", shape, node, path)
        made = [self._leaf(item, part, node, (*path[:-1], f"{path[-1]}[{i}]")) for i, part in enumerate(value)]
        if _BAD in made:
            return _BAD
        if shape.devices and len(set(made)) != len(made):
            return self._wrong("names a device twice", shape, node, path)
        return tuple(made)

    def _wrong(self, what: str, shape: Shape, node: Node, path: KeyPath, value: Any = _BAD) -> Any:
        given = plain(node) if value is _BAD else value
        hint = "expected " + shape.describe()
        if shape.kind == "choice" and (close := get_close_matches(str(given), shape.choices, 1)):
            hint = f"did you mean {close[0]}? {hint}"
        self._problems.append(ConfigError(f"{what} [{origin_of(node)}]", key=dotted(path), value=given, hint=hint))
        return _BAD

    def _unknown(self, block: type, path: KeyPath, node: Node) -> None:
        hint = suggestion(path, block)
        self._problems.append(
            ConfigError(f"unknown key [{origin_of(node)}]", key=dotted(path), value=plain(node), hint=hint)
        )


_NOUNS = {"bool": "true or false", "int": "an integer", "float": "a number", "text": "text", "choice": "a known name"}


def _as_node(value: Any, origin: str) -> Node:
    if isinstance(value, Mapping) and value:
        return {str(key): _as_node(child, origin) for key, child in value.items()}
    return Entry(value, origin)


def suggestion(path: KeyPath, block: type) -> str:
    """What an unknown key of `block` may have been meant to be."""
    names = list(fields_of(block))
    if len(path) == 1 and path[0] in HERE:
        return f"TRL's {path[0]} is {HERE[path[0]]} here"
    if elsewhere := _elsewhere(path):
        return f"did you mean {elsewhere}?"
    if close := get_close_matches(path[-1], names, 1, 0.6):
        return f"did you mean {dotted((*path[:-1], close[0]))}?"
    return f"known here: {', '.join(names)}" if len(names) <= 12 else "`headway config explain` lists every key"


def _elsewhere(path: KeyPath) -> str | None:
    """The key with the same last part: below the same role where there is one, else of the role that samples."""
    found = [option.key for option in options(Config) if option.key.rpartition(".")[2] == path[-1]]
    return max(found, key=lambda key: (key.startswith(f"{path[0]}."), key.startswith(_SAMPLING)), default=None)


def _scalar(shape: Shape, value: Any) -> Any:
    """`value` as the shape's Python type, or `_BAD`."""
    if shape.kind == "any":
        return value
    if shape.kind == "bool":
        return value if isinstance(value, bool) else _TEXT_BOOLS.get(value, _BAD) if isinstance(value, str) else _BAD
    if isinstance(value, bool):
        return _BAD
    if shape.kind == "choice":
        return value if value in shape.choices else _BAD
    if shape.kind == "text":
        return str(value) if isinstance(value, str | int | float) else _BAD
    return _number(shape.kind == "int", value)


_TEXT_BOOLS = {"true": True, "True": True, "false": False, "False": False}


def _number(whole: bool, value: Any) -> Any:
    if not isinstance(value, int | float | str):
        return _BAD
    try:
        if not whole or isinstance(value, str):
            value = float(value)
    except (ValueError, OverflowError):
        return _BAD
    if not whole:
        return value
    return int(value) if isinstance(value, int) or value.is_integer() else _BAD


def parse_devices(text: str) -> tuple[int, ...] | None:
    """`list(range(a,b))`, `range(a,b,step)` or `[0, 1]` as numbers, without evaluating anything."""
    match = _RANGE_TEXT.fullmatch(text.strip())
    if match and text.count("(") == text.count(")"):
        parts = [part.strip() for part in match.group(1).split(",")]
        if 1 <= len(parts) <= 3 and all(part.isdigit() for part in parts):
            bounds = [int(part) for part in parts]
            if (len(bounds) < 3 or bounds[2] > 0) and len(numbers := range(*bounds)) <= _MOST_DEVICES:
                return tuple(numbers)
    inner = text.strip().removeprefix("[").removesuffix("]")
    if text.strip().startswith("[") and all(part.strip().isdigit() for part in inner.split(",")):
        return tuple(int(part) for part in inner.split(","))
    return None
