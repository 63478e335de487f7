"""Injects faults into a simulated run: turns the faults of a scenario into changes of the back ends' health.

| kind | effect |
|---|---|
| `crash` | the target loses everything; restarts fail while the cause lasts |
| `hang` | operations do not finish until it ends; a restart of an engine or trainer ends it too |
| `slowdown` | everything takes `factor` times as long; without `for_s` for ever |
| `lost_message` | a request or bucket is lost, and its sender learns of it later |
| `late_message` | a request or bucket takes `factor` seconds more |
| `corrupted_bucket` | a bucket arrives with something else in it |
| `lost_node` | every engine with a GPU on node n crashes; the trainer is on another node |

With `for_s` a message fault hits every message of that time, without it the next one. A `hang` without `for_s` lasts
until a restart; in an environment, a reward, a scorer or a transfer it makes one operation hang for good.

Every back end has a `BackendHealth`, an untouched one if nobody injects faults. Operations that take time call `spend`,
which slows down, hangs and fails as the health says, also half-way through.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator

from headway.config.simulation_config import FaultConfig
from headway.errors import BackendError, ConfigError

MESSAGE_LOSS_TIMEOUT_S = 1.0
"""Time after which the sender of a lost message learns of it."""
_MESSAGE_FAULTS = frozenset({"lost_message", "late_message", "corrupted_bucket"})
_CRASH_FAULTS = frozenset({"crash", "lost_node"})
_TARGET = re.compile(r"engine/(lent-)?\d+|node/\d+|trainer|weights|environment|reward|logp|ref_logp|critic")


class BackendHealth:
    """The faults of one back end at this moment. Listeners are called with `"crash"` or `"change"`."""

    __slots__ = ("_active", "_listeners", "_single", "_waiters", "crashes", "hung", "restartable", "slow", "target")

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.restartable = target.startswith("engine/") or target == "trainer"
        """Whether a hang without an end lasts until a restart; otherwise it hits one operation."""
        self.hung = False
        self.slow = 1.0
        """Factor by which everything takes longer."""
        self.crashes = 0
        """Number of crashes so far."""
        self._active: list[FaultConfig] = []
        self._single: list[FaultConfig] = []
        """Faults that hit the next message or operation only."""
        self._listeners: list[Callable[[str], None]] = []
        self._waiters: dict[asyncio.Future[bool], type[BackendError]] = {}

    @property
    def down(self) -> bool:
        """Whether the cause of a crash still lasts, so that restarts fail."""
        return any(fault.kind in _CRASH_FAULTS for fault in self._active)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with every change; back ends that lose their state in a crash need it."""
        self._listeners.append(listener)

    def begin(self, fault: FaultConfig) -> None:
        """Let `fault` set in."""
        is_single = fault.for_s <= 0 and fault.kind != "slowdown"
        if fault.kind in _MESSAGE_FAULTS:
            (self._single if is_single else self._active).append(fault)
        elif fault.kind in _CRASH_FAULTS:
            if not is_single:
                self._active.append(fault)
            self.crashes += 1
            self._fail_waiters(f"{self.target} crashed ({fault.kind})")
            self._notify("crash")
        elif fault.kind == "hang" and is_single and not self.restartable:
            self._single.append(fault)
        else:
            self._active.append(fault)
            self._apply_change()

    def end(self, fault: FaultConfig) -> None:
        """Remove the cause of `fault`."""
        if fault in self._active:
            self._active.remove(fault)
            self._apply_change()

    async def restart(self, name: str, seconds: float, error: type[BackendError]) -> None:
        """Take `seconds` of healthy time to restart, which ends hangs; raise `error` if a crash comes between."""
        self._active = [fault for fault in self._active if fault.kind != "hang"]
        self._fail_waiters(f"{self.target} was restarted")
        self._apply_change()
        crashes = self.crashes
        await asyncio.sleep(seconds * self.slow)
        if self.down or self.crashes != crashes:
            raise error(f"{name} crashed again while it was restarted")

    def take(self, kind: str) -> FaultConfig | None:
        """Return the fault of `kind` that hits the message or operation at hand, if any; a single one hits once."""
        for fault in (*self._active, *self._single):
            if fault.kind == kind:
                if fault not in self._active:
                    self._single.remove(fault)
                return fault
        return None

    async def deliver(self, error: type[BackendError]) -> None:
        """Deliver one message to the target: at once, late, or never (`error`, once the sender gives up)."""
        if not self._active and not self._single:
            return
        if late := self.take("late_message"):
            await asyncio.sleep(late.factor)
        if self.take("lost_message"):
            await asyncio.sleep(MESSAGE_LOSS_TIMEOUT_S)
            raise error(f"{self.target}: a message was lost")

    async def spend(self, seconds: float, error: type[BackendError]) -> None:
        """Take `seconds` of healthy time; raise `error` if the target is down or goes down meanwhile."""
        if self._active or self._single:
            if self.down:
                raise error(f"{self.target} is down")
            if not self.restartable and any(fault.kind == "hang" for fault in self._single):
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
        """Return whether `seconds` have passed without a change of health; None waits for a change only."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _set_result, waiter, True)
        self._waiters[waiter] = error
        try:
            return await waiter
        finally:
            del self._waiters[waiter]
            if timer is not None:
                timer.cancel()

    def _apply_change(self) -> None:
        self.hung = any(fault.kind == "hang" for fault in self._active)
        self.slow = 1.0
        for fault in self._active:
            if fault.kind == "slowdown":
                self.slow *= fault.factor
        for waiter in self._waiters:
            _set_result(waiter, False)
        self._notify("change")

    def _fail_waiters(self, message: str) -> None:
        for waiter, error in self._waiters.items():
            if not waiter.done():
                waiter.set_exception(error(message))
                waiter.exception()  # marks it as retrieved: the waiting task may be cancelled before it looks

    def _notify(self, change: str) -> None:
        for listener in self._listeners:
            listener(change)


def _set_result(waiter: asyncio.Future[bool], result: bool) -> None:
    if not waiter.done():
        waiter.set_result(result)


class FaultInjector:
    """Applies faults on the running loop, from `start` (or entering it) until `stop` (or leaving it)."""

    def __init__(
        self,
        faults: Iterable[FaultConfig] = (),
        *,
        engines: int = 0,
        engine_gpus: int = 1,
        gpus_per_node: int = 8,
        first_gpu: int = 0,
    ) -> None:
        """Engine n has the `engine_gpus` devices from `first_gpu + n · engine_gpus` on."""
        self.faults = tuple(faults)
        self._engines, self._engine_gpus = engines, engine_gpus
        self._gpus_per_node, self._first_gpu = gpus_per_node, first_gpu
        self._healths: dict[str, BackendHealth] = {}
        self._timers: list[asyncio.TimerHandle] = []
        for index, fault in enumerate(self.faults):
            _check_fault(fault, engines, f"simulation.faults[{index}]")

    def health(self, target: str) -> BackendHealth:
        """Return the health to construct the back end `target` with; always the same one."""
        return self._healths.setdefault(target, BackendHealth(target))

    def start(self) -> None:
        """Schedule every fault, counted from now."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for fault in self.faults:
            for target in self._list_targets(fault):
                health = self.health(target)
                self._timers.append(loop.call_at(start + fault.at_s, health.begin, fault))
                if fault.for_s > 0:
                    self._timers.append(loop.call_at(start + fault.at_s + fault.for_s, health.end, fault))

    def stop(self) -> None:
        """Let no further fault set in or end."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def __aenter__(self) -> FaultInjector:
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.stop()

    def _list_targets(self, fault: FaultConfig) -> Iterator[str]:
        if fault.kind != "lost_node":
            yield fault.target
            return
        node = int(fault.target.removeprefix("node/"))
        for engine in range(self._engines):
            first = self._first_gpu + engine * self._engine_gpus
            last = first + self._engine_gpus - 1
            if first // self._gpus_per_node <= node <= last // self._gpus_per_node:
                yield f"engine/{engine}"


def _check_fault(fault: FaultConfig, engines: int, key: str) -> None:
    target_key, target = f"{key}.target", fault.target
    if not _TARGET.fullmatch(target):
        raise ConfigError("no such target", key=target_key, value=target, hint="engine/0, trainer, weights")
    if (fault.kind == "lost_node") != target.startswith("node/"):
        hint = "lost_node hits node/<n>"
        raise ConfigError(f"does not fit {fault.kind}", key=target_key, value=target, hint=hint)
    number = target.removeprefix("engine/")
    if number.isdecimal() and int(number) >= engines:
        raise ConfigError(f"there are {engines} engines", key=target_key, value=target)
    if fault.kind == "corrupted_bucket" and target != "weights":
        raise ConfigError("only weights travel in buckets", key=target_key, value=target, hint="weights")
    if fault.at_s < 0 or fault.for_s < 0 or fault.factor < 0:
        raise ConfigError("times and factors are not negative", key=key, value=(fault.at_s, fault.for_s, fault.factor))
