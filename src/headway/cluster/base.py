"""Pools of devices per role, and the locks that roles on the same devices share.

A lock has an owner and a deadline: a role that cannot have it in time is told who holds it and since when.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from headway.errors import ConfigError, LockTimeout
from headway.monitor.wait_graph import WaitGraph

Handler = Callable[[], Awaitable[None]]


async def _do_nothing() -> None:
    return


class ResourceLock:
    """Mutual exclusion in the order of asking, with the name of the owner."""

    def __init__(self, name: str, *, waits: WaitGraph, clock: Callable[[], float]) -> None:
        self.name = name
        self.owner = ""
        """The role that holds it now. Empty: none."""
        self._when_held: Handler = _do_nothing
        self._when_free: Handler = _do_nothing
        self._held_since_s = 0.0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._waits, self._clock = waits, clock

    def call_when_held(self, when_held: Handler, *, when_free: Handler) -> None:
        """Await `when_held` whenever the lock is taken, so that other users of the devices make room.

        Await `when_free` whenever it is released and no role waits for it.
        """
        self._when_held, self._when_free = when_held, when_free

    @asynccontextmanager
    async def hold(self, owner: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold the lock for the length of the block. Raises `LockTimeout` if it is not free in `timeout_s`."""
        await self._acquire(owner, timeout_s)
        try:
            await self._when_held()
            yield
        finally:
            try:
                if all(turn.done() for turn in self._queue):
                    await self._when_free()
            finally:
                self._release()

    async def _acquire(self, owner: str, timeout_s: float) -> None:
        if self.owner:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                with self._waits.waiting(owner, self._describe_holder, lambda: self.owner):
                    async with asyncio.timeout(timeout_s):
                        await turn
            except TimeoutError:
                self._decline(turn)
                held_s = self._clock() - self._held_since_s
                raise LockTimeout(
                    f"{owner} waited {timeout_s} s for {self.name}, held by {self.owner} for {held_s:.1f} s"
                ) from None
            except asyncio.CancelledError:
                self._decline(turn)
                raise
            finally:
                if turn in self._queue:
                    self._queue.remove(turn)
        self.owner = owner
        self._held_since_s = self._clock()

    def _describe_holder(self) -> str:
        return f"lock on {self.name}, held for {self._clock() - self._held_since_s:.1f} s"

    def _decline(self, turn: asyncio.Future[None]) -> None:
        """Give up a place in the queue. If the lock was given to it in this very tick, pass it on."""
        if turn.done() and not turn.cancelled():
            self._release()

    def _release(self) -> None:
        self.owner = ""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                self.owner = "(next in line)"
                turn.set_result(None)
                return


class DevicePools:
    """The devices of each role. Roles whose devices overlap share one lock."""

    def __init__(self, devices: Mapping[str, tuple[int, ...]], *, waits: WaitGraph, clock: Callable[[], float]) -> None:
        for role, pool in devices.items():
            if not pool:
                raise ConfigError("has no devices", key=f"{role}.device_mapping", value=list(pool))
        self.devices = dict(devices)
        self.locks: dict[str, ResourceLock] = {}
        for role in devices:
            shared = [self.locks[other] for other in self.locks if set(devices[other]) & set(devices[role])]
            lock = shared[0] if shared else ResourceLock(f"devices of {role}", waits=waits, clock=clock)
            self.locks[role] = lock
            self.locks = {other: lock if held in shared else held for other, held in self.locks.items()}

    def are_shared(self, left: str, right: str) -> bool:
        """Return whether two roles take turns on the same devices."""
        return left in self.locks and self.locks[left] is self.locks.get(right)

    @asynccontextmanager
    async def hold(self, role: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold the role's devices for the length of the block. A role without devices of its own never waits."""
        lock = self.locks.get(role)
        if lock is None:
            yield
        else:
            async with lock.hold(role, timeout_s):
                yield
