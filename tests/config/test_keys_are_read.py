"""Every key of the schema is read somewhere outside the schema: by attribute of the right type, or by its dotted key.

The test follows values of configuration types through the syntax tree of the package: parameters and attributes by
their annotations, variables by what is assigned to them, loops by what they run over. So a key of one role does not
count as read because another role has a key of the same name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import headway
from headway.config import ResolvedConfig
from headway.config.field_types import get_fields
from headway.config.resolved_config import ConfigDraft
from headway.config.schema import Config

SOURCE = Path(headway.__file__).parent
ROLES = ("actor_train", "actor_infer", "reference", "critic")
"""Keys of these may be made from the name of the role, as in `f"{role}.device_mapping"`."""
SCHEMA = {"schema.py", "roles.py", "config_blocks.py", "simulation_config.py"}
Types = frozenset[str]
NONE: Types = frozenset()
PASSING_ON = {"replace", "enumerate", "filter", "list", "tuple", "dict", "sorted", "zip"}
"""Functions that return what they are given, or something made of it."""


def schema_types(block: type) -> dict[str, type]:
    """Every dataclass of the tree below `block`, its bases included, by name."""
    found = {base.__name__: base for base in block.__mro__ if is_dataclass(base)}
    for option in get_fields(block).values():
        inner = option.shape.block or (option.shape.item.block if option.shape.item else None)
        if inner is not None:
            found |= schema_types(inner)
    return found


TYPES = schema_types(Config)
CARRIERS = {"ResolvedConfig": {"config": frozenset({"Config"})}, "ConfigDraft": {"config": frozenset({"Config"})}}
KNOWN = re.compile(r"\b(" + "|".join([*TYPES, *CARRIERS]) + r")\b")
MEMBERS: dict[str, dict[str, Types]] = {
    **{
        name: {field: frozenset(KNOWN.findall(str(hint))) for field, hint in get_type_hints(block).items()}
        for name, block in TYPES.items()
    },
    **CARRIERS,
}


def annotated(node: ast.expr | None) -> Types:
    return NONE if node is None else frozenset(KNOWN.findall(ast.unparse(node)))


@dataclass
class Package:
    """What annotations anywhere in the package say about names."""

    attributes: dict[str, Types]
    returns: dict[str, Types]

    @classmethod
    def read(cls, trees: Iterable[ast.Module]) -> Package:
        attributes, returns = defaultdict[str, Types](lambda: NONE), defaultdict[str, Types](lambda: NONE)
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        attributes[item.target.id] |= annotated(item.annotation)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                returns[node.name] |= annotated(node.returns)
        return cls(attributes, returns)


class Reader(ast.NodeVisitor):
    """Collects which fields of which types a module reads, and every text in it that may be a dotted key."""

    def __init__(self, package: Package) -> None:
        self.package, self.names = package, defaultdict[str, Types](lambda: NONE)
        self.read: set[tuple[str, str]] = set()
        self.texts: set[str] = set()

    def types(self, node: ast.AST) -> Types:
        match node:
            case ast.Name(id=name):
                return self.names[name]
            case ast.Attribute(value=value, attr=name):
                owners = self.types(value)
                found = [MEMBERS[owner][name] for owner in owners if name in MEMBERS[owner]]
                return frozenset().union(*found) if found else self.package.attributes.get(name, NONE)
            case ast.Call(func=ast.Attribute(value=value, attr="items" | "values" | "get")):
                return self.types(value)
            case ast.Call(
                func=ast.Name(id="replace" | "enumerate" | "filter" | "list" | "tuple" | "dict" | "sorted" | "zip"),
                args=args,
            ):
                return frozenset().union(*map(self.types, args))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self.package.returns.get(name, NONE) | (frozenset({name}) if name in MEMBERS else NONE)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.types(value)
            case ast.IfExp() | ast.BoolOp() | ast.Tuple() | ast.List() | ast.Dict():
                return frozenset().union(*map(self.types, ast.iter_child_nodes(node)))
        return NONE

    def assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for inner, item in zip(target.elts, value.elts, strict=True):
                self.assign(inner, item)
            return
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.names[node.id] |= self.types(value)
            elif isinstance(node, ast.Attribute):
                self.package.attributes[node.attr] |= self.types(value)

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.arg(arg=name, annotation=annotation):
                self.names[name] |= annotated(annotation)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.assign(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self.assign(target, value)
            case ast.NamedExpr(target=target, value=value):
                self.assign(target, value)
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                self.read |= {(owner, name) for owner in self.types(value) if name in MEMBERS[owner]}
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                self.read |= {(owner, name) for owner in self.types(value) for name in self.texts & set(MEMBERS[owner])}
            case ast.JoinedStr(values=[*_, ast.Constant(value=str(text))]):
                self.texts.add(text)
            case ast.Constant(value=str(text)):
                self.texts.add(text)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:  # these bind the names that the element uses
                self.visit(generator)
        super().visit(node)


@cache
def read_package() -> tuple[set[tuple[str, str]], set[str]]:
    """Fields that are read, by type, and every text of the package outside of the schema."""
    parsed = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    trees = [tree for path, tree in parsed.items() if path.name not in SCHEMA]
    schema = [tree for path, tree in parsed.items() if path.name in SCHEMA]
    methods: list[ast.AST] = [node for tree in schema for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    package, read, texts = Package.read([*trees, *schema]), set[tuple[str, str]](), set[str]()
    for _ in range(2):  # attributes that one module sets are read by others
        for tree in [*trees, *methods]:
            reader = Reader(package)
            reader.visit(tree)
            read |= reader.read
            texts |= reader.texts
    return read, texts


def leaf_fields(block: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, type and name of every leaf."""
    for name, option in get_fields(block).items():
        shape = option.shape
        inner = shape.block or (shape.item.block if shape.item else None)
        if inner is not None:
            yield from leaf_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, block.__name__, name


def unread(block: type) -> list[str]:
    """Keys below `block` that nothing reads."""
    read, texts = read_package()

    def is_read(key: str, owner: str, name: str) -> bool:
        bases = [base.__name__ for base in TYPES[owner].__mro__ if base.__name__ in TYPES]
        if any((base, name) in read for base in bases):
            return True
        role, _, rest = key.partition(".")
        return key in texts or (role in ROLES and f".{rest}" in texts)

    return [key for key, owner, name in leaf_fields(block) if not is_read(key, owner, name)]


def test_configuration_keys_that_nothing_reads_none() -> None:
    assert unread(Config) == []


def test_a_key_that_only_another_role_reads_would_be_found() -> None:
    read, _ = read_package()
    assert ("EngineStrategyConfig", "max_num_seqs") in read and ("TrainingStrategyConfig", "url") not in read
    assert ("OptimizerArgs", "learning_rate") in read and ("GeneratingArgs", "learning_rate") not in read


def test_the_carriers_of_a_configuration_have_it() -> None:
    assert {field.name for field in fields(ResolvedConfig)} >= {"config", "derived"}
    assert "config" in vars(ConfigDraft(Config(), {}, []))
