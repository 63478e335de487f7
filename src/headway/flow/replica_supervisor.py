"""Bringing failed replicas back: restart, seed with the newest weights, return to service.

After too many failures in a row a replica is given up, and tried again now and then: when the cause is gone it
comes back by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.config import ReliabilityConfig
from headway.errors import BackendError
from headway.flow.recovery import DegradationControl
from headway.flow.weight_updates import WeightUpdater
from headway.monitor.event_log import EventLog
from headway.monitor.events import BackendRestart, ErrorReport
from headway.rollout.concurrency import spawn_task
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica, ReplicaHealth


class ReplicaSupervisor:
    """One task for each replica that is out of service."""

    def __init__(
        self,
        hub: InferenceHub,
        updater: WeightUpdater,
        recovery: DegradationControl,
        reliability: ReliabilityConfig,
        *,
        events: EventLog,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        on_revived: Callable[[], None],
    ) -> None:
        self._on_revived = on_revived
        self._hub, self._updater, self._recovery = hub, updater, recovery
        self._reliability, self._events, self._tasks, self._clock = reliability, events, tasks, clock
        self._reviving: dict[Replica, asyncio.Task[None]] = {}

    def take(self, replica: Replica, error: BaseException) -> None:
        """A replica has failed."""
        if self._clock() - replica.last_failure_s > self._reliability.quiet_s:
            replica.failures = 0
        replica.failures += 1
        self.welcome(replica)

    def welcome(self, replica: Replica) -> None:
        """Bring into service a replica that is down, or new. Whoever is at it already goes on."""
        if replica in self._reviving and not self._reviving[replica].done():
            return
        task = spawn_task(self._tasks, self._revive(replica), f"revive/{replica.name}")
        if task is not None:
            self._reviving[replica] = task

    async def let_go(self, replica: Replica) -> None:
        """It has left: nobody brings it back any more."""
        self._recovery.replica_back(replica.name)
        task = self._reviving.pop(replica, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _revive(self, replica: Replica) -> None:
        while replica.health is not ReplicaHealth.UP:
            await asyncio.sleep(self._pause_s(replica))
            if replica.failures:
                self._events.emit(BackendRestart(who=replica.name, attempt=replica.failures))
            try:
                async with asyncio.timeout(self._reliability.transfer_timeout_s):
                    await replica.engine.restart()
                    replica.stands_still = False
                await self._seed(replica)
                await replica.settle()
            except (BackendError, TimeoutError) as error:
                replica.failures += 1
                replica.last_failure_s = self._clock()
                message = str(error) or f"not back after {self._reliability.transfer_timeout_s} s"
                self._events.emit(ErrorReport(who=replica.name, error=type(error).__name__, message=message))
            else:
                self._recovery.replica_back(replica.name)
                self._hub.revive(replica)
                self._on_revived()

    async def _seed(self, replica: Replica) -> None:
        """The newest weights, also if a newer version comes while they are on their way."""
        while replica.version < self._updater.newest or replica.version < 0:
            await self._updater.seed(replica)

    def _pause_s(self, replica: Replica) -> float:
        """Nothing at first, then longer and longer; a replica given up is only probed."""
        if replica.failures > self._reliability.replica_restarts:
            if replica.health is ReplicaHealth.DOWN:
                replica.health = ReplicaHealth.LOST
                self._recovery.replica_lost(replica.name)
            return self._reliability.probe_s
        return self._reliability.restart_backoff_s * float(2 ** max(replica.failures - 1, 0) - 1)
