"""Deadlines of calls into environments and rewards, which stand still while a call waits for its turn.

A call that waits in a queue, or for a process that has a deadline of its own, pauses the deadline around it
(`pause_deadline`): what others do with the time is not its fault.
"""

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadline:
    """The deadline of one call, with its timer once the call has suspended."""

    __slots__ = ("limit_s", "pauses", "timer")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.pauses = 0
        """How many parts of the call wait for their turn."""
        self.timer: asyncio.Timeout | None = None

    def pause(self, change: int) -> None:
        """Begin (1) or end (-1) a pause. The clock starts anew when the last pause ends."""
        self.pauses += change
        if self.timer is not None and not self.timer.expired():
            now = asyncio.get_running_loop().time()
            self.timer.reschedule(None if self.pauses else now + self.limit_s)


_CURRENT: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def pause_deadline() -> Iterator[None]:
    """Stop the clock of the deadline around this call, if there is one, inside the block."""
    deadline = _CURRENT.get()
    if deadline is None:
        yield
        return
    deadline.pause(1)
    try:
        yield
    finally:
        deadline.pause(-1)


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, T]) -> T:
    """Await `call`; raise `TimeoutError` if it takes longer than `limit_s`.

    Most environment steps and scores never suspend. A timer for each would be a quarter of the scheduler's work, so it
    is armed only once a call has really suspended.
    """
    try:
        waits_for = call.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    async with asyncio.timeout(limit_s):
        return await _drive_suspended(call, waits_for)


async def run_with_pausable_deadline(limit_s: float, call: Coroutine[Any, Any, T]) -> T:
    """Await `call` like `run_with_deadline`; `pause_deadline` inside the call stops the clock."""
    deadline = Deadline(limit_s)
    token = _CURRENT.set(deadline)
    try:
        waits_for = call.send(None)
        async with asyncio.timeout(None if deadline.pauses else limit_s) as deadline.timer:
            return await _drive_suspended(call, waits_for)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        deadline.timer = None
        _CURRENT.reset(token)


@coroutine
def _drive_suspended(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Continue a coroutine that has already suspended, as `await` would."""
    while True:
        try:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = call.throw(error)
            else:
                waits_for = call.send(sent)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
