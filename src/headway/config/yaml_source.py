"""Reads YAML into flat entries: line numbers kept, repeated keys refused, sizes limited, files of a `defaults:` list.

Scalars are read as people mean them, not as YAML 1.1 does: `1e-6` is a number, and `010`, `1:30`, `2024_11_15`,
`2024-11-15`, `yes` and `off` are text. A number remembers how it was written, for options that are text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from headway.config.document import (
    ConfigEntries,
    ConfigEntry,
    KeyPath,
    MergedEntries,
    append_key,
    collect_entries,
    is_existing_file,
    join_key,
)
from headway.config.launch_arguments import comes_with_verl
from headway.errors import ConfigError

_MOST_BYTES, _MOST_VALUES, _DEEPEST = 1 << 18, 10_000, 60
_INCLUDES = ("defaults",)
_DEEPSPEED_FILE = re.compile(r"(?:^|/)(?P<name>deepspeed_zero(?P<stage>[123])?(?P<offload>_cpuoffload)?)(?:\.yaml)?$")


class WrittenInt(int):
    """A whole number that remembers how it was written."""

    text: str


class WrittenFloat(float):
    """A number that remembers how it was written."""

    text: str


def to_plain_numbers(value: Any) -> Any:
    """Return the same value without how its numbers were written."""
    if isinstance(value, Mapping):
        return {key: to_plain_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_numbers(part) for part in value]
    return int(value) if isinstance(value, WrittenInt) else float(value) if isinstance(value, WrittenFloat) else value


class _Loader(yaml.SafeLoader):
    """Reads what the module's docstring says."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # the base class says instance

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        kind = WrittenInt if node.tag.endswith("int") else WrittenFloat
        number = kind(node.value.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf"))
        number.text = node.value
        return number


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.nan",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def parse_yaml_value(text: str) -> Any:
    """Return the value of YAML text that is one value. Raises `ConfigError`."""
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"has {len(text):,} characters; at most {_MOST_BYTES:,} are read")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(_describe_syntax(error, "the override")) from error
    _count_values(value, [0], 0)
    return value


def read_yaml_file(path: Path, problems: list[ConfigError], including: tuple[Path, ...] = ()) -> ConfigEntries:
    """Return the entries of a file and of the files that its `defaults:` list names."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            problem = f"the file has {path.stat().st_size:,} bytes; at most {_MOST_BYTES:,} are read"
            problems.append(ConfigError(problem, key="FILE", value=str(path)))
            return {}
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "a configuration, or the directory of a run" if isinstance(error, FileNotFoundError) else ""
        problems.append(ConfigError(f"cannot read the file: {reason}", key="FILE", value=str(path), hint=hint))
        return {}
    entries = read_yaml_text(text, path.name, problems)
    return _compose(path, entries, problems, including)


def read_yaml_text(text: str, name: str, problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries of YAML text; `name` stands for the file in messages."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            problems.append(ConfigError(f"{name} holds {kind}, not `key: value` lines"))
            return {}
        return collect_entries(_Walk(loader, name, problems).walk(node, ()), problems)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(ConfigError(_describe_syntax(error, name)))
    except ConfigError as error:
        problems.append(error)
    except RecursionError:
        problems.append(ConfigError(f"{name}: not valid YAML here: an anchor contains itself, or nesting has no end"))
    finally:
        if loader is not None:
            loader.dispose()
    return {}


def _describe_syntax(error: Exception, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error) or "nesting has no end"
    where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else name
    return f"{where}: not valid YAML: {' '.join(what.split())}"


def _count_values(value: Any, count: list[int], depth: int) -> None:
    """Raise `ConfigError` if a value has too many parts, as a few aliases of aliases can have."""
    count[0] += 1
    if count[0] > _MOST_VALUES or depth > _DEEPEST:
        raise ConfigError(f"has more than {_MOST_VALUES:,} values, or sections more than {_DEEPEST} deep")
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _count_values(part, count, depth + 1)


class _Walk:
    """Walks over the nodes of one file and counts them, because aliases can make few bytes very many values."""

    def __init__(self, loader: _Loader, name: str, problems: list[ConfigError]) -> None:
        self._loader, self._name, self._problems = loader, name, problems
        self._count = 0

    def walk(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[KeyPath, ConfigEntry]]:
        """Yield every value below a section."""
        for key, child in self._list_children(node, path).items():
            here = append_key(path, key)
            if isinstance(child, yaml.MappingNode) and child.value:
                yield from self.walk(child, here)
            else:
                yield here, ConfigEntry(self._construct(child, here), f"{self._name}:{child.start_mark.line + 1}")

    def _list_children(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, yaml.Node]:
        """Return children by key, expand merge keys and report repeated keys."""
        self._add(len(path))
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines and key_node.tag != "tag:yaml.org,2002:merge":
                where = f"{self._name}:{lines[key]} and {self._name}:{line}"
                shown = join_key((*path, key))
                self._problems.append(ConfigError(f"{shown}: given twice, at {where} (keep one of them)"))
            lines[key] = line
        self._loader.flatten_mapping(node)
        return {str(key_node.value): child for key_node, child in node.value}

    def _construct(self, node: yaml.Node, path: KeyPath) -> Any:
        self._add(len(path))
        if isinstance(node, yaml.MappingNode):
            pairs = self._list_children(node, path)
            return {key: self._construct(child, (*path, key)) for key, child in pairs.items()}
        if isinstance(node, yaml.SequenceNode):
            return [self._construct(child, (*path, "[]")) for child in node.value]
        return self._loader.construct_object(node, deep=True)

    def _add(self, depth: int) -> None:
        self._count += 1
        if self._count > _MOST_VALUES or depth > _DEEPEST:
            many = f"more than {_MOST_VALUES:,} values, or sections more than {_DEEPEST} deep"
            raise ConfigError(f"{self._name} has {many}, or an anchor contains itself")


# -- composition, as Hydra does it


def _compose(
    path: Path, entries: ConfigEntries, problems: list[ConfigError], including: tuple[Path, ...]
) -> ConfigEntries:
    """Return the entries of a file with those of its `defaults:` list, which it overrides unless `_self_` says else."""
    listed = entries.pop(_INCLUDES, None)
    if listed is None:
        return entries
    items = listed.value if isinstance(listed.value, list) else [listed.value]
    if "_self_" not in items:
        items = [*items, "_self_"]
    if path.resolve() in including:
        circle = " → ".join(one.name for one in (*including, path))
        problems.append(ConfigError(f"files include each other: {circle}", key="defaults", value=path.name))
        return entries
    composed = MergedEntries()
    for item in items:
        part = entries if item == "_self_" else _include(item, path, entries, listed, problems, including)
        for key, entry in part.items():
            composed.set(key, entry)
    return composed.entries


def _include(
    item: Any,
    path: Path,
    entries: ConfigEntries,
    listed: ConfigEntry,
    problems: list[ConfigError],
    including: tuple[Path, ...],
) -> ConfigEntries:
    """Return the entries of one item of a `defaults:` list: `file`, `file@package`, or `group: file`."""
    if isinstance(item, Mapping) and len(item) == 1:
        group, option = next(iter(item.items()))
        if option is None or str(group).startswith(("override ", "hydra/")):
            return {}
        group = str(group).removeprefix("optional ").strip()
        group, at, package = group.partition("@")
        item = f"{group}/{option}{at}{package}"
    if not isinstance(item, str):
        problem = f"is not a list of files [{listed.origin}]"
        problems.append(ConfigError(problem, key="defaults", value=item, hint="such as [base@_here_, _self_]"))
        return {}
    name, _, package = item.partition("@")
    directories = [path.parent, *(including[0].parent for _ in including[:1]), *_search_path(path, entries)]
    candidates = [directory / f"{name.lstrip('/').removesuffix('.yaml')}.yaml" for directory in directories]
    found = next((one for one in candidates if is_existing_file(one)), None)
    if found is None and (shipped := _DEEPSPEED_FILE.search(name)) is not None:
        return _make_deepspeed_entries(*shipped.group("name", "stage", "offload"))
    if found is None and comes_with_verl(name, package):
        return {}
    if found is None:
        problem = f"no such file: {candidates[0]} [{listed.origin}]"
        problems.append(ConfigError(problem, key="defaults", value=item, hint="paths count from the file itself"))
        return {}
    part = read_yaml_file(found, problems, (*including, path.resolve()))
    group = tuple(name.lstrip("/").split("/")[:-1]) if not name.startswith(".") else ()
    prefix = () if package in ("_here_", "_global_") else tuple(package.split(".")) if package else group
    return {(*prefix, *key): replace(entry, included=True) for key, entry in part.items()}


def _make_deepspeed_entries(name: str, stage: str | None, offload: str | None) -> ConfigEntries:
    """Return what a file of DeepSpeed's settings says, which comes with ROLL and that examples list without need."""
    values: dict[tuple[str, ...], Any] = {("stage",): int(stage or 0)}
    if offload is not None:
        values["offload_optimizer", "device"] = "cpu"
    origin = f"{name}.yaml, which comes with ROLL"
    return {
        (name, "zero_optimization", *key): ConfigEntry(value, origin, included=True) for key, value in values.items()
    }


def _search_path(path: Path, entries: ConfigEntries) -> list[Path]:
    """Return the directories of `hydra.searchpath`."""
    given = entries.get(("hydra", "searchpath"))
    listed = given.value if given is not None and isinstance(given.value, list) else []
    return [path.parent / str(one).removeprefix("file://") for one in listed if not str(one).startswith("pkg://")]
