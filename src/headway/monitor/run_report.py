"""The report of a run: one frozen tree of numbers, assembled by one sink.

    monitor = Monitor(warmup_steps=2)
    log.attach(monitor)            # or: report_of(read_events(lines))
    monitor.report().to_dict()

A report can be asked for at any time of the run. `to_dict` gives plain JSON values in a fixed order, numbers that
are not finite as None, so that reports of equal event logs are equal texts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.monitor.episode_outcomes import EpisodeOutcomes, EpisodeRecorder
from headway.monitor.event_log import LoggedEvent
from headway.monitor.measured_window import EventHandler, MeasuredWindow, MeasuringSink, WindowClock
from headway.monitor.role_usage import UsageRecorder, UsageSummary
from headway.monitor.sample_lag import LagRecorder, LagSummary, SampleEndCounts
from headway.monitor.throughput import ThroughputRecorder, ThroughputSummary

FAULT_KINDS = ("error", "retry", "restart", "down", "up", "join", "leave", "degrade", "restore", "stall")
"""Whatever changes what the run has to work with, and what goes wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One pass of the validation flow."""

    trained: int
    """The policy that was judged."""
    time_s: float
    reward: float | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything there is to say about a run, so far or at its end."""

    duration_s: float
    """From the first event to the last."""
    events: int
    window: MeasuredWindow
    throughput: ThroughputSummary
    lag: LagSummary
    ends: SampleEndCounts
    usage: UsageSummary
    faults: Mapping[str, int]
    """Errors, retries, restarts and so on by kind; only those that happened."""
    checkpoints: int
    validations: tuple[ValidationResult, ...]
    episodes: tuple[EpisodeOutcomes, ...] = ()
    """By step, where the run plays in environments."""
    held_out_episodes: tuple[EpisodeOutcomes, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, in the order of the fields."""
        plain = to_plain_json(self)
        assert isinstance(plain, dict)
        return plain


class IncidentRecorder:
    """Counts what went wrong, and keeps the validations."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.checkpoints = 0
        self.validations: list[ValidationResult] = []
        self.handlers: Mapping[str, EventHandler] = {
            **dict.fromkeys(FAULT_KINDS, self._fault),
            "checkpoint": self._checkpoint,
            "validate.end": self._validated,
        }

    def _fault(self, event: LoggedEvent) -> None:
        self.faults[event.kind] += 1

    def _checkpoint(self, event: LoggedEvent) -> None:
        self.checkpoints += 1

    def _validated(self, event: LoggedEvent) -> None:
        time_s, data = event.time_s, event.data
        self.validations.append(
            ValidationResult(
                trained=data["trained"], time_s=time_s, reward=data.get("reward"), samples=data.get("samples", 0)
            )
        )


class RunMonitor(MeasuringSink):
    """The sink that knows everything: usage, lag, throughput and incidents of a run."""

    def __init__(self, warmup_steps: int = 1) -> None:
        clock = WindowClock(warmup_steps)
        self.usage = UsageRecorder(clock)
        self.lag = LagRecorder(clock)
        self.throughput = ThroughputRecorder(clock)
        self.incidents = IncidentRecorder()
        self.episodes = EpisodeRecorder()
        super().__init__(clock, self.usage, self.lag, self.throughput, self.incidents, self.episodes)

    def report(self) -> RunReport:
        """What is known so far."""
        faults = self.incidents.faults
        return RunReport(
            duration_s=self.clock.last_s - (self.clock.first_s or 0.0),
            events=self.clock.events,
            window=self.clock.window(),
            throughput=self.throughput.throughput(),
            lag=self.lag.lag(),
            ends=self.lag.ends(),
            usage=self.usage.usage(),
            faults={kind: faults[kind] for kind in FAULT_KINDS if faults[kind]},
            checkpoints=self.incidents.checkpoints,
            validations=tuple(self.incidents.validations),
            episodes=tuple(self.episodes.steps),
            held_out_episodes=tuple(self.episodes.validations),
        )


def make_run_report(events: Iterable[LoggedEvent], *, warmup_steps: int = 1) -> RunReport:
    """The report of a recorded run."""
    monitor = RunMonitor(warmup_steps)
    for event in events:
        monitor(event)
    return monitor.report()


def to_plain_json(value: object) -> object:
    """`value` with records as objects (their derived shares included) and no number that JSON does not have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: to_plain_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_json(item) for item in value]
    if isinstance(value, float):
        # Nanoseconds and parts per billion: below that only the noise of adding up is left.
        return round(value, 9) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
