"""Limits on how many calls of a reward run at a time, and blocking calls on threads.

Each blocking call has its own daemon thread: a call that hangs costs its slot, but does not stop the run or keep the
process alive. A slot becomes free when the call has really ended, even if its caller was cancelled.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from headway.processes.loop_thread import make_ordinary, settle_future

P = ParamSpec("P")
T = TypeVar("T")


class CallSlots:
    """Lets at most `limit` calls run at a time."""

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, make_call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await a call once there is a slot. The call goes on to its end if the caller is cancelled."""
        await self._slots.acquire()
        running = asyncio.ensure_future(make_call())
        self._running.add(running)
        running.add_done_callback(self._free_slot)
        return await asyncio.shield(running)

    async def run_cancellable(self, make_call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await a call once there is a slot. The call is cancelled with its caller."""
        async with self._slots:
            return await make_call()

    def _free_slot(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        self._slots.release()
        if not running.cancelled():
            running.exception()  # nobody may be there any more to retrieve it


class ThreadLimiter:
    """Runs at most `limit` blocking calls at a time, on threads called `name`."""

    def __init__(self, limit: int, name: str) -> None:
        self._slots, self._name = CallSlots(limit), name

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `function`, or raise what it raised."""
        return await self._slots.run(lambda: run_on_thread(self._name, lambda: function(*args, **kwargs)))


async def run_on_thread(name: str, function: Callable[[], T], on_start: Callable[[int], object] = int) -> T:
    """Return the result of `function`, called on a new thread, or raise what it raised.

    `on_start` gets the identity of the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = make_ordinary(raised)
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(settle_future, future, result, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    on_start(thread.ident or 0)
    return await future
