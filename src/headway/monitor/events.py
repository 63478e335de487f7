"""Typed records of everything that can happen in a run, one class per kind of event.

Emitters write `events.emit(StepEnd(who="train", trained=3, groups=8))`; monitor, trace, report page, live display and
trackers dispatch on the class. `kind` is the name of the class in the log file. Fields are JSON scalars and are written
in the order in which the class declares them, without those that are None, so a log is reproducible byte for byte.

A run that is resumed appends to its log, with times that go on; every process begins its part with `RunBegin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from headway.monitor.event_record import Event, event_kind, record_type


@event_kind("state")
class StateChange(Event):
    """A stage went from one state of its state machine to another."""

    old: str
    new: str


@event_kind("group.start")
class GroupStart(Event):
    """A group of samples of one task began."""

    group: int
    position: int
    served: int
    """Oldest version that the engines served at that time."""


@event_kind("group.ready")
class GroupReady(Event):
    """All members of a group have a reward and the group waits to be trained on."""

    group: int
    reward: float | None = None
    equal: bool | None = None
    """True if all rewards are equal and the group is kept to fill a batch."""


@event_kind("group.drop")
class GroupDrop(Event):
    """A group was given up."""

    group: int
    reason: str | None = None


@event_kind("group.train")
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


@event_kind("sample.start")
class SampleStart(Event):
    """An episode began."""

    sample: str


@event_kind("sample.finish")
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


@event_kind("sample.end")
class SampleEnd(Event):
    """A sample was trained on, dropped (with the reason), or saved for the next process of the run."""

    sample: str
    end: str
    """`trained`, `dropped` or `saved`."""
    reason: str | None = None


@event_kind("sample.reopen")
class SampleReopen(Event):
    """A sample of an earlier process continues; an end that it had is undone."""

    sample: str


@event_kind("score.start")
class ScoreStart(Event):
    """The reward of a sample is being computed."""

    sample: str


@event_kind("score.end")
class ScoreEnd(Event):
    """The reward of a sample was computed, or scoring it failed for good."""

    sample: str


@event_kind("request.start")
class RequestStart(Event):
    """An engine (`who`) took a request."""

    request: str


@event_kind("request.end")
class RequestEnd(Event):
    """A request left its engine."""

    request: str
    actions: int = 0
    """Actions that this engine generated for it."""
    finish: str = ""
    """A `FinishReason`, or `failed`."""


@event_kind("served")
class WeightsServed(Event):
    """An engine (`who`) serves a version from now on."""

    version: int
    trained: int | None = None
    """Version that the trainer held at that time."""
    checksum: str | None = None
    """Checksum of the tensors in the engine, with `weight_transfer.compare_served`."""


@event_kind("span.begin")
class SpanBegin(Event):
    """A worker pool such as `param_update` began a piece of work, which has a unique number."""

    span: int
    name: str = ""


@event_kind("span.end")
class SpanEnd(Event):
    """A worker pool finished a piece of work."""

    span: int
    name: str = ""


@event_kind("step.begin")
class StepBegin(Event):
    """A training step began."""

    trained: int
    """Version that the trainer held before the step."""
    groups: int = 0


@event_kind("step.end")
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


@event_kind("validate.begin")
class ValidateBegin(Event):
    """A validation of the version `trained` began."""

    trained: int


@event_kind("validate.end")
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


@event_kind("checkpoint")
class CheckpointSave(Event):
    """A checkpoint was written."""

    trained: int


@event_kind("checkpoint.remove")
class CheckpointRemove(Event):
    """A checkpoint was deleted to keep within the configured number."""

    trained: int


@record_type
class FaultEvent(Event):
    """Reports a fault, or a change of what the run has to work with."""


@event_kind("error")
class ErrorReport(FaultEvent):
    """Something failed."""

    error: str
    """Class name of the exception."""
    message: str = ""

    @classmethod
    def from_exception(cls, who: str, error: BaseException) -> ErrorReport:
        return cls(who=who, error=type(error).__name__, message=str(error))


@event_kind("retry")
class OperationRetry(FaultEvent):
    """An operation is tried again."""

    attempt: int


@event_kind("restart")
class BackendRestart(FaultEvent):
    """An engine or the trainer is being restarted."""

    attempt: int


@event_kind("down")
class BackendDown(FaultEvent):
    """An engine is out of service."""

    reason: str = ""


@event_kind("up")
class BackendUp(FaultEvent):
    """An engine or the trainer is in service again."""

    version: int | None = None


@event_kind("join")
class EngineJoin(FaultEvent):
    """An engine was added to the run; it serves once it is up."""

    engines: int
    """Engines of the run, with this one."""


@event_kind("leave")
class EngineLeave(FaultEvent):
    """An engine was removed from the run."""

    engines: int
    """Engines of the run, without this one."""


@event_kind("degrade")
class RunDegrade(FaultEvent):
    """The run continues in a more careful mode."""

    level: str


@event_kind("restore")
class RunRestore(FaultEvent):
    """The run went back to a less careful mode."""

    level: str


@event_kind("stall")
class RunStall(FaultEvent):
    """Nothing has moved for the configured time."""

    graph: str = ""
    """Wait-for graph as text; its first lines name the culprits."""
    quiet_s: float | None = None
    """Time without any progress."""


@event_kind("usage")
class ResourceUsage(Event):
    """Memory and GPUs were measured."""

    values: Mapping[str, float]
    """Numbers by name of the curve, such as `memory/controller_gb`."""


@event_kind("run.begin")
class RunBegin(Event):
    """A process of the run began; what an earlier process had under way ended without an event of its own."""

    resumed: bool = False
    trained: int = 0
    """Version of the checkpoint that the process starts from."""
    steps: int | None = None
    machine: str | None = None
    headway: str | None = None


@event_kind("run.ready")
class RunReady(Event):
    """Trainer, engines and workers of a process are up; what came before is its start, and part of no step."""


@event_kind("run.end")
class RunEnd(Event):
    """A process of the run ended."""

    trained: int = 0
    finished: bool | None = None
    reason: str | None = None
    """Why it ended early; empty if it finished."""
