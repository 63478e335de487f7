"""Pools of devices per role, the locks that roles on the same devices share, and parts of a run that live elsewhere.

A lock has an owner and a deadline: whoever cannot have it in time is told who holds it and since when.

A peer is a part of the run in a process of its own. What it is asked are calls by name with records for arguments;
what it tells unasked are notes. Notes and answers arrive in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from headway.errors import ConfigError, LockTimeout
from headway.monitor.wait_graph import WaitGraph

_TAIL_BYTES, _TAIL_LINES = 4000, 12


class ResourceLock:
    """Mutual exclusion, first come first served, with a name on it."""

    def __init__(self, name: str, *, waits: WaitGraph, clock: Callable[[], float]) -> None:
        self.name = name
        self.owner = ""
        """Who holds it now; empty: nobody."""
        self._when_held: Callable[[], Awaitable[None]] | None = None
        self._when_free: Callable[[], Awaitable[None]] | None = None
        self._since_s = 0.0
        self._line: deque[asyncio.Future[None]] = deque()
        self._waits, self._clock = waits, clock

    def call_when_held(
        self, when_held: Callable[[], Awaitable[None]], *, when_free: Callable[[], Awaitable[None]]
    ) -> None:
        """Await `when_held` whenever the lock is taken, so that other users of the devices step aside, and `when_free`
        whenever it is released and nobody waits for it."""
        self._when_held, self._when_free = when_held, when_free

    @asynccontextmanager
    async def hold(self, owner: str, timeout_s: float) -> AsyncIterator[None]:
        """Held for the length of the block. Raises `LockTimeout` when it is not to be had in `timeout_s`."""
        await self._acquire(owner, timeout_s)
        try:
            if self._when_held is not None:
                await self._when_held()
            yield
        finally:
            try:
                if self._when_free is not None and all(turn.done() for turn in self._line):
                    await self._when_free()
            finally:
                self._release()

    async def _acquire(self, owner: str, timeout_s: float) -> None:
        if self.owner:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                with self._waits.waiting(owner, f"lock on {self.name}", self.owner):
                    async with asyncio.timeout(timeout_s):
                        await turn
            except TimeoutError:
                self._decline(turn)
                held_s = self._clock() - self._since_s
                raise LockTimeout(
                    f"{owner} waited {timeout_s} s for {self.name}, held by {self.owner} for {held_s:.1f} s"
                ) from None
            except asyncio.CancelledError:
                self._decline(turn)
                raise
            finally:
                if turn in self._line:
                    self._line.remove(turn)
        self.owner = owner
        self._since_s = self._clock()

    def _decline(self, turn: asyncio.Future[None]) -> None:
        """The turn is no longer wanted; if it was given in this very tick, the next in line has it."""
        if turn.done() and not turn.cancelled():
            self._release()

    def _release(self) -> None:
        self.owner = ""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                self.owner = "(next in line)"
                turn.set_result(None)
                return


class DevicePools:
    """Devices by role; roles whose devices overlap share one lock."""

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

    def shared(self, left: str, right: str) -> bool:
        """Whether two roles take turns on the same devices."""
        return left in self.locks and self.locks[left] is self.locks.get(right)

    @asynccontextmanager
    async def hold(self, role: str, timeout_s: float) -> AsyncIterator[None]:
        """The role's devices for the length of the block; at once for a role that has none of its own."""
        lock = self.locks.get(role)
        if lock is None:
            yield
        else:
            async with lock.hold(role, timeout_s):
                yield
