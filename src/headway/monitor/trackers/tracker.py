"""A tracker: a sink that gives the numbers of a run to somebody who draws them.

Guarantees: a writer that fails is reported once and switched off, and the run goes on; nothing a writer does reaches
the run but the time it takes. Writers get a handful of numbers a step and are expected to return at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from headway.monitor.event_log import LoggedEvent
from headway.monitor.trackers.scalar_series import ScalarMeter, ScalarPoint


class TrackerWriter(Protocol):
    """Where points go: a file or a service."""

    def write(self, point: ScalarPoint) -> None:
        """Take one point; a rewind comes before the numbers that replace the old ones."""

    def close(self) -> None:
        """Nothing more comes; what was written is safe when this returns."""


def print_to_stderr(message: str) -> None:
    """Say it on standard error."""
    print(message, file=sys.stderr)


class Tracker:
    """One writer behind the run's events."""

    def __init__(self, name: str, writer: TrackerWriter, on_failure: Callable[[str], None] = print_to_stderr) -> None:
        self.name = name
        self.failure = ""
        """Why it was switched off; empty while it works."""
        self._writer = writer
        self._on_failure = on_failure
        self._meter = ScalarMeter()

    def __call__(self, event: LoggedEvent) -> None:
        if self.failure:
            return
        try:
            point = self._meter(event)
            if point is not None:
                self._writer.write(point)
        except Exception as error:  # foreign code, of which nothing is known but that it must not stop a run
            self._switch_off(error)

    def close(self) -> None:
        """Finish writing."""
        if self.failure:
            return
        try:
            self._writer.close()
        except Exception as error:  # as above
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._on_failure(f"{self.name}: tracking is switched off for the rest of the run ({self.failure})")
