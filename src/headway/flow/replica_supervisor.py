"""Brings failed replicas back: restart, seed with the newest weights, return to service.

A replica that fails too often in a row counts as lost. It is still probed now and then, and comes back by itself once
the cause is gone.
"""

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
    """Runs one revival task for each replica that is out of service."""

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
        """Count a failure of a replica and start to revive it."""
        if self._clock() - replica.last_failure_s > self._reliability.quiet_s:
            replica.failures = 0
        replica.failures += 1
        self.bring_into_service(replica)

    def bring_into_service(self, replica: Replica) -> None:
        """Start the revival task of a replica that is down or new. No-op if one is already running."""
        if replica in self._reviving and not self._reviving[replica].done():
            return
        task = spawn_task(self._tasks, self._revive(replica), f"revive/{replica.name}")
        if task is not None:
            self._reviving[replica] = task

    async def stop_reviving(self, replica: Replica) -> None:
        """End the revival task of a replica that has left the run."""
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
                    replica.is_paused = False
                while replica.version < self._updater.newest or replica.version < 0:
                    await self._updater.seed(replica)  # again, if a newer version appears meanwhile
                await replica.apply_pause()
            except (BackendError, TimeoutError) as error:
                replica.failures += 1
                replica.last_failure_s = self._clock()
                message = str(error) or f"not back after {self._reliability.transfer_timeout_s} s"
                self._events.emit(ErrorReport(who=replica.name, error=type(error).__name__, message=message))
            else:
                self._recovery.replica_back(replica.name)
                self._hub.revive(replica)
                self._on_revived()

    def _pause_s(self, replica: Replica) -> float:
        """Return how long to wait before the next restart: longer after each failure. A lost replica is only probed."""
        if replica.failures > self._reliability.replica_restarts:
            if replica.health is ReplicaHealth.DOWN:
                replica.health = ReplicaHealth.LOST
                self._recovery.replica_lost(replica.name)
            return self._reliability.probe_s
        return self._reliability.restart_backoff_s * float(2 ** max(replica.failures - 1, 0) - 1)
