"""The report of a run: one frozen tree of numbers, assembled by one sink.

    monitor = RunMonitor(warmup_steps=2)
    log.attach(monitor)            # or: make_run_report(read_events(lines))
    monitor.report().to_dict()

A report can be asked for at any time of the run. `to_dict` gives plain JSON values in a fixed order, with None for
numbers that are not finite, so reports of equal event logs are equal texts.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.monitor.episode_outcomes import EpisodeOutcomes, EpisodeRecorder
from headway.monitor.event_log import LoggedEvent
from headway.monitor.event_record import EVENT_TYPES, Event
from headway.monitor.events import CheckpointSave, FaultEvent, StepEnd, ValidateEnd
from headway.monitor.measured_window import EventHandler, MeasuredWindow, WindowClock
from headway.monitor.role_usage import UsageRecorder, UsageSummary
from headway.monitor.sample_bias import BiasRecorder, BiasSummary
from headway.monitor.sample_lag import LagRecorder, LagSummary, SampleEndCounts
from headway.monitor.step_phases import PhaseRecorder, StepPhases
from headway.monitor.throughput import ThroughputRecorder, ThroughputSummary

FAULT_KINDS = tuple(kind for kind, event_type in EVENT_TYPES.items() if issubclass(event_type, FaultEvent))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One validation."""

    trained: int
    """Version that was validated."""
    time_s: float
    reward: float | None
    """Mean over the answers with a verdict; None if there is none."""
    samples: int
    """Answers with a verdict."""
    failed: int = 0
    """Answers without one, which are not part of the mean."""
    fault: str = ""
    """Commonest reason why they have none."""
    mixed: bool = False
    """Whether the answers may be of several versions."""

    @property
    def label(self) -> str:
        """Name of the score, which says whether it is of one version."""
        return "held-out (mixed versions)" if self.mixed else "held-out"

    def describe_failures(self) -> str:
        """Return how many answers have no verdict and why; nothing if all have one."""
        if not self.failed:
            return ""
        return f"{self.failed} of {self.samples + self.failed} answers without a verdict left out: {self.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All numbers of a run, so far or at its end."""

    duration_s: float
    """Time between the first event and the last."""
    events: int
    window: MeasuredWindow
    throughput: ThroughputSummary
    phases: StepPhases
    lag: LagSummary
    ends: SampleEndCounts
    bias: BiasSummary | None
    usage: UsageSummary
    faults: Mapping[str, int]
    """Errors, retries, restarts and so on by kind; only those that happened."""
    checkpoints: int
    validations: tuple[ValidationResult, ...]
    episodes: tuple[EpisodeOutcomes, ...] = ()
    """One entry per step, if the run plays in environments."""
    held_out_episodes: tuple[EpisodeOutcomes, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, in the order of the fields."""
        plain: dict[str, Any] = to_plain_json(self)
        return plain


class IncidentRecorder:
    """Counts faults and checkpoints, and keeps the validations."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.checkpoints = 0
        self.validations: list[ValidationResult] = []
        self.handlers: Mapping[type[Event], EventHandler] = {
            **{EVENT_TYPES[kind]: lambda time_s, event: self.faults.update([event.kind]) for kind in FAULT_KINDS},
            CheckpointSave: self._count_checkpoint,
            ValidateEnd: self._end_validation,
        }

    def _count_checkpoint(self, time_s: float, event: CheckpointSave) -> None:
        self.checkpoints += 1

    def _end_validation(self, time_s: float, event: ValidateEnd) -> None:
        result = ValidationResult(
            trained=event.trained,
            time_s=time_s,
            reward=event.reward if event.samples or not event.failed else None,
            samples=event.samples,
            failed=event.failed or 0,
            fault=event.fault or "",
            mixed=bool(event.mixed),
        )
        self.validations.append(result)


class RunMonitor:
    """The sink that measures everything: usage, lag, throughput and incidents of a run.

    This is the hot path of a run: one dictionary look-up per event, and nothing for events that no recorder takes.
    """

    def __init__(self, warmup_steps: int = 1) -> None:
        self.clock = WindowClock(warmup_steps)
        self.usage = UsageRecorder(self.clock)
        self.lag = LagRecorder(self.clock)
        self.throughput = ThroughputRecorder(self.clock)
        self.bias = BiasRecorder()
        self.phases = PhaseRecorder(self.clock)
        self.incidents = IncidentRecorder()
        self.episodes = EpisodeRecorder()
        # The clock goes first, so that recorders find the window already moved.
        handlers: dict[type[Event], tuple[EventHandler, ...]] = {StepEnd: (self.clock.end_step,)}
        measures = (self.usage, self.lag, self.bias, self.throughput, self.phases)
        for recorder in (*measures, self.incidents, self.episodes):
            for event_type, handler in recorder.handlers.items():
                handlers[event_type] = (*handlers.get(event_type, ()), handler)
        self._handlers = handlers

    def __call__(self, logged: LoggedEvent) -> None:
        clock = self.clock
        time_s, event = logged
        if clock.first_s is None:
            clock.first_s = clock.opened_s = time_s
        clock.last_s = time_s
        clock.events += 1
        for handler in self._handlers.get(type(event), ()):
            handler(time_s, event)

    def report(self) -> RunReport:
        """Return what is known so far."""
        return RunReport(
            duration_s=self.clock.last_s - (self.clock.first_s or 0.0),
            events=self.clock.events,
            window=self.clock.window(),
            throughput=self.throughput.throughput(),
            phases=self.phases.phases(),
            lag=self.lag.lag(),
            ends=self.lag.ends(),
            bias=self.bias.bias(),
            usage=self.usage.usage(),
            faults={kind: count for kind in FAULT_KINDS if (count := self.incidents.faults[kind])},
            checkpoints=self.incidents.checkpoints,
            validations=tuple(self.incidents.validations),
            episodes=tuple(self.episodes.steps),
            held_out_episodes=tuple(self.episodes.validations),
        )


def make_run_report(events: Iterable[LoggedEvent], *, warmup_steps: int = 1) -> RunReport:
    monitor = RunMonitor(warmup_steps)
    for event in events:
        monitor(event)
    return monitor.report()


def to_plain_json(value: object) -> Any:
    """Return `value` as JSON values: records as objects with their properties, None for numbers JSON does not have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: to_plain_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_json(item) for item in value]
    if isinstance(value, float):
        # Below nanoseconds and parts per billion only rounding noise is left.
        return round(value, 9) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
