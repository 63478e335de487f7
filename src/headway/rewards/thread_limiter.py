"""Blocking calls on threads, with a limit on how many run at a time.

Each call has its own daemon thread: a call that hangs costs its slot, but does not stop the run or keep the process
alive. A slot becomes free when the call has really ended, even if its caller was cancelled.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadLimiter:
    """Runs at most `limit` blocking calls at a time, on threads called `name`."""

    def __init__(self, limit: int, name: str) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._name = name

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `function`, or raise what it raised."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self._slots.release()
            if future.done():
                return  # the caller was cancelled
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as raised:
                # A future cannot carry StopIteration, and SystemExit would end the event loop's thread.
                ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if ordinary else RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the event loop has closed
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await future
