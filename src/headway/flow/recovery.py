"""What repeated failure does to a run: fewer replicas, then synchronous, then a clean stop; and the way back up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum

from headway.config import ReliabilityConfig
from headway.errors import RunStopped
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, RunDegrade, RunRestore


class DegradationLevel(IntEnum):
    """How much of the run is left."""

    NORMAL = 0
    FEWER_REPLICAS = 1
    SYNCHRONOUS = 2


class DegradationControl:
    """Counts failures and moves between levels. `on_level` is told of every change."""

    def __init__(
        self, reliability: ReliabilityConfig, *, events: EventLog, on_level: Callable[[DegradationLevel], None]
    ) -> None:
        self.level = DegradationLevel.NORMAL
        self.failures = 0
        self._reliability = reliability
        self._events = events
        self._on_level = on_level
        self._lost: set[str] = set()
        self._quiet: asyncio.TimerHandle | None = None
        self._moved = False

    def failure(self, who: str, error: BaseException) -> None:
        """Something failed and will be tried again."""
        self.failures += 1
        self._events.emit(ErrorReport.from_exception(who, error))
        if self.level >= DegradationLevel.SYNCHRONOUS:
            self._watch_for_quiet()

    def progress(self) -> None:
        """Something came out at the end of the line."""
        self._moved = True

    def exhausted(self, who: str, error: BaseException) -> None:
        """A retry budget is spent: one level down. Raises `RunStopped` when there is none left."""
        if self.level >= DegradationLevel.SYNCHRONOUS:
            raise RunStopped(f"{who} keeps failing: {error}") from error
        self._move(DegradationLevel.SYNCHRONOUS)
        self._watch_for_quiet()

    def replica_lost(self, name: str) -> None:
        """A replica is given up for now."""
        self._lost.add(name)
        if self.level < DegradationLevel.FEWER_REPLICAS:
            self._move(DegradationLevel.FEWER_REPLICAS)

    def replica_back(self, name: str) -> None:
        """A replica serves again."""
        self._lost.discard(name)
        if self.level is DegradationLevel.FEWER_REPLICAS and not self._lost:
            self._move(DegradationLevel.NORMAL)

    def close(self) -> None:
        """Stop watching."""
        if self._quiet is not None:
            self._quiet.cancel()

    def _watch_for_quiet(self) -> None:
        self.close()
        self._moved = False
        self._quiet = asyncio.get_running_loop().call_later(self._reliability.quiet_s, self._climb)

    def _climb(self) -> None:
        if not self._moved:  # quiet, but only because nothing happens
            self._watch_for_quiet()
            return
        self._move(DegradationLevel.FEWER_REPLICAS if self._lost else DegradationLevel.NORMAL)

    def _move(self, level: DegradationLevel) -> None:
        event_type = RunDegrade if level > self.level else RunRestore
        self.level = level
        self._events.emit(event_type(who="recovery", level=level.name.lower()))
        self._on_level(level)
