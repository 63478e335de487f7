"""Blocking calls beside the event loop, of which some may never return.

A call runs on a daemon thread, at most so many at once. One whose caller has gone is told to stop: an exception is
raised inside it, which ends whatever is written in Python. What still hangs then (in a system call, in C) holds its
thread until the process ends, but nobody's place: a call that is waited for always gets one.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.errors import EnvironmentFailed

_MAX_THREADS = 64


class BlockingCallAbandoned(BaseException):
    """Raised inside a call that nobody waits for any more."""


class BlockingCallRunner:
    """Threads for the environments of one process."""

    def __init__(self, at_once: int = _MAX_THREADS) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def run(self, call: BlockingCall) -> Any:
        """The result of a call, or what it raised."""
        async with self._places:
            return await call.result()


class BlockingCall:
    """One function on one thread."""

    def __init__(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        self._function, self._args = function, args
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()
        self._over = False
        self._afterwards: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Any] = self._loop.create_future()
        self._ended = asyncio.Event()

    async def result(self) -> Any:
        """Start, and wait for the end."""
        self._thread.start()
        return await self._result

    async def abandon(self, afterwards: Callable[[], None], within_s: float) -> bool:
        """Stop it if that can be done, and have `afterwards` called. Whether both were done in time.

        Otherwise they will be once its thread comes back, if it ever does.
        """
        with self._lock:
            at_work = not self._over and self._thread.ident is not None
            if at_work:
                self._afterwards = afterwards
                number, raised = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BlockingCallAbandoned)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, raised)
        if not at_work:
            await asyncio.to_thread(afterwards)
            return True
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _work(self) -> None:
        with suppress(BaseException):  # what was raised from outside may come a moment too late
            self._do()
        with self._lock:
            self._over = True
        with suppress(BaseException):
            self._afterwards()
        self._tell(self._ended.set)

    def _do(self) -> None:
        result, error = None, None
        try:
            result = self._context.run(self._function, *self._args)
        except BaseException as raised:
            # a future may not carry StopIteration, and SystemExit would end the loop's thread
            ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if ordinary else EnvironmentFailed(f"{type(raised).__name__}: {raised}")
        self._tell(self._arrive, result, error)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    def _arrive(self, result: Any, error: BaseException | None) -> None:
        if self._result.done():
            return  # the caller has gone
        if error is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(result)
