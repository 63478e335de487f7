"""The measured window: the part of a run that averages are taken over.

A run starts with empty channels and cold engines, so its first steps say little about the others. The window opens at
the end of warm-up step k and closes at the last step end seen so far. A run that has not come that far is measured
whole, from its first event to its last, so a report always has numbers.

One rule holds for every number of this package: counts and maxima cover the whole run, because promises hold from the
first sample on; means, shares and rates cover the window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.monitor.events import StepEnd

EventHandler = Callable[[float, Any], None]
"""Takes the time of an event and the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWindow:
    """A stretch of run time."""

    start_s: float
    end_s: float
    steps: int
    """Training steps that ended inside it."""
    warmed_up: bool
    """False if the run was too short for its warm-up and is measured whole."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class WindowClock:
    """Follows the step ends and knows the window so far."""

    __slots__ = ("_end_s", "events", "first_s", "last_s", "opened_s", "steps", "warmup_steps")

    def __init__(self, warmup_steps: int = 1) -> None:
        self.warmup_steps = warmup_steps
        self.steps = self.events = 0
        self.first_s: float | None = None
        """Time of the first event; every stage counts as having been in its first state since then."""
        self.last_s = 0.0
        self.opened_s = 0.0
        """When the window opened; the time of the first event until it has."""
        self._end_s = 0.0

    def end_step(self, time_s: float, event: StepEnd) -> None:
        """Count a training step that ended."""
        self.steps += 1
        if self.steps == self.warmup_steps:
            self.opened_s = time_s
        self._end_s = time_s

    @property
    def is_opening(self) -> bool:
        """Whether the step end just seen opened the window."""
        return self.steps == self.warmup_steps

    @property
    def warmed_up(self) -> bool:
        """Whether at least one step ended after the warm-up."""
        return self.steps > self.warmup_steps

    def window(self) -> MeasuredWindow:
        if self.warmed_up:
            steps = self.steps - self.warmup_steps
            return MeasuredWindow(start_s=self.opened_s, end_s=self._end_s, steps=steps, warmed_up=True)
        return MeasuredWindow(start_s=self.first_s or 0.0, end_s=self.last_s, steps=self.steps, warmed_up=False)
