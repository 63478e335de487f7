"""Annotations of the schema as shapes that values are checked against, and the list of all options."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from headway.config.ranges import DeviceList, Range

Kind = Literal["bool", "int", "float", "text", "choice", "list", "map", "block", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a value of the tree has to look like."""

    kind: Kind
    optional: bool = False
    """null is allowed."""
    range: Range | None = None
    """Of numbers."""
    choices: tuple[str, ...] = ()
    """Of `choice`."""
    item: Shape | None = None
    """Of the elements of `list` and `map`."""
    block: type | None = None
    """The dataclass of `block`."""
    devices: bool = False
    """A list that may be written as `list(range(a,b))`."""

    @property
    def is_leaf(self) -> bool:
        """Whether it is given as one value: not a block, nor a mapping of blocks."""
        return self.kind != "block" and not (self.kind == "map" and self.item is not None and self.item.block)

    def describe(self) -> str:
        """What would be right, for messages."""
        return self._described() + (", or null" if self.optional else "")

    def _described(self) -> str:
        if self.devices:
            return "a list of device numbers, or list(range(a,b))"
        if self.kind in ("int", "float"):
            noun = "an integer" if self.kind == "int" else "a number"
            return f"{noun} {self.range.describe()}" if self.range else noun
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind in ("list", "map") and self.item is not None:
            return f"{'a list' if self.kind == 'list' else 'a mapping'}, each {self.item.describe()}"
        return {"bool": "true or false", "text": "text", "any": "anything"}.get(self.kind, "a mapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One leaf of the schema; `<name>` stands for a name the user chooses, `[]` for an element of a list."""

    key: str
    shape: Shape
    default: Any
    """`dataclasses.MISSING` where the user has to give a value."""


_SCALARS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "text", Any: "any", object: "any"}


def shape_of(annotation: Any) -> Shape:
    """The shape that an annotation of the schema asks for."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(shape_of(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        (inner,) = [part for part in arguments if part is not type(None)]
        return dataclasses.replace(shape_of(inner), optional=True)
    if origin is Literal:
        return Shape(kind="choice", choices=arguments)
    if origin is tuple:
        return Shape(kind="list", item=shape_of(arguments[0]))
    if origin is Mapping:
        return Shape(kind="map", item=shape_of(arguments[1]))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return Shape(kind="block", block=annotation)
    return Shape(kind=_SCALARS[annotation])


def _annotated(shape: Shape, marks: tuple[Any, ...]) -> Shape:
    for mark in marks:
        if isinstance(mark, Range):
            shape = dataclasses.replace(shape, range=mark)
        if isinstance(mark, DeviceList):
            shape = dataclasses.replace(shape, devices=True)
    return shape


@cache
def fields_of(block: type[Any]) -> Mapping[str, Option]:
    """The options directly in a dataclass, by name."""
    hints = get_type_hints(block, include_extras=True)
    return {
        field.name: Option(key=field.name, shape=shape_of(hints[field.name]), default=_default(field))
        for field in dataclasses.fields(block)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def options(block: type, prefix: str = "") -> Iterator[Option]:
    """Every leaf below `block`, in the order of the schema."""
    for name, option in fields_of(block).items():
        shape, key = option.shape, prefix + name
        if shape.kind == "map" and shape.item is not None and shape.item.block is not None:
            yield from options(shape.item.block, f"{key}.<name>.")
        elif shape.block is not None:
            yield from options(shape.block, f"{key}.")
        else:
            yield dataclasses.replace(option, key=key)
            if shape.item is not None and shape.item.block is not None:
                yield from options(shape.item.block, f"{key}[].")
