"""Degradation after repeated failures: fewer replicas, then synchronous training, then a clean stop; and back."""

import asyncio
from collections.abc import Callable
from enum import IntEnum

from headway.config import ReliabilityConfig
from headway.errors import RunStopped
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, RunDegrade, RunRestore


class DegradationLevel(IntEnum):
    """How far the run is degraded."""

    NORMAL = 0
    FEWER_REPLICAS = 1
    SYNCHRONOUS = 2


class DegradationControl:
    """Counts failures and changes the level. Calls `on_level` with every new level."""

    def __init__(
        self, reliability: ReliabilityConfig, *, events: EventLog, on_level: Callable[[DegradationLevel], None]
    ) -> None:
        self.level = DegradationLevel.NORMAL
        self.failures = 0
        self.degraded_roles: set[str] = set()
        """Roles whose retries were used up since the run was last at a better level."""
        self._reliability = reliability
        self._events = events
        self._on_level = on_level
        self._lost: set[str] = set()
        self._quiet_timer: asyncio.TimerHandle | None = None
        self._progressed = False

    def failure(self, who: str, error: BaseException) -> None:
        """Record a failure that will be retried."""
        self.failures += 1
        self._events.emit(ErrorReport.from_exception(who, error))
        if self.level >= DegradationLevel.SYNCHRONOUS:
            self._start_quiet_timer()

    def progress(self) -> None:
        """Note that a group has reached the buffer."""
        self._progressed = True

    def exhausted(self, who: str, error: BaseException) -> None:
        """Degrade by one level because retries are used up. Raise `RunStopped` at the last level."""
        if self.level >= DegradationLevel.SYNCHRONOUS:
            raise RunStopped(f"{who} keeps failing: {error}") from error
        self.degraded_roles.add(who)
        self._change_level(DegradationLevel.SYNCHRONOUS)
        self._start_quiet_timer()

    def replica_lost(self, name: str) -> None:
        self._lost.add(name)
        if self.level < DegradationLevel.FEWER_REPLICAS:
            self._change_level(DegradationLevel.FEWER_REPLICAS)

    def replica_back(self, name: str) -> None:
        self._lost.discard(name)
        if self.level is DegradationLevel.FEWER_REPLICAS and not self._lost:
            self._change_level(DegradationLevel.NORMAL)

    def close(self) -> None:
        """Cancel the timer."""
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()

    def _start_quiet_timer(self) -> None:
        self.close()
        self._progressed = False
        self._quiet_timer = asyncio.get_running_loop().call_later(self._reliability.quiet_s, self._restore_level)

    def _restore_level(self) -> None:
        if not self._progressed:  # no failure, but no progress either
            self._start_quiet_timer()
            return
        self.degraded_roles.clear()
        self._change_level(DegradationLevel.FEWER_REPLICAS if self._lost else DegradationLevel.NORMAL)

    def _change_level(self, level: DegradationLevel) -> None:
        event_type = RunDegrade if level > self.level else RunRestore
        self.level = level
        self._events.emit(event_type(who="recovery", level=level.name.lower()))
        self._on_level(level)
