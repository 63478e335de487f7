"""The watchdog: a run without progress says who waits for whom, and one that stays so is stopped cleanly."""

from __future__ import annotations

import asyncio

from headway.errors import RunStopped, Stalled
from headway.flow.pipeline import Pipeline
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.monitor.events import (
    BackendUp,
    CheckpointSave,
    GroupReady,
    RunStall,
    SampleFinish,
    ScoreEnd,
    StepBegin,
    StepEnd,
    ValidateEnd,
    WeightsServed,
)

STALL_WARNINGS = 4
"""Times the stall is reported before the run is stopped."""
PROGRESS_EVENTS = frozenset(
    {
        SampleFinish,
        ScoreEnd,
        GroupReady,
        StepBegin,
        StepEnd,
        WeightsServed,
        BackendUp,
        CheckpointSave,
        ValidateEnd,
    }
)
"""Kinds of events that mean the run gets somewhere."""


class ProgressWatch:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: LoggedEvent) -> None:
        if type(event.event) in PROGRESS_EVENTS:
            self.count += 1


async def watch_for_stalls(line: Pipeline, progress: ProgressWatch, events: EventLog) -> None:
    """Look every `stall_timeout_s`. Raises `Stalled` when nothing moved for long, `RunStopped` without engines."""
    limit_s = line.settings.reliability.stall_timeout_s
    quiet = 0
    while True:
        seen = progress.count
        await asyncio.sleep(limit_s)
        if progress.count != seen:
            quiet = 0
            continue
        quiet += 1
        graph = line.waits.describe()
        events.emit(RunStall(who="flow", graph=graph))
        if line.hub.up == 0:
            raise RunStopped(f"no replica in service for {quiet * limit_s:g} s")
        if quiet >= STALL_WARNINGS:
            raise Stalled(f"no progress for {quiet * limit_s:g} s:\n{graph}")


async def check_replicas(line: Pipeline) -> None:
    """Ask now and then whether a replica died while it had nothing to do: no request would ever tell."""
    while True:
        await asyncio.sleep(line.settings.reliability.abort_timeout_s)
        line.hub.check()
