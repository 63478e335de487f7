"""How one simulated back end is doing: what the fault injector breaks and the back end asks about.

Every back end has a `BackendHealth`, its own untouched one where nobody injects faults. Operations that take time take it
through `spend`, which slows down, hangs and fails as the health says, also half-way through.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from headway.config.simulation_config import FaultConfig
from headway.errors import BackendError, ConfigError
from headway.seeding import Rng

MESSAGE_LOSS_TIMEOUT_S = 1.0
"""When the sender of a lost message learns of it."""

_MESSAGES = frozenset({"lost_message", "late_message", "corrupted_bucket"})


class BackendHealth:
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
        self._active: list[FaultConfig] = []
        self._blows: list[FaultConfig] = []
        self._listeners: list[Callable[[str], None]] = []
        self._waiting: dict[asyncio.Future[bool], type[BackendError]] = {}

    @property
    def down(self) -> bool:
        """Whether the cause of a crash still lasts: restarts fail."""
        return any(fault.kind in ("crash", "lost_node") for fault in self._active)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` of every change; a back end whose state a crash wipes out needs it."""
        self._listeners.append(listener)

    def begin(self, fault: FaultConfig) -> None:
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

    def end(self, fault: FaultConfig) -> None:
        """The cause of `fault` is gone. Called by the injector."""
        if fault in self._active:
            self._active.remove(fault)
            self._changed()

    def restarted(self) -> None:
        """A restart heals hangs, and whoever waited for a hung operation is told that it is gone."""
        self._active = [fault for fault in self._active if fault.kind != "hang"]
        self._fail(f"{self.target} was restarted")
        self._changed()

    def take(self, kind: str) -> FaultConfig | None:
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
            await asyncio.sleep(MESSAGE_LOSS_TIMEOUT_S)
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


_TARGET = re.compile(r"engine/(lent-)?\d+|node/\d+|trainer|weights|environment|reward|logp|ref_logp|critic")
_BUCKETS_ONLY = frozenset({"corrupted_bucket"})


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
        """Engine n sits on the `engine_gpus` devices from `first_gpu + n · engine_gpus` on."""
        self.faults = tuple(faults)
        self._engines = engines
        self._engine_gpus = engine_gpus
        self._gpus_per_node = gpus_per_node
        self._first_gpu = first_gpu
        self._healths: dict[str, BackendHealth] = {}
        self._timers: list[asyncio.TimerHandle] = []
        for index, fault in enumerate(self.faults):
            _check(fault, engines, f"simulation.faults[{index}]")

    def health(self, target: str) -> BackendHealth:
        """The health of `target`, to construct its back end with; always the same one."""
        return self._healths.setdefault(target, BackendHealth(target))

    def start(self) -> None:
        """Schedule every fault, counted from now."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for fault in self.faults:
            for target in self._hit(fault):
                health = self.health(target)
                self._timers.append(loop.call_at(start + fault.at_s, health.begin, fault))
                if fault.for_s > 0:
                    self._timers.append(loop.call_at(start + fault.at_s + fault.for_s, health.end, fault))

    def stop(self) -> None:
        """Nothing more sets in or ends."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def __aenter__(self) -> FaultInjector:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _hit(self, fault: FaultConfig) -> Iterator[str]:
        if fault.kind != "lost_node":
            yield fault.target
            return
        node = int(fault.target.removeprefix("node/"))
        for engine in range(self._engines):
            first = self._first_gpu + engine * self._engine_gpus
            last = first + self._engine_gpus - 1
            if first // self._gpus_per_node <= node <= last // self._gpus_per_node:
                yield f"engine/{engine}"


def _check(fault: FaultConfig, engines: int, key: str) -> None:
    if not _TARGET.fullmatch(fault.target):
        raise ConfigError("no such target", key=f"{key}.target", value=fault.target, hint="engine/0, trainer, weights")
    if (fault.kind == "lost_node") != fault.target.startswith("node/"):
        raise ConfigError(
            f"does not fit {fault.kind}", key=f"{key}.target", value=fault.target, hint="lost_node hits node/<n>"
        )
    number = fault.target.removeprefix("engine/")
    if number.isdecimal() and int(number) >= engines:
        raise ConfigError(f"there are {engines} engines", key=f"{key}.target", value=fault.target)
    if fault.kind in _BUCKETS_ONLY and fault.target != "weights":
        raise ConfigError("only weights travel in buckets", key=f"{key}.target", value=fault.target, hint="weights")
    if fault.at_s < 0 or fault.for_s < 0 or fault.factor < 0:
        raise ConfigError("times and factors are not negative", key=key, value=(fault.at_s, fault.for_s, fault.factor))


_RANDOM_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("crash", ("engine", "engine", "engine", "trainer", "ref_logp")),
    ("hang", ("engine", "engine", "trainer", "weights", "environment", "reward")),
    ("slowdown", ("engine", "engine", "trainer", "weights", "environment", "reward")),
    ("lost_message", ("engine", "weights", "trainer")),
    ("late_message", ("engine", "weights")),
    ("corrupted_bucket", ("weights",)),
    ("lost_node", ("node",)),
)


def draw_random_faults(
    rng: Rng, horizon_s: float, engines: int, intensity: float, *, nodes: int = 1
) -> tuple[FaultConfig, ...]:
    """`intensity` faults on average, spread over `horizon_s`, in order of time.

    Every fault ends by itself within a tenth of the horizon or can be mended by a restart: a run that
    recovers can always end.
    """
    count = int(intensity) + (rng.random() < intensity % 1.0)
    faults = [_random_fault(rng, horizon_s, engines, nodes) for _ in range(count)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _random_fault(rng: Rng, horizon_s: float, engines: int, nodes: int) -> FaultConfig:
    kind, roles = _RANDOM_KINDS[rng.randrange(0, len(_RANDOM_KINDS))]
    role = roles[rng.randrange(0, len(roles))]
    number = {"engine": engines, "node": nodes}.get(role)
    target = role if number is None else f"{role}/{rng.randrange(0, max(number, 1))}"
    lasts = rng.random() < 0.5 or kind == "slowdown"
    return FaultConfig(
        kind=kind,  # type: ignore[arg-type]
        target=target,
        at_s=rng.random() * horizon_s,
        for_s=rng.random() * horizon_s / 10 if lasts else 0.0,
        factor=1.0 + rng.random() * 7.0,
    )
