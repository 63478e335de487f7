"""Adds and removes engines during a run, and lends the trainer's devices to engines while the trainer waits.

Guarantees: a new engine gets no request before it serves the newest weights. The requests of an engine that leaves
continue on others with the tokens they have. The last engine in service does not leave. Requests that come while the
trainer is down take effect in the next pipeline. Engines on lent devices are not counted.

The fleet does not make engines (`EngineReserve` does) and does not change how far rollout runs ahead, which follows
from α and the batch. A resumed run starts with the engines of its configuration again.
"""

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
    """Adds and removes engines. `scale` takes new ones from `reserve`."""

    def __init__(self, hub: InferenceHub, reserve: EngineReserve | None, *, events: EventLog) -> None:
        self._hub, self._reserve, self._events = hub, reserve, events
        self._supervisor: ReplicaSupervisor | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._leaving: dict[str, Replica] = {}
        """Engines that were removed and are not closed yet."""

    @property
    def names(self) -> list[str]:
        """Names of the engines of the run, those that are being started or restarted included."""
        return [replica.name for replica in self._own_replicas()]

    # -- requests

    def add(self, engine: Engine) -> None:
        """Add an engine. Raise `ConfigError` if its name is taken."""
        if engine.name in (*self._leaving, *(replica.name for replica in self._hub.replicas)):
            raise ConfigError("there is one of that name", key="engine", value=engine.name)
        replica = self._hub.add(engine)
        self._events.emit(EngineJoin(who=engine.name, engines=len(self.names)))
        if self._supervisor is not None:
            self._supervisor.bring_into_service(replica)

    def remove(self, name: str) -> None:
        """Remove an engine. Raise `ConfigError` if there is none of that name, or no other to do its work."""
        replica = next((replica for replica in self._own_replicas() if replica.name == name), None)
        if replica is None:
            raise ConfigError("there is no such engine", key="engine", value=name, hint=", ".join(self.names))
        others = [other for other in self._own_replicas() if other is not replica]
        if not others or (replica.in_service and not any(other.in_service for other in others)):
            raise ConfigError("the last engine in service does not leave", key="engine", value=name)
        self._hub.remove(replica)
        self._leaving[name] = replica
        self._events.emit(EngineLeave(who=name, engines=len(others)))
        self._on_change()
        self._close_when_empty(replica)

    def scale(self, wanted: int) -> tuple[list[str], list[str]]:
        """Add or remove engines until there are `wanted`. Return the names that joined and those that left."""
        before = self.names
        if wanted < 1:
            raise ConfigError("a run has at least one engine", key="engines", value=wanted)
        if wanted > len(before):
            self._grow(wanted)
        # engines out of service leave first, then the newest
        by_cost = sorted(self._own_replicas(), key=lambda replica: (replica.in_service, -replica.number))
        for replica in by_cost[: max(len(before) - wanted, 0)]:
            self.remove(replica.name)
        return [name for name in self.names if name not in before], [name for name in before if name not in self.names]

    # -- called by the flow

    def begin_pipeline(
        self, supervisor: ReplicaSupervisor, tasks: asyncio.TaskGroup, on_change: Callable[[], None]
    ) -> None:
        """Work with a new pipeline. Removals that the last one did not finish come first."""
        self._supervisor, self._tasks, self._on_change = supervisor, tasks, on_change
        for replica in list(self._leaving.values()):
            self._close_when_empty(replica)

    def end_pipeline(self) -> None:
        self._supervisor = self._tasks = None
        self._on_change = lambda: None

    # -- internals

    def _own_replicas(self) -> Sequence[Replica]:
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

    def _close_when_empty(self, replica: Replica) -> None:
        if self._tasks is not None and self._supervisor is not None:
            spawn_task(self._tasks, self._close_engine(replica, self._supervisor), f"leave/{replica.name}")

    async def _close_engine(self, replica: Replica, supervisor: ReplicaSupervisor) -> None:
        try:
            await supervisor.stop_reviving(replica)
            await self._hub.empty(replica)
        finally:  # also when the pipeline ends: then no request runs there any more
            await replica.engine.close()
            self._leaving.pop(replica.name, None)


class DeviceLending:
    """Lets engines on the trainer's devices work while the trainer waits, and stops them before it goes on.

    It hooks into the lock of the trainer's devices. Before a training step, requests move to other engines with the
    tokens they have. For the scoring of a group, which is short, they are paused. Weights reach these engines like all
    others. `on_change` is called when the served version may have changed.
    """

    def __init__(self, hub: InferenceHub, lock: ResourceLock, on_change: Callable[[], None]) -> None:
        self._hub, self._lock, self._on_change = hub, lock, on_change
        lock.call_when_held(self.reclaim_devices, when_free=self.lend_devices)

    async def reclaim_devices(self) -> None:
        """Free the devices for the holder of the lock."""
        keep = self._lock.owner != "train"
        lent = [replica for replica in self._hub.replicas if replica.lent]
        for replica in lent:
            self._hub.reclaim(replica)
        await asyncio.gather(*(self._hub.free_devices(replica, keep=keep) for replica in lent))
        self._on_change()

    async def lend_devices(self) -> None:
        """Let the engines work on the devices again."""
        lent = [replica for replica in self._hub.replicas if replica.lent]
        await asyncio.gather(*(self._hub.return_to_service(replica) for replica in lent))
        self._on_change()
