"""Lets others look at a run: answers on its control socket, writes its status, and measures memory and GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from headway.flow.flow_status import take_status
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, ResourceUsage
from headway.monitor.resource_usage import ResourceMeter
from headway.monitor.run_status import RunStatus
from headway.processes.control_socket import serve_control_socket
from headway.runs.run_condition import WRITE_EVERY_S, stamp_status, write_status
from headway.runs.run_directory import make_control_handler

_MOST_NAMES = 6


class RunObserver:
    """A context manager around a whole run. The status file says from the first to the last moment how the run is.

    `show` gets the status every `show_every_s`, for a display.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trained: int,
        steps: int,
        show: Callable[[RunStatus], None] | None = None,
        show_every_s: float = 1.0,
    ) -> None:
        self._directory, self._show, self._show_every_s = directory, show, show_every_s
        self._meter = ResourceMeter()
        self._last = RunStatus(phase="starting", trained=trained, steps=steps)
        self.summary: RunSummary | None = None
        """How the run ended, once it has."""

    def __enter__(self) -> RunObserver:
        write_status(self._directory, self._last)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        summary, last = self.summary, replace(self._last, phase="ended", finished=False)
        if summary is not None:
            last = replace(last, trained=summary.trained, finished=summary.finished, reason=summary.reason)
        elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            last = replace(last, reason="interrupted")
        elif error is not None:
            last = replace(last, reason=f"{type(error).__name__}: {error}")
        write_status(self._directory, last)

    def note_block(self, culprit: str) -> None:
        """Write what blocks the event loop, which keeps the run from answering. Called on another thread."""
        write_status(self._directory, replace(self._last, culprits=(culprit,)))

    def note_pending(self, names: Sequence[str]) -> None:
        """Write which components are not up yet while the run starts."""
        culprits = (f"{', '.join(names[:_MOST_NAMES])}{' …' if len(names) > _MOST_NAMES else ''}",) if names else ()
        self._last = replace(self._last, culprits=culprits)
        write_status(self._directory, self._last)
        if self._show is not None:
            self._show(self._last)

    @asynccontextmanager
    async def watch(self, flow: AsyncTrainingFlow, events: EventLog) -> AsyncIterator[None]:
        """Answer requests and report for the length of the block. A file system without sockets only loses those."""

        def take() -> RunStatus:
            self._last = stamp_status(replace(take_status(flow), usage=self._last.usage))
            return self._last

        async with AsyncExitStack() as stack:
            try:
                handler = make_control_handler(flow, take)
                await stack.enter_async_context(serve_control_socket(self._directory, handler))
            except OSError as error:
                message = f"cannot be spoken to: {error.strerror}"
                events.emit(ErrorReport(who="control", error="OSError", message=message))
            reporting = [asyncio.ensure_future(self._report(take, events))]
            if self._show is not None:
                reporting.append(asyncio.ensure_future(self._refresh(take, self._show)))
            try:
                yield
                take()  # what the last report saw may be seconds old
            finally:
                for task in reporting:
                    task.cancel()

    async def _report(self, take: Callable[[], RunStatus], events: EventLog) -> None:
        """Measure, and write the status, again and again. What may block is done on a thread."""
        while True:
            usage = await asyncio.to_thread(self._meter.measure)
            self._last = replace(self._last, usage=usage)
            if usage:
                rounded = {name: round(value, 3) for name, value in usage.items()}
                events.emit(ResourceUsage(who="machine", values=rounded))
            await asyncio.to_thread(write_status, self._directory, take())
            await asyncio.sleep(WRITE_EVERY_S)

    async def _refresh(self, take: Callable[[], RunStatus], show: Callable[[RunStatus], None]) -> None:
        while True:
            show(take())
            await asyncio.sleep(self._show_every_s)
