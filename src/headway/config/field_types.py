"""Types of configuration fields: ranges of numbers, choices of names, and the shapes that values are checked against.

A field states its range or its choices in its annotation, such as `steps: Count = 6`. The loader enforces them and
error messages quote them. Plain assignment is not checked: configurations are made by `headway.config.load_config`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from headway.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, STALENESS_POLICIES, Registry

_HUGE = 10**15
"""Larger than any number a configuration can mean. Keeps the arithmetic on such numbers exact and finite."""


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
        """Return whether `value` is finite and inside."""
        return (
            -_HUGE < value < _HUGE
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def describe(self) -> str:
        """Return the interval as text, such as `≥ 0 and ≤ 1`."""
        ends = (("≥", self.ge), (">", self.gt), ("≤", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class DeviceList:
    """Marks a list of device numbers, which may also be written as the text `list(range(a,b))`."""


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """Marks a text that has to be a name of `registry`: a built-in name or one that a plugin registered."""

    registry: Registry[Any]


Count = Annotated[int, NumberRange(ge=1)]
"""An integer of at least 1."""
Amount = Annotated[int, NumberRange(ge=0)]
"""An integer of at least 0."""
Port = Annotated[int, NumberRange(ge=0, le=65535)]
"""A port of TCP; 0: any that is free."""
Real = Annotated[float, NumberRange(ge=0)]
"""A number that is not negative."""
Signed = Annotated[float, NumberRange(ge=-1000, le=1000)]
"""A number of either sign."""
Steps = Annotated[float, NumberRange(ge=0, le=1000)]
"""A number of training steps, fractions included."""
Positive = Annotated[float, NumberRange(gt=0)]
"""A number larger than 0."""
Probability = Annotated[float, NumberRange(ge=0, le=1)]
"""A number from 0 to 1, both included."""
Share = Annotated[float, NumberRange(gt=0, le=1)]
"""A part of a whole, larger than 0."""
Discount = Annotated[float, NumberRange(ge=0, le=1)]
"""A discount factor such as γ or λ."""
Factor = Annotated[float, NumberRange(ge=1)]
"""A multiple of at least 1."""
Seconds = Annotated[float, NumberRange(gt=0)]
"""A deadline or a period."""
NodeSize = Annotated[int, NumberRange(ge=1, le=1024)]
"""Number of devices of one node."""
Nodes = Annotated[int, NumberRange(ge=1, le=1000)]
"""Number of nodes of a cluster."""
Devices = Annotated[tuple[Annotated[int, NumberRange(ge=0, lt=1_000_000)], ...], DeviceList()]
"""Global device numbers; node n holds those from n·num_gpus_per_node."""
PolicyLossName = Annotated[str, RegisteredName(POLICY_LOSSES)]
"""Name of a policy loss."""
AdvantageEstimatorName = Annotated[str, RegisteredName(ADVANTAGE_ESTIMATORS)]
"""Name of an advantage estimator."""
StalenessPolicyName = Annotated[str, RegisteredName(STALENESS_POLICIES)]
"""Name of a staleness policy."""

ShapeKind = Literal["bool", "int", "float", "text", "choice", "list", "map", "block", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShape:
    """Describes which values a field accepts."""

    kind: ShapeKind
    optional: bool = False
    """Null is allowed."""
    range: NumberRange | None = None
    """Range of `int` and `float`."""
    literals: tuple[str, ...] = ()
    """Fixed names of `choice`."""
    registry: Registry[Any] | None = None
    """Names of `choice` where plugins may add some."""
    item: FieldShape | None = None
    """Shape of the elements of `list` and `map`."""
    block: type | None = None
    """Dataclass of `block`."""
    devices: bool = False
    """A list that may be written as `list(range(a,b))`."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the names that a `choice` accepts now. This is the one place where names are judged."""
        return self.literals if self.registry is None else self.registry.names()

    @property
    def is_leaf(self) -> bool:
        """Return whether it is given as one value: not a block, nor a mapping of blocks."""
        return self.kind != "block" and not (self.kind == "map" and self.item is not None and self.item.block)

    def describe(self) -> str:
        """Return what would be accepted, for error messages."""
        return self._describe_value() + (", or null" if self.optional else "")

    def _describe_value(self) -> str:
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
    """One leaf of the schema. In its key `<name>` stands for a name the user chooses, `[]` for a list element."""

    key: str
    shape: FieldShape
    default: Any
    """Default value, or `dataclasses.MISSING` where the user has to give one."""


_SCALARS: dict[Any, ShapeKind] = {bool: "bool", int: "int", float: "float", str: "text", Any: "any", object: "any"}


def make_field_shape(annotation: Any) -> FieldShape:
    """Make the shape that an annotation of the schema asks for."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _add_marks(make_field_shape(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        (inner,) = [part for part in arguments if part is not type(None)]
        return dataclasses.replace(make_field_shape(inner), optional=True)
    if origin is Literal:
        return FieldShape(kind="choice", literals=arguments)
    if origin is tuple:
        return FieldShape(kind="list", item=make_field_shape(arguments[0]))
    if origin is Mapping:
        return FieldShape(kind="map", item=make_field_shape(arguments[1]))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return FieldShape(kind="block", block=annotation)
    return FieldShape(kind=_SCALARS[annotation])


def _add_marks(shape: FieldShape, marks: tuple[Any, ...]) -> FieldShape:
    for mark in marks:
        if isinstance(mark, NumberRange):
            shape = dataclasses.replace(shape, range=mark)
        if isinstance(mark, DeviceList):
            shape = dataclasses.replace(shape, devices=True)
        if isinstance(mark, RegisteredName):
            shape = dataclasses.replace(shape, kind="choice", registry=mark.registry)
    return shape


@cache
def get_fields(block: type[Any]) -> Mapping[str, ConfigOption]:
    """Return the options directly in a dataclass, by name."""
    hints = get_type_hints(block, include_extras=True)
    return {
        field.name: ConfigOption(
            key=field.name, shape=make_field_shape(hints[field.name]), default=_make_default(field)
        )
        for field in dataclasses.fields(block)
    }


def _make_default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def iterate_options(block: type, prefix: str = "") -> Iterator[ConfigOption]:
    """Yield every leaf below `block`, in the order of the schema."""
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
