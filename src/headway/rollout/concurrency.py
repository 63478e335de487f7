"""Building blocks of concurrency: a broadcast signal, an ordered task group and a turn barrier."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Signal:
    """Wakes all current waiters on `notify`, which costs nothing when there are none."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. It is checked now and after every `notify`."""
        while not condition():
            await self.wait()


class OrderedSet(dict[Any, None]):
    """The part of the set interface that a task group uses, ordered by time of adding."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class OrderedTaskGroup(asyncio.TaskGroup):
    """Cancels its tasks in the order in which they were started. The task group of asyncio keeps a set, ordered by
    memory address, so that the end of a run would differ from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks = OrderedSet()  # type: ignore[assignment]


def spawn_task(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """Start a task in `group`; return `None` if the group is shutting down."""
    try:
        return group.create_task(coroutine, name=name)
    except RuntimeError:
        coroutine.close()
        return None


class TurnBarrier:
    """A barrier whose members come and go: `arrive` returns once every present member has arrived. It is the
    baseline of systems that step environments together."""

    def __init__(self) -> None:
        self._present = 0
        self._arrived = 0
        self._round = 0
        self._open = Signal()

    def enter(self) -> None:
        self._present += 1

    def leave(self) -> None:
        """Stop being a member; the others no longer wait."""
        self._present -= 1
        self._open_if_full()

    async def arrive(self) -> None:
        """Wait for all other members."""
        this_round = self._round
        self._arrived += 1
        self._open_if_full()
        try:
            await self._open.until(lambda: self._round != this_round)
        finally:
            if self._round == this_round:
                self._arrived -= 1

    def _open_if_full(self) -> None:
        if self._present and self._arrived >= self._present:
            self._round += 1
            self._arrived = 0
            self._open.notify()
