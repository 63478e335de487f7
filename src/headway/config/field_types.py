"""Ranges that live beside the field they bound, as annotations: `steps: Count = 6`.

An alias names the kind of number; the loader enforces it, `describe` puts it into error messages, and a test
walks every field. Plain assignment is not checked: configurations are made by `headway.config.load_config`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_HUGE = 10**15
"""Beyond every number a configuration can mean; keeps the arithmetic on them exact and finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """An interval of numbers, open or closed at either end."""

    ge: float | None = None
    """Smallest value allowed."""
    gt: float | None = None
    """Every value allowed is larger."""
    le: float | None = None
    """Largest value allowed."""
    lt: float | None = None
    """Every value allowed is smaller."""

    def holds(self, value: float) -> bool:
        """Whether `value` is finite and inside."""
        return (
            -_HUGE < value < _HUGE
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def describe(self) -> str:
        """Such as `≥ 0 and ≤ 1`."""
        ends = (("≥", self.ge), (">", self.gt), ("≤", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class DeviceList:
    """Marks a list of device numbers, which may also be written as the text `list(range(a,b))`."""


Count = Annotated[int, NumberRange(ge=1)]
"""How many, at least one."""
Amount = Annotated[int, NumberRange(ge=0)]
"""How many, possibly none."""
Real = Annotated[float, NumberRange(ge=0)]
"""A number that is not negative."""
Signed = Annotated[float, NumberRange(ge=-1000, le=1000)]
"""A number of either sign."""
Steps = Annotated[float, NumberRange(ge=0, le=1000)]
"""How many training steps ahead, fractions included."""
Positive = Annotated[float, NumberRange(gt=0)]
"""A number that is not zero either."""
Probability = Annotated[float, NumberRange(ge=0, le=1)]
"""From 0 to 1, both included."""
Share = Annotated[float, NumberRange(gt=0, le=1)]
"""A part of a whole: not nothing."""
Discount = Annotated[float, NumberRange(ge=0, le=1)]
"""γ or λ."""
Factor = Annotated[float, NumberRange(ge=1)]
"""How many times as much."""
Seconds = Annotated[float, NumberRange(gt=0)]
"""A deadline or a period."""
NodeSize = Annotated[int, NumberRange(ge=1, le=1024)]
"""Devices of one node."""
Nodes = Annotated[int, NumberRange(ge=1, le=1000)]
"""Nodes of a cluster."""
Devices = Annotated[tuple[Annotated[int, NumberRange(ge=0, lt=1_000_000)], ...], DeviceList()]
"""Global device numbers; node n holds those from n·num_gpus_per_node."""


ShapeKind = Literal["bool", "int", "float", "text", "choice", "list", "map", "block", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShape:
    """What a value of the tree has to look like."""

    kind: ShapeKind
    optional: bool = False
    """null is allowed."""
    range: NumberRange | None = None
    """Of numbers."""
    choices: tuple[str, ...] = ()
    """Of `choice`."""
    item: FieldShape | None = None
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
class ConfigOption:
    """One leaf of the schema; `<name>` stands for a name the user chooses, `[]` for an element of a list."""

    key: str
    shape: FieldShape
    default: Any
    """`dataclasses.MISSING` where the user has to give a value."""


_SCALARS: dict[Any, ShapeKind] = {bool: "bool", int: "int", float: "float", str: "text", Any: "any", object: "any"}


def make_field_shape(annotation: Any) -> FieldShape:
    """The shape that an annotation of the schema asks for."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(make_field_shape(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        (inner,) = [part for part in arguments if part is not type(None)]
        return dataclasses.replace(make_field_shape(inner), optional=True)
    if origin is Literal:
        return FieldShape(kind="choice", choices=arguments)
    if origin is tuple:
        return FieldShape(kind="list", item=make_field_shape(arguments[0]))
    if origin is Mapping:
        return FieldShape(kind="map", item=make_field_shape(arguments[1]))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return FieldShape(kind="block", block=annotation)
    return FieldShape(kind=_SCALARS[annotation])


def _annotated(shape: FieldShape, marks: tuple[Any, ...]) -> FieldShape:
    for mark in marks:
        if isinstance(mark, NumberRange):
            shape = dataclasses.replace(shape, range=mark)
        if isinstance(mark, DeviceList):
            shape = dataclasses.replace(shape, devices=True)
    return shape


@cache
def get_fields(block: type[Any]) -> Mapping[str, ConfigOption]:
    """The options directly in a dataclass, by name."""
    hints = get_type_hints(block, include_extras=True)
    return {
        field.name: ConfigOption(key=field.name, shape=make_field_shape(hints[field.name]), default=_default(field))
        for field in dataclasses.fields(block)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def iterate_options(block: type, prefix: str = "") -> Iterator[ConfigOption]:
    """Every leaf below `block`, in the order of the schema."""
    for name, option in get_fields(block).items():
        shape, key = option.shape, prefix + name
        if shape.kind == "map" and shape.item is not None and shape.item.block is not None:
            yield from iterate_options(shape.item.block, f"{key}.<name>.")
        elif shape.block is not None:
            yield from iterate_options(shape.block, f"{key}.")
        else:
            yield dataclasses.replace(option, key=key)
            if shape.item is not None and shape.item.block is not None:
                yield from iterate_options(shape.item.block, f"{key}[].")
