"""The base class of events, and the decorator that makes a class the record of a kind of event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

E = TypeVar("E")
EventT = TypeVar("EventT", bound="Event")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record_type(cls: type[E]) -> type[E]:
    """Make a class a record with slots that the type checker treats as frozen.

    It is not frozen at run time: every sample emits several events, and a frozen one takes four times as long to make.
    """
    return dataclass(slots=True, kw_only=True)(cls)


@record_type
class Event:
    """One thing that happened; `EventLog` adds the time."""

    kind: ClassVar[str]
    """Name of this kind of event in the log file."""
    field_names: ClassVar[tuple[str, ...]]
    """Fields that are written to the log, in this order."""
    required_names: ClassVar[frozenset[str]]
    """Fields without a default, which an event in a log must have."""
    who: str
    """Role, engine or component that the event is about."""

    def to_data(self) -> dict[str, Any]:
        """Return the fields as the JSON object that the log file holds."""
        return {name: value for name in self.field_names if (value := getattr(self, name)) is not None}


EVENT_TYPES: dict[str, type[Event]] = {}
"""Every known class of events by its kind."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def event_kind(kind: str) -> Callable[[type[EventT]], type[EventT]]:
    """Return a decorator that makes a class the record of a kind of event and registers it."""

    def decorate(cls: type[EventT]) -> type[EventT]:
        event_type = record_type(cls)
        written = [item for item in fields(event_type) if item.name not in ("who", "metrics")]
        event_type.kind, event_type.field_names = kind, tuple(item.name for item in written)
        event_type.required_names = frozenset(item.name for item in written if item.default is MISSING)
        EVENT_TYPES[kind] = event_type
        return event_type

    return decorate


@record_type
class GenericEvent(Event):
    """An event of a kind that this version does not know, kept as the log has it."""

    kind: str  # type: ignore[misc]  # every other class has one kind for all of its records
    data: Mapping[str, Any]

    def to_data(self) -> dict[str, Any]:
        """Return the JSON object of the log unchanged."""
        return dict(self.data)
