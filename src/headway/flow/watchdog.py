"""The watchdog reports who waits for whom when a run makes no progress, and stops a run that stays stalled."""

import asyncio
from collections.abc import Callable

from headway.errors import RunStopped, Stalled
from headway.flow.pipeline import Pipeline
from headway.monitor import events
from headway.monitor.event_log import LoggedEvent

STALL_WARNINGS = 4
"""Times the stall is reported before the run is stopped."""
PROGRESS_EVENTS = frozenset(
    {events.SampleFinish, events.ScoreEnd, events.GroupReady, events.StepBegin, events.StepEnd}
    | {events.WeightsServed, events.BackendUp, events.CheckpointSave, events.ValidateEnd}
)
"""Kinds of events that show progress."""


class ProgressWatch:
    """Counts the events that show progress, and knows how long ago the last one was."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self._clock, self._last_s = clock, clock()

    @property
    def quiet_s(self) -> float:
        """Time since the last event that shows progress."""
        return max(0.0, self._clock() - self._last_s)

    def __call__(self, event: LoggedEvent) -> None:
        if type(event.event) in PROGRESS_EVENTS:
            self.count += 1
            self._last_s = self._clock()


async def watch_for_stalls(pipeline: Pipeline, progress: ProgressWatch) -> None:
    """Check every `stall_timeout_s`. Raise `Stalled` after several checks without progress."""
    limit_s = pipeline.settings.reliability.stall_timeout_s
    quiet = 0
    while True:
        seen = progress.count
        await asyncio.sleep(limit_s)
        if progress.count != seen:
            quiet = 0
            continue
        quiet += 1
        graph = pipeline.waits.describe()
        pipeline.events.emit(events.RunStall(who="flow", graph=graph, quiet_s=quiet * limit_s))
        if pipeline.hub.up == 0:
            raise RunStopped(f"no replica in service for {quiet * limit_s:g} s")
        if quiet >= STALL_WARNINGS:
            raise Stalled(f"no progress for {quiet * limit_s:g} s:\n{graph}")


async def check_replicas(pipeline: Pipeline) -> None:
    """Check regularly for replicas that died while idle, which no request would reveal."""
    while True:
        await asyncio.sleep(pipeline.settings.reliability.abort_timeout_s)
        pipeline.hub.check()
