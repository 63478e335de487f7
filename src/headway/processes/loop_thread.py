"""An event loop on a thread of its own, for coroutines of users that have to run in this process.

One that blocks its loop holds up the other coroutines there, and nothing else of the process. Whatever it raises comes
back as an ordinary exception: `SystemExit` and `KeyboardInterrupt` end nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.processes.stack_dumps import describe_thread


class UnusualExit(Exception):
    """An exception that no future may carry, by its name and text: `SystemExit`, `StopIteration` and the like."""


class LoopThread:
    """Runs coroutines on a thread called `name`, which is started by the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._waiting: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the coroutine function returns, or raise what it raised. Cancelling the call cancels it."""
        here, there = asyncio.get_running_loop(), self._ensure_loop()
        result: asyncio.Future[Any] = here.create_future()
        started: list[asyncio.Task[None]] = []

        async def work() -> None:
            value, error = None, None
            try:
                value = await function(*args, **kwargs)
            except BaseException as raised:
                error = make_ordinary(raised)
            with suppress(RuntimeError):  # the loop of the caller has closed
                here.call_soon_threadsafe(settle_future, result, value, error)

        there.call_soon_threadsafe(lambda: started.append(there.create_task(work())))
        self._waiting.add(result)
        try:
            return await result
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: [task.cancel() for task in started])
            raise
        finally:
            self._waiting.discard(result)

    def describe(self) -> str:
        """Return ` in function at file:line` for what the thread does now."""
        return describe_thread(self._thread.ident) if self._thread is not None else ""

    async def is_blocked(self, within_s: float) -> bool:
        """Return whether the loop does not answer in time."""
        try:
            async with asyncio.timeout(within_s):
                await self.run(asyncio.sleep, 0)
        except TimeoutError:
            return True
        return False

    def abandon(self, reason: str) -> None:
        """Leave a blocked thread to itself. All calls that wait fail with `reason`; the next one gets a new thread."""
        self._loop = self._thread = None
        for result in self._waiting:
            settle_future(result, None, RuntimeError(reason))

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_forever, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        with suppress(BaseException):  # a task that nobody awaits has raised SystemExit or KeyboardInterrupt
            loop.run_forever()


def make_ordinary(error: BaseException) -> Exception:
    """Return an error that a future may carry and that ends no event loop: the error itself, or its name and text."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return UnusualExit(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def settle_future(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Set the result or the error, unless the caller has gone."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
