"""Builds the typed tree from entries and checks names, types, ranges and choices, each against its field.

Every problem is collected and none hides another: a field with a problem keeps its default, so that the rest is still
checked. Relations between fields are checked in `config_checks`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from headway.config.dialect_tables import TRL_NAMES, TRL_NAMES_WITHOUT_PLACE
from headway.config.document import ConfigEntries, ConfigEntry, KeyPath, find_near_name, join_key, nest_values
from headway.config.field_types import FieldShape, get_fields, iterate_options
from headway.config.schema import Config
from headway.config.yaml_source import WrittenFloat, WrittenInt, to_plain_numbers
from headway.errors import ConfigError

T = TypeVar("T")

TreeNode = ConfigEntry | dict[str, Any]
"""One value, or a section of named nodes."""

_BAD = object()
_MOST_DEVICES = 1_000_000
_SAMPLING = "actor_infer.generating_args."
_ROLES = ("actor_train", "actor_infer", "reference", "critic", "validation")
_RANGE_TEXT = re.compile(r"(?:list\s*\(\s*)?range\s*\(\s*([0-9,\s]*)\)\s*\)?")


def build_tree(block: type[T], entries: ConfigEntries, problems: list[ConfigError]) -> tuple[T, dict[str, str]]:
    """Return the tree, and where each given leaf came from."""
    builder = _Builder(problems)
    tree: T = builder.build_block(block, nest_values(entries), ())
    return tree, builder.provenance


def node_to_value(node: TreeNode) -> Any:
    """Return the values of a node without where they came from."""
    return {key: node_to_value(child) for key, child in node.items()} if isinstance(node, dict) else node.value


def get_origin(node: TreeNode) -> str:
    """Return where a node was given. A section was given where its first value was."""
    while isinstance(node, dict):
        node = next(iter(node.values()), ConfigEntry(None, "an empty section"))
    return node.origin


class _Builder:
    """Makes one pass over the tree and holds what is collected on the way."""

    def __init__(self, problems: list[ConfigError]) -> None:
        self._problems = problems
        self.provenance: dict[str, str] = {}

    def build_block(self, block: type, section: Mapping[str, TreeNode], path: KeyPath) -> Any:
        """Make a dataclass from its section."""
        known = get_fields(block)
        values: dict[str, Any] = {}
        for name, node in section.items():
            if name not in known:
                self._report_unknown_key(block, (*path, name), node)
                continue
            value = self._build_value(known[name].shape, node, (*path, name))
            if value is not _BAD:
                values[name] = value
        for name, option in known.items():
            if option.default is dataclasses.MISSING and name not in values:
                if name not in section:
                    self._problems.append(
                        ConfigError(f"{join_key((*path, name))}: missing ({option.shape.describe()})")
                    )
                values[name] = None
        return block(**values)

    def _build_value(self, shape: FieldShape, node: TreeNode, path: KeyPath) -> Any:
        if isinstance(node, ConfigEntry) and node.value is None and (shape.optional or not shape.is_leaf):
            if shape.is_leaf:
                self.provenance[join_key(path)] = node.origin
                return None
            return None if shape.optional else _BAD
        if (block := shape.block) is not None:
            return self._build_section(shape, node, path, lambda section: self.build_block(block, section, path))
        if shape.kind == "map":
            return self._build_section(shape, node, path, lambda section: self._build_mapping(shape, section, path))
        if isinstance(node, dict):
            return self._report_wrong_value("is a mapping", shape, node, path)
        value = self._build_leaf(shape, node.value, node, path)
        self.provenance[join_key(path)] = node.origin
        return value

    def _build_section(
        self, shape: FieldShape, node: TreeNode, path: KeyPath, make: Callable[[Mapping[str, TreeNode]], Any]
    ) -> Any:
        if isinstance(node, ConfigEntry):
            if not isinstance(node.value, Mapping):
                return self._report_wrong_value("is not a mapping", shape, node, path)
            node = {str(key): _make_node(value, node.origin) for key, value in node.value.items()}
        return make(node)

    def _build_mapping(self, shape: FieldShape, section: Mapping[str, TreeNode], path: KeyPath) -> Any:
        item = shape.item
        assert item is not None
        if item.kind == "any":
            self.provenance[join_key(path)] = get_origin(dict(section))
            return {key: to_plain_numbers(node_to_value(node)) for key, node in section.items()}
        values = {}
        for key, node in section.items():
            empty = isinstance(node, ConfigEntry) and node.value is None and item.block is not None
            values[key] = self._build_value(item, {} if empty else node, (*path, key))
        if item.block is None:
            self.provenance[join_key(path)] = get_origin(dict(section))
        return {key: value for key, value in values.items() if value is not _BAD}

    def _build_leaf(self, shape: FieldShape, value: Any, node: TreeNode, path: KeyPath) -> Any:
        if shape.kind == "list":
            return self._build_list(shape, value, node, path)
        if shape.block is not None:
            return self._build_value(shape, _make_node(value, get_origin(node)), path)
        converted = _convert_scalar(shape, value)
        if converted is _BAD:
            return self._report_wrong_value(f"is not {_NOUNS[shape.kind]}", shape, node, path, value)
        if shape.range is not None and not shape.range.holds(converted):
            return self._report_wrong_value("is out of range", shape, node, path, value)
        return converted

    def _build_list(self, shape: FieldShape, value: Any, node: TreeNode, path: KeyPath) -> Any:
        if shape.devices and isinstance(value, str):
            numbers = parse_devices(value)
            return self._report_wrong_value("is not a list", shape, node, path) if numbers is None else numbers
        item = shape.item
        assert item is not None
        if item.kind in ("text", "choice") and isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return self._report_wrong_value("is not a list", shape, node, path)
        converted = [
            self._build_leaf(item, part, node, (*path[:-1], f"{path[-1]}[{i}]")) for i, part in enumerate(value)
        ]
        if _BAD in converted:
            return _BAD
        if shape.devices and len(set(converted)) != len(converted):
            return self._report_wrong_value("names a device twice", shape, node, path)
        return tuple(converted)

    def _report_wrong_value(
        self, what: str, shape: FieldShape, node: TreeNode, path: KeyPath, value: Any = _BAD
    ) -> Any:
        given = node_to_value(node) if value is _BAD else value
        hint = "expected " + shape.describe()
        if shape.kind == "choice":
            hint = _suggest_choice(str(given), shape) + hint
        self._problems.append(ConfigError(f"{what} [{get_origin(node)}]", key=join_key(path), value=given, hint=hint))
        return _BAD

    def _report_unknown_key(self, block: type, path: KeyPath, node: TreeNode) -> None:
        hint = suggest_key(path, block, node)
        self._problems.append(
            ConfigError(f"unknown key [{get_origin(node)}]", key=join_key(path), value=node_to_value(node), hint=hint)
        )


_NOUNS = {"bool": "true or false", "int": "an integer", "float": "a number", "text": "text", "choice": "a known name"}


def _make_node(value: Any, origin: str) -> TreeNode:
    if isinstance(value, Mapping) and value:
        return {str(key): _make_node(child, origin) for key, child in value.items()}
    return ConfigEntry(value, origin)


def suggest_key(path: KeyPath, block: type, node: TreeNode) -> str:
    """Return a hint which key an unknown key of `block` may have been meant to be."""
    names = list(get_fields(block))
    if len(path) == 1 and path[0] in TRL_NAMES:
        return f"TRL's {path[0]} is {TRL_NAMES[path[0]]} here"
    if len(path) == 1 and path[0] in TRL_NAMES_WITHOUT_PLACE:
        return f"nothing here takes the place of TRL's {path[0]}: {TRL_NAMES_WITHOUT_PLACE[path[0]]}"
    leaf = path
    while isinstance(node, dict) and node:
        name, node = next(iter(node.items()))
        leaf = (*leaf, name)
    if similar := _find_key_with_same_ending(leaf):
        return f"did you mean {similar}?"
    if close := find_near_name(path[-1], names):
        return f"did you mean {join_key((*path[:-1], close))}?"
    endings = {option.key.rpartition(".")[2] for option in iterate_options(Config)}
    if (close := find_near_name(leaf[-1], endings)) and (similar := _find_key_with_same_ending((*leaf[:-1], close))):
        return f"did you mean {similar}?"
    return f"known here: {', '.join(names)}" if len(names) <= 12 else "`headway config explain` lists every key"


def _find_key_with_same_ending(path: KeyPath) -> str | None:
    """Return the known key with the same last part.

    A key below a section of ours leads to keys below the same section, and a key below roles to those of other roles.
    Any other key leads to one at the top or below a role, unless its last part is one that many sections have.
    """
    found = [option.key for option in iterate_options(Config) if option.key.rpartition(".")[2] == path[-1]]
    roots = _ROLES if path[0] in _ROLES else (path[0],) if path[0] in get_fields(Config) else (*_ROLES, "rewards")
    own = len(path) > 1 and path[0] in get_fields(Config)
    found = [key for key in found if key.split(".")[0] in roots or ("." not in key and not own)]
    if not own and path[-1] in _COMMON_ENDINGS:
        return None
    below_role = "." + join_key(path[1:])
    return max(
        found,
        key=lambda key: (
            key.startswith(f"{path[0]}."),
            "." not in key,
            key.endswith(below_role),
            key.startswith(_SAMPLING),
        ),
        default=None,
    )


_COMMON_ENDINGS = frozenset(
    {"name", "path", "enabled", "kind", "args", "address", "url", "seed", "directory", "mean", "std", "type", "weight"}
)


def _suggest_choice(given: str, shape: FieldShape) -> str:
    """Return a hint at the name that may have been meant, or at the key that takes this name."""
    others = [option for option in iterate_options(Config) if option.shape.registry not in (None, shape.registry)]
    for option in others if shape.registry is not None else ():
        if given in option.shape.choices:
            return f"{given} is a value of {option.key}; "
    alike = [name for name in shape.choices if name[:1] == given[:1]]  # names are short, and mistakes come later
    close = get_close_matches(given, alike, 1, 0.65)
    return f"did you mean {close[0]}? " if close else ""


def _convert_scalar(shape: FieldShape, value: Any) -> Any:
    """Return `value` as the shape's Python type, or `_BAD`."""
    if shape.kind == "any":
        return to_plain_numbers(value)
    if shape.kind == "bool":
        return value if isinstance(value, bool) else _TEXT_BOOLS.get(value, _BAD) if isinstance(value, str) else _BAD
    if isinstance(value, bool):
        return _BAD
    if shape.kind == "choice":
        return value if value in shape.choices else _BAD
    if shape.kind == "text":
        return _get_text(value) if isinstance(value, str | int | float) else _BAD
    return _convert_number(shape.kind == "int", value)


_TEXT_BOOLS = {
    word: word.lower() in ("true", "yes", "on")
    for low in ("true", "false", "yes", "no", "on", "off")
    for word in (low, low.title(), low.upper())
}


def _get_text(value: str | int | float) -> str:
    """Return text as it was written: `1.10` is not `1.1`."""
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else str(value)


def _convert_number(whole: bool, value: Any) -> Any:
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
    """Parse `list(range(a,b))`, `range(a,b,step)`, `[0, 1]`, `list([0, 1])` and sums of them, evaluating nothing."""
    if "+" in text:
        lists = [parse_devices(part) for part in text.split("+")]
        return None if None in lists else tuple(number for part in lists for number in part or ())
    text = text.strip()
    if text.startswith("list") and text.endswith(")") and text[4:].lstrip().startswith("(["):
        text = text[4:].strip()[1:-1].strip()
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
