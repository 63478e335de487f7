"""How one simulated back end is doing: what the fault injector breaks and the back end asks about.

Every back end has a `Health`, its own untouched one where nobody injects faults. Operations that take time take it
through `spend`, which slows down, hangs and fails as the health says, also half-way through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.config.simulation import Fault
from headway.errors import BackendError

LOST_AFTER_S = 1.0
"""When the sender of a lost message learns of it."""

_MESSAGES = frozenset({"lost_message", "late_message", "corrupted_bucket"})


class Health:
    """The faults of one target, now. Listeners are called with `"crash"` or `"change"`."""

    __slots__ = ("_active", "_blows", "_listeners", "_waiting", "crashes", "hung", "restartable", "slow", "target")

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.restartable = target.startswith("engine/") or target == "trainer"
        """Whether a hang without an end lasts until `restarted`; elsewhere it takes one operation with it."""
        self.hung = False
        self.slow = 1.0
        """How many times longer everything takes."""
        self.crashes = 0
        """How often it has crashed so far."""
        self._active: list[Fault] = []
        self._blows: list[Fault] = []
        self._listeners: list[Callable[[str], None]] = []
        self._waiting: dict[asyncio.Future[bool], type[BackendError]] = {}

    @property
    def down(self) -> bool:
        """Whether the cause of a crash still lasts: restarts fail."""
        return any(fault.kind in ("crash", "lost_node") for fault in self._active)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` of every change; a back end whose state a crash wipes out needs it."""
        self._listeners.append(listener)

    def begin(self, fault: Fault) -> None:
        """`fault` sets in. Called by the injector."""
        single = fault.for_s <= 0 and fault.kind != "slowdown"
        if fault.kind in _MESSAGES:
            (self._blows if single else self._active).append(fault)
        elif fault.kind in ("crash", "lost_node"):
            if not single:
                self._active.append(fault)
            self._crash(f"{self.target} crashed ({fault.kind})")
        elif fault.kind == "hang" and single and not self.restartable:
            self._blows.append(fault)
        else:
            self._active.append(fault)
            self._changed()

    def end(self, fault: Fault) -> None:
        """The cause of `fault` is gone. Called by the injector."""
        if fault in self._active:
            self._active.remove(fault)
            self._changed()

    def restarted(self) -> None:
        """A restart heals hangs, and whoever waited for a hung operation is told that it is gone."""
        self._active = [fault for fault in self._active if fault.kind != "hang"]
        self._fail(f"{self.target} was restarted")
        self._changed()

    def take(self, kind: str) -> Fault | None:
        """The fault of `kind` that hits the message or operation at hand, if any; a single blow hits once."""
        for fault in self._active:
            if fault.kind == kind:
                return fault
        for fault in self._blows:
            if fault.kind == kind:
                self._blows.remove(fault)
                return fault
        return None

    async def deliver(self, error: type[BackendError]) -> None:
        """One message to the target: at once, late, or never (`error`, once the sender gives up)."""
        if not self._active and not self._blows:
            return
        if late := self.take("late_message"):
            await asyncio.sleep(late.factor)
        if self.take("lost_message"):
            await asyncio.sleep(LOST_AFTER_S)
            raise error(f"{self.target}: a message was lost")

    async def spend(self, seconds: float, error: type[BackendError]) -> None:
        """Take `seconds` of healthy time; raises `error` when the target is down or goes down meanwhile."""
        if self._active or self._blows:
            if self.down:
                raise error(f"{self.target} is down")
            if not self.restartable and any(fault.kind == "hang" for fault in self._blows):
                self.take("hang")
                await self._wait(None, error)
        elif seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        while True:
            started, slow, hung = loop.time(), self.slow, self.hung
            if await self._wait(None if hung else seconds * slow, error):
                return
            if not hung:
                seconds = max(seconds - (loop.time() - started) / slow, 0.0)

    async def _wait(self, seconds: float | None, error: type[BackendError]) -> bool:
        """Whether `seconds` have passed undisturbed; `None` waits for a change only."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _settle, waiter, True)
        self._waiting[waiter] = error
        try:
            return await waiter
        finally:
            del self._waiting[waiter]
            if timer is not None:
                timer.cancel()

    def _changed(self) -> None:
        self.hung = any(fault.kind == "hang" for fault in self._active)
        self.slow = 1.0
        for fault in self._active:
            if fault.kind == "slowdown":
                self.slow *= fault.factor
        for waiter in self._waiting:
            _settle(waiter, False)
        self._tell("change")

    def _crash(self, message: str) -> None:
        self.crashes += 1
        self._fail(message)
        self._tell("crash")

    def _fail(self, message: str) -> None:
        for waiter, error in self._waiting.items():
            if not waiter.done():
                waiter.set_exception(error(message))
                waiter.exception()  # Seen: the waiter may be cancelled before it can look.

    def _tell(self, change: str) -> None:
        for listener in self._listeners:
            listener(change)


def _settle(waiter: asyncio.Future[bool], undisturbed: bool) -> None:
    if not waiter.done():
        waiter.set_result(undisturbed)
