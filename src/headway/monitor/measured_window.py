"""The measured window: the part of a run that averages are taken over.

A run starts with empty channels and cold engines; its first steps say little about the others. The window opens
at the end of warm-up step k and closes at the last step end seen so far. A run that has not come that far is
measured whole, from its first event to its last, so that a report always has something to say.

One rule for every number of this package: counts and maxima are of the whole run, because promises hold from the
first sample on; means, shares and rates are of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headway.monitor.event_log import LoggedEvent

EventHandler = Callable[[LoggedEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWindow:
    """A stretch of run time."""

    start_s: float
    end_s: float
    steps: int
    """Training steps that ended inside it."""
    warmed_up: bool
    """False when the run was too short for its warm-up and is measured whole."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s


class WindowClock:
    """Follows the step ends and knows the window so far."""

    __slots__ = ("_end_s", "events", "first_s", "last_s", "opened_s", "steps", "warmup_steps")

    def __init__(self, warmup_steps: int = 1) -> None:
        self.warmup_steps = warmup_steps
        self.steps = 0
        self.events = 0
        self.first_s: float | None = None
        """Time of the first event: where every stage is taken to have been in its first state."""
        self.last_s = 0.0
        self.opened_s = 0.0
        """When the window opened; the first event until it has."""
        self._end_s = 0.0

    def begin(self, time_s: float) -> None:
        """The first event of the run."""
        self.first_s = self.opened_s = self.last_s = time_s

    def step_end(self, event: LoggedEvent) -> None:
        """A training step ended."""
        self.steps += 1
        if self.steps == self.warmup_steps:
            self.opened_s = event.time_s
        self._end_s = event.time_s

    @property
    def opens(self) -> bool:
        """Whether the step end just seen opened the window."""
        return self.steps == self.warmup_steps

    @property
    def warmed_up(self) -> bool:
        """Whether at least one step ended after the warm-up."""
        return self.steps > self.warmup_steps

    def window(self) -> MeasuredWindow:
        """The window so far."""
        if self.warmed_up:
            steps = self.steps - self.warmup_steps
            return MeasuredWindow(start_s=self.opened_s, end_s=self._end_s, steps=steps, warmed_up=True)
        return MeasuredWindow(start_s=self.first_s or 0.0, end_s=self.last_s, steps=self.steps, warmed_up=False)


class EventRecorder(Protocol):
    """A part of the monitor: which kinds of events it takes, and what it does with each."""

    @property
    def handlers(self) -> Mapping[str, EventHandler]: ...


class MeasuringSink:
    """Hands every event to the recorders that asked for its kind, and keeps their common clock.

    This is the hot path of a run: one dictionary look-up an event, and nothing for kinds nobody takes.
    """

    def __init__(self, clock: WindowClock, *recorders: EventRecorder) -> None:
        self.clock = clock
        # The clock goes first, so that recorders find the window already moved.
        handlers: dict[str, list[EventHandler]] = {"step.end": [clock.step_end]}
        for recorder in recorders:
            for kind, handler in recorder.handlers.items():
                handlers.setdefault(kind, []).append(handler)
        self._handlers = {kind: tuple(takers) for kind, takers in handlers.items()}

    def __call__(self, event: LoggedEvent) -> None:
        clock = self.clock
        if clock.first_s is None:
            clock.begin(event.time_s)
        time_s, kind = event.time_s, event.kind
        clock.last_s = time_s
        clock.events += 1
        for handler in self._handlers.get(kind, ()):
            handler(event)
