"""The engines of a run as they come and go.

Guarantees: a newcomer gets no request before it serves the newest weights; the requests of one that leaves go on
elsewhere with the tokens they have; the last engine in service does not leave. What is asked for while the trainer is
away happens in the next line. Engines on lent devices are not counted: they come and go with the trainer's work.

Does not make engines (`EngineReserve` does), and does not change how far rollout runs ahead: slots are a matter of α and the
batch. A resumed run begins with the engines of its configuration again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from headway.cluster.base import ResourceLock
from headway.engines.base import Engine
from headway.errors import ConfigError
from headway.flow.backends import EngineReserve
from headway.flow.replica_supervisor import ReplicaSupervisor
from headway.monitor.event_log import EventLog
from headway.monitor.events import EngineJoin, EngineLeave
from headway.rollout.concurrency import spawn_task
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica


class EngineFleet:
    """Adds engines and sees them off. `reserve` is where `scale` gets them from."""

    def __init__(self, hub: InferenceHub, reserve: EngineReserve | None, *, events: EventLog) -> None:
        self._hub, self._reserve, self._events = hub, reserve, events
        self._supervisor: ReplicaSupervisor | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._leaving: dict[str, Replica] = {}
        """Let go, and not closed yet."""

    @property
    def names(self) -> list[str]:
        """Engines of the run, those that are being started or restarted included."""
        return [replica.name for replica in self._own()]

    # -- what may be asked

    def add(self, engine: Engine) -> None:
        """Have another engine. Raises `ConfigError` where the name is taken."""
        if engine.name in (*self._leaving, *(replica.name for replica in self._hub.replicas)):
            raise ConfigError("there is one of that name", key="engine", value=engine.name)
        replica = self._hub.add(engine)
        self._events.emit(EngineJoin(who=engine.name, engines=len(self.names)))
        if self._supervisor is not None:
            self._supervisor.welcome(replica)

    def remove(self, name: str) -> None:
        """Let an engine go. Raises `ConfigError` where there is none of that name, or nobody else to do its work."""
        replica = next((replica for replica in self._own() if replica.name == name), None)
        if replica is None:
            raise ConfigError("there is no such engine", key="engine", value=name, hint=", ".join(self.names))
        others = [other for other in self._own() if other is not replica]
        if not others or (replica.in_service and not any(other.in_service for other in others)):
            raise ConfigError("the last engine in service does not leave", key="engine", value=name)
        self._hub.remove(replica)
        self._leaving[name] = replica
        self._events.emit(EngineLeave(who=name, engines=len(others)))
        self._on_change()
        self._see_off(replica)

    def scale(self, wanted: int) -> tuple[list[str], list[str]]:
        """Have so many engines; who joins and who leaves. Raises `ConfigError` where that is not possible."""
        before = self.names
        if wanted < 1:
            raise ConfigError("a run has at least one engine", key="engines", value=wanted)
        if wanted > len(before):
            self._grow(wanted)
        for replica in sorted(self._own(), key=_removal_cost)[: max(len(before) - wanted, 0)]:
            self.remove(replica.name)
        return [name for name in self.names if name not in before], [name for name in before if name not in self.names]

    # -- what the flow tells it

    def begin_line(
        self, supervisor: ReplicaSupervisor, tasks: asyncio.TaskGroup, on_change: Callable[[], None]
    ) -> None:
        """From now on this line does the work; what was left undone is its first."""
        self._supervisor, self._tasks, self._on_change = supervisor, tasks, on_change
        for replica in list(self._leaving.values()):
            self._see_off(replica)

    def end_line(self) -> None:
        """There is no line now."""
        self._supervisor = self._tasks = None
        self._on_change = lambda: None

    # -- inside

    def _own(self) -> Sequence[Replica]:
        return [replica for replica in self._hub.replicas if not replica.lent]

    def _grow(self, wanted: int) -> None:
        if self._reserve is None:
            raise ConfigError("the run has all the engines that it can have", key="engines", value=wanted)
        if wanted > self._reserve.most:
            raise ConfigError(f"not on this placement: {self._reserve.why}", key="engines", value=wanted)
        taken, missing = {*self._leaving, *self.names}, wanted - len(self.names)
        names = (name for n in range(self._reserve.most) if (name := f"engine/{n}") not in taken)
        free = list(islice(names, missing))
        if len(free) < missing:
            still = f"{', '.join(self._leaving)} not closed yet: try again in a moment"
            raise ConfigError(still, key="engines", value=wanted)
        for name in free:
            self.add(self._reserve.make(name))

    def _see_off(self, replica: Replica) -> None:
        if self._tasks is not None and self._supervisor is not None:
            spawn_task(self._tasks, self._farewell(replica, self._supervisor), f"leave/{replica.name}")

    async def _farewell(self, replica: Replica, supervisor: ReplicaSupervisor) -> None:
        try:
            await supervisor.let_go(replica)
            await self._hub.empty(replica)
        finally:  # also when the line ends: then nothing runs there any more
            await replica.engine.close()
            self._leaving.pop(replica.name, None)


def _removal_cost(replica: Replica) -> tuple[bool, int]:
    """Who goes first: whoever does not serve, then whoever came last."""
    return replica.in_service, -replica.number


class DeviceLending:
    """What the trainer's lock calls when it is taken and when it is free. `on_change`: what is served may be another
    version than before."""

    def __init__(self, hub: InferenceHub, lock: ResourceLock, on_change: Callable[[], None]) -> None:
        self._hub, self._lock, self._on_change = hub, lock, on_change
        lock.on_busy, lock.on_free = self.take_back, self.lend

    async def take_back(self) -> None:
        """The devices are needed now, by whoever owns the lock."""
        keep = self._lock.owner != "train"
        lent = [replica for replica in self._hub.replicas if replica.lent]
        for replica in lent:
            self._hub.recall(replica)
        await asyncio.gather(*(self._hub.make_way(replica, keep=keep) for replica in lent))
        self._on_change()

    async def lend(self) -> None:
        """Nobody needs them."""
        lent = [replica for replica in self._hub.replicas if replica.lent]
        await asyncio.gather(*(self._hub.come_back(replica) for replica in lent))
        self._on_change()
