"""A broadcast wake-up: waiters look again at the state they care about, so a spurious wake-up does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """`notify` wakes everybody who waits now. Cheap when nobody does."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake all waiters."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next `notify`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; it is looked at now and after every `notify`."""
        while not condition():
            await self.wait()
