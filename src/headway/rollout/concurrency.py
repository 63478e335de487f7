"""A broadcast wake-up: waiters look again at the state they care about, so a spurious wake-up does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar


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


class OrderedSet(dict[Any, None]):
    """The part of a set that a task group uses, in the order of adding."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class OrderedTaskGroup(asyncio.TaskGroup):
    """Cancels what is left in the order it was started. asyncio's own keeps a set, ordered by memory address: the
    end of a run would read differently each time."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks = OrderedSet()  # type: ignore[assignment]


def spawn_task(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """A task of `group`, or nothing if the group is being torn down: then what it would do is no longer wanted."""
    try:
        return group.create_task(coroutine, name=name)
    except RuntimeError:
        coroutine.close()
        return None


class TurnBarrier:
    """`arrive` returns once every present member has arrived."""

    def __init__(self) -> None:
        self._present = 0
        self._arrived = 0
        self._round = 0
        self._open = Signal()

    def enter(self) -> None:
        """Become a member."""
        self._present += 1

    def leave(self) -> None:
        """Stop being one; the others no longer wait for you."""
        self._present -= 1
        self._open_if_full()

    async def arrive(self) -> None:
        """Wait for everybody else."""
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


T = TypeVar("T")


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, T]) -> T:
    """The result of `call`. Raises `TimeoutError` when it takes longer than `limit_s`."""
    try:
        waits_for = call.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    async with asyncio.timeout(limit_s):
        return await _drive_suspended(call, waits_for)


@coroutine
def _drive_suspended(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
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
