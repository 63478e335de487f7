"""Typed records of everything that can happen in a run, one class per kind of event.

Emitters write `events.emit(StepEnd(who="train", trained=3, groups=8))`; monitor, trace, report page, live display and
trackers dispatch on the class. `kind` is the name of the class in the log file. Fields are JSON scalars and are written
in the order in which the class declares them, without those that are None, so a log is reproducible byte for byte.

A run that is resumed appends to its log, with times that go on; every process begins its part with `RunBegin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

E = TypeVar("E")
EventT = TypeVar("EventT", bound="Event")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def _record(cls: type[E]) -> type[E]:
    """Make a class a record with slots that the type checker treats as frozen.

    It is not frozen at run time: every sample emits several events, and a frozen one takes four times as long to make.
    """
    return dataclass(slots=True, kw_only=True)(cls)


@_record
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
def _event_kind(kind: str) -> Callable[[type[EventT]], type[EventT]]:
    """Return a decorator that makes a class the record of a kind of event and registers it."""

    def decorate(cls: type[EventT]) -> type[EventT]:
        event_type = _record(cls)
        written = [item for item in fields(event_type) if item.name not in ("who", "metrics")]
        event_type.kind, event_type.field_names = kind, tuple(item.name for item in written)
        event_type.required_names = frozenset(item.name for item in written if item.default is MISSING)
        EVENT_TYPES[kind] = event_type
        return event_type

    return decorate


@_record
class GenericEvent(Event):
    """An event of a kind that this version does not know, kept as the log has it."""

    kind: str  # type: ignore[misc]  # every other class has one kind for all of its records
    data: Mapping[str, Any]

    def to_data(self) -> dict[str, Any]:
        """Return the JSON object of the log unchanged."""
        return dict(self.data)


@_event_kind("state")
class StateChange(Event):
    """A stage went from one state of its state machine to another."""

    old: str
    new: str


@_event_kind("group.start")
class GroupStart(Event):
    """A group of samples of one task began."""

    group: int
    position: int
    served: int
    """Oldest version that the engines served at that time."""


@_event_kind("group.ready")
class GroupReady(Event):
    """All members of a group have a reward and the group waits to be trained on."""

    group: int
    reward: float | None = None
    equal: bool | None = None
    """True if all rewards are equal and the group is kept to fill a batch."""


@_event_kind("group.drop")
class GroupDrop(Event):
    """A group was given up."""

    group: int
    reason: str | None = None


@_event_kind("group.train")
class GroupTrain(Event):
    """A group went into a training step."""

    group: int
    trained: int
    """Version that the trainer held before the step."""
    oldest: int
    """Oldest version among the tokens of the group."""
    in_flight: int
    """Versions that passed while the group was generated."""
    in_queue: int
    """Versions that passed while it waited to be trained on."""
    samples: int = 1
    actions: int = 0


@_event_kind("sample.start")
class SampleStart(Event):
    """An episode began."""

    sample: str


@_event_kind("sample.finish")
class SampleFinish(Event):
    """An episode came to its end; environments also report how it went."""

    sample: str
    actions: int = 0
    oldest: int = -1
    newest: int = -1
    success: float | None = None
    turns: float | None = None
    invalid: float | None = None
    """Turns that the environment could not parse."""


@_event_kind("sample.end")
class SampleEnd(Event):
    """A sample was trained on, dropped (with the reason), or saved for the next process of the run."""

    sample: str
    end: str
    """`trained`, `dropped` or `saved`."""
    reason: str | None = None


@_event_kind("sample.reopen")
class SampleReopen(Event):
    """A sample of an earlier process continues; an end that it had is undone."""

    sample: str


@_event_kind("score.start")
class ScoreStart(Event):
    """The reward of a sample is being computed."""

    sample: str


@_event_kind("score.end")
class ScoreEnd(Event):
    """The reward of a sample was computed, or scoring it failed for good."""

    sample: str


@_event_kind("request.start")
class RequestStart(Event):
    """An engine (`who`) took a request."""

    request: str


@_event_kind("request.end")
class RequestEnd(Event):
    """A request left its engine."""

    request: str
    actions: int = 0
    """Actions that this engine generated for it."""
    finish: str = ""
    """A `FinishReason`, or `failed`."""


@_event_kind("served")
class WeightsServed(Event):
    """An engine (`who`) serves a version from now on."""

    version: int
    trained: int | None = None
    """Version that the trainer held at that time."""


@_event_kind("span.begin")
class SpanBegin(Event):
    """A worker pool such as `param_update` began a piece of work, which has a unique number."""

    span: int
    name: str = ""


@_event_kind("span.end")
class SpanEnd(Event):
    """A worker pool finished a piece of work."""

    span: int
    name: str = ""


@_event_kind("step.begin")
class StepBegin(Event):
    """A training step began."""

    trained: int
    """Version that the trainer held before the step."""
    groups: int = 0


@_event_kind("step.end")
class StepEnd(Event):
    """A training step ended."""

    trained: int
    """Version that the step made."""
    groups: int = 0
    samples: int | None = None
    actions: int | None = None
    reward: float | None = None
    """Mean over the samples of the batch."""
    replaced: int | None = None
    """Groups with equal rewards that were replaced by others."""
    filled: int | None = None
    """Groups with equal rewards that are in the batch to fill it."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Everything else; what the trainer reports has the prefix `train/`."""

    def to_data(self) -> dict[str, Any]:
        """Return the fields, then the metrics, as one JSON object."""
        return {**Event.to_data(self), **self.metrics}


@_event_kind("validate.begin")
class ValidateBegin(Event):
    """A validation of the version `trained` began."""

    trained: int


@_event_kind("validate.end")
class ValidateEnd(Event):
    """A validation ended: `reward` is the mean over `samples`; `failed` have no score, mostly because of `fault`."""

    trained: int
    reward: float | None = None
    samples: int = 0
    failed: int | None = None
    fault: str | None = None
    mixed: bool | None = None
    """Whether weights may have changed meanwhile. The fields below exist for episodes in environments."""
    success: float | None = None
    turns: float | None = None
    invalid: float | None = None


@_event_kind("checkpoint")
class CheckpointSave(Event):
    """A checkpoint was written."""

    trained: int


@_event_kind("checkpoint.remove")
class CheckpointRemove(Event):
    """A checkpoint was deleted to keep within the configured number."""

    trained: int


@_record
class FaultEvent(Event):
    """Reports a fault, or a change of what the run has to work with."""


@_event_kind("error")
class ErrorReport(FaultEvent):
    """Something failed."""

    error: str
    """Class name of the exception."""
    message: str = ""

    @classmethod
    def from_exception(cls, who: str, error: BaseException) -> ErrorReport:
        return cls(who=who, error=type(error).__name__, message=str(error))


@_event_kind("retry")
class OperationRetry(FaultEvent):
    """An operation is tried again."""

    attempt: int


@_event_kind("restart")
class BackendRestart(FaultEvent):
    """An engine or the trainer is being restarted."""

    attempt: int


@_event_kind("down")
class BackendDown(FaultEvent):
    """An engine is out of service."""

    reason: str = ""


@_event_kind("up")
class BackendUp(FaultEvent):
    """An engine or the trainer is in service again."""

    version: int | None = None


@_event_kind("join")
class EngineJoin(FaultEvent):
    """An engine was added to the run; it serves once it is up."""

    engines: int
    """Engines of the run, with this one."""


@_event_kind("leave")
class EngineLeave(FaultEvent):
    """An engine was removed from the run."""

    engines: int
    """Engines of the run, without this one."""


@_event_kind("degrade")
class RunDegrade(FaultEvent):
    """The run continues in a more careful mode."""

    level: str


@_event_kind("restore")
class RunRestore(FaultEvent):
    """The run went back to a less careful mode."""

    level: str


@_event_kind("stall")
class RunStall(FaultEvent):
    """Nothing has moved for the configured time."""

    graph: str = ""
    """Wait-for graph as text; its first lines name the culprits."""
    quiet_s: float | None = None
    """Time without any progress."""


@_event_kind("run.begin")
class RunBegin(Event):
    """A process of the run began; what an earlier process had under way ended without an event of its own."""

    resumed: bool = False
    trained: int = 0
    """Version of the checkpoint that the process starts from."""
    steps: int | None = None
    machine: str | None = None
    headway: str | None = None


@_event_kind("run.end")
class RunEnd(Event):
    """A process of the run ended."""

    trained: int = 0
    finished: bool | None = None
    reason: str | None = None
    """Why it ended early; empty if it finished."""
