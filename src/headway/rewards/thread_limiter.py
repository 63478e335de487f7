"""Blocking calls beside the event loop, at most so many at a time.

Each call has a thread of its own that never keeps the process alive: a call that hangs costs its slot, not the run.
A slot is given back when the call is really over, also where nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadLimiter:
    """Slots for blocking calls."""

    def __init__(self, limit: int, name: str) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._name = name

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or what it raised."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self._slots.release()
            if future.done():
                return  # the caller has gone
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as raised:
                # a future may not carry StopIteration, and SystemExit would end the loop's thread
                ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if ordinary else RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await future
