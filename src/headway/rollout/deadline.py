"""A deadline that costs nothing when it is not needed.

Most environment steps and verdicts of a verifiable task end without ever waiting. Arming and disarming a timer
for each would be a quarter of the scheduler's work; so the timer is armed only once a call has really suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(limit_s: float, call: Coroutine[Any, Any, T]) -> T:
    """The result of `call`. Raises `TimeoutError` when it takes longer than `limit_s`."""
    try:
        waits_for = call.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    async with asyncio.timeout(limit_s):
        return await _go_on(call, waits_for)


@coroutine
def _go_on(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Drive a coroutine that has suspended already, as `await` would have."""
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
