"""What goes wrong, and when: turns the faults of a scenario into changes of the back ends' `Health`.

| kind | effect |
|---|---|
| `crash` | the target loses everything; restarts fail while the cause lasts |
| `hang` | operations do not finish until it ends; a restart of an engine or trainer ends it too |
| `slowdown` | everything takes `factor` times as long; without `for_s` for ever |
| `lost_message` | a request or bucket is lost, its sender learns of it later |
| `late_message` | a request or bucket takes `factor` seconds more |
| `corrupted_bucket` | a bucket arrives with something else in it |
| `lost_node` | every engine with a GPU on node n crashes; the trainer lives elsewhere |

With `for_s` a message fault hits every message of that time, without it the next one. A `hang` without `for_s` lasts
until a restart, or takes one operation of an environment, a reward, a scorer or a transfer with it for good.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from types import TracebackType

from headway.config.simulation import Fault
from headway.errors import ConfigError
from headway.seeding import Rng
from headway.sim.health import Health

_TARGET = re.compile(r"engine/(lent-)?\d+|node/\d+|trainer|weights|environment|reward|logp|ref_logp|critic")
_BUCKETS_ONLY = frozenset({"corrupted_bucket"})


class FaultInjector:
    """Applies faults on the running loop, from `start` (or entering it) until `stop` (or leaving it)."""

    def __init__(
        self,
        faults: Iterable[Fault] = (),
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
        self._healths: dict[str, Health] = {}
        self._timers: list[asyncio.TimerHandle] = []
        for index, fault in enumerate(self.faults):
            _check(fault, engines, f"simulation.faults[{index}]")

    def health(self, target: str) -> Health:
        """The health of `target`, to construct its back end with; always the same one."""
        return self._healths.setdefault(target, Health(target))

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

    def _hit(self, fault: Fault) -> Iterator[str]:
        if fault.kind != "lost_node":
            yield fault.target
            return
        node = int(fault.target.removeprefix("node/"))
        for engine in range(self._engines):
            first = self._first_gpu + engine * self._engine_gpus
            last = first + self._engine_gpus - 1
            if first // self._gpus_per_node <= node <= last // self._gpus_per_node:
                yield f"engine/{engine}"


def _check(fault: Fault, engines: int, key: str) -> None:
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


def random_faults(rng: Rng, horizon_s: float, engines: int, intensity: float, *, nodes: int = 1) -> tuple[Fault, ...]:
    """`intensity` faults on average, spread over `horizon_s`, in order of time.

    Every fault ends by itself within a tenth of the horizon or can be mended by a restart: a run that
    recovers can always end.
    """
    count = int(intensity) + (rng.random() < intensity % 1.0)
    faults = [_random_fault(rng, horizon_s, engines, nodes) for _ in range(count)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _random_fault(rng: Rng, horizon_s: float, engines: int, nodes: int) -> Fault:
    kind, roles = _RANDOM_KINDS[rng.randrange(0, len(_RANDOM_KINDS))]
    role = roles[rng.randrange(0, len(roles))]
    number = {"engine": engines, "node": nodes}.get(role)
    target = role if number is None else f"{role}/{rng.randrange(0, max(number, 1))}"
    lasts = rng.random() < 0.5 or kind == "slowdown"
    return Fault(
        kind=kind,  # type: ignore[arg-type]
        target=target,
        at_s=rng.random() * horizon_s,
        for_s=rng.random() * horizon_s / 10 if lasts else 0.0,
        factor=1.0 + rng.random() * 7.0,
    )
