"""Measures how a step's seconds divide into generation, log-probabilities, the update and the weight sync.

A phase lasts while anything of it goes on: generation while any engine has a request and engines are not halted for
training on shared devices, log-probabilities while a scoring stage works, the update while the trainer trains, the sync
while weights are gathered or loaded. Phases that overlap, as they do in an asynchronous run, are counted each in full,
so their sum may be more than the step. Waiting for devices belongs to no phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.monitor import events
from headway.monitor.event_record import Event
from headway.monitor.measured_window import EventHandler, WindowClock

HALTED_ENGINES = "halted engines"
"""Name of the span in which engines stand still because something else uses their devices."""
SCORING_ROLES = ("logp", "ref_logp", "critic")
_PHASES = {**dict.fromkeys(SCORING_ROLES, "logp"), "train": "update", "param_update": "sync"}
"""The phase that the spans of a role belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhases:
    """Mean seconds of a step in each phase."""

    generation_s: float = 0.0
    logp_s: float = 0.0
    """Log-probabilities, those of the reference, and values of the critic."""
    update_s: float = 0.0
    sync_s: float = 0.0


class _BusyClock:
    """Seconds in which at least one thing is open, unless the clock is paused."""

    __slots__ = ("_busy_s", "_paused", "_since_s", "open")

    def __init__(self) -> None:
        self.open: set[object] = set()
        self._busy_s = self._since_s = 0.0
        self._paused = False

    def begin(self, time_s: float, key: object) -> None:
        if not self.open:
            self._since_s = time_s
        self.open.add(key)

    def end(self, time_s: float, key: object) -> None:
        if key in self.open:
            self.open.discard(key)
            if not self.open and not self._paused:
                self._busy_s += time_s - self._since_s

    def pause(self, time_s: float, paused: bool) -> None:
        self._busy_s = self.read(time_s)
        self._since_s, self._paused = time_s, paused

    def clear(self, time_s: float) -> None:
        self._busy_s = self.read(time_s)
        self.open.clear()

    def read(self, time_s: float) -> float:
        return self._busy_s + (time_s - self._since_s if self.open and not self._paused else 0.0)


class PhaseRecorder:
    """Accumulates the phases of the steps in the measured window."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self._generation = _BusyClock()
        self._spans = {"logp": _BusyClock(), "update": _BusyClock(), "sync": _BusyClock()}
        self._at_start = self._at_end = (0.0, 0.0, 0.0, 0.0)
        self.handlers: Mapping[type[Event], EventHandler] = {
            events.RequestStart: lambda time_s, event: self._generation.begin(time_s, event.request),
            events.RequestEnd: lambda time_s, event: self._generation.end(time_s, event.request),
            events.SpanBegin: self._begin_span,
            events.SpanEnd: self._end_span,
            events.StepEnd: self._end_step,
            events.RunBegin: self._begin_run,
        }

    def _begin_span(self, time_s: float, event: events.SpanBegin) -> None:
        if event.who == HALTED_ENGINES:
            self._generation.pause(time_s, True)
        elif event.who in _PHASES:
            self._spans[_PHASES[event.who]].begin(time_s, (event.who, event.span))

    def _end_span(self, time_s: float, event: events.SpanEnd) -> None:
        if event.who == HALTED_ENGINES:
            self._generation.pause(time_s, False)
        elif event.who in _PHASES:
            self._spans[_PHASES[event.who]].end(time_s, (event.who, event.span))

    def _begin_run(self, time_s: float, event: events.RunBegin) -> None:
        """Close what an earlier process of the run had open: nobody else will."""
        self._generation.pause(time_s, False)
        for clock in (self._generation, *self._spans.values()):
            clock.clear(time_s)

    def _end_step(self, time_s: float, event: events.StepEnd) -> None:
        if self._clock.is_opening:
            self._at_start = self._read(time_s)
        self._at_end = self._read(time_s)

    def _read(self, time_s: float) -> tuple[float, float, float, float]:
        generation, *spans = (clock.read(time_s) for clock in (self._generation, *self._spans.values()))
        return generation, spans[0], spans[1], spans[2]

    def phases(self) -> StepPhases:
        """Return what the window shows so far."""
        window = self._clock.window()
        start = self._at_start if window.warmed_up else (0.0, 0.0, 0.0, 0.0)
        steps = max(1, window.steps)
        spent = [(end - begin) / steps for end, begin in zip(self._at_end, start, strict=True)]
        return StepPhases(generation_s=spent[0], logp_s=spent[1], update_s=spent[2], sync_s=spent[3])
