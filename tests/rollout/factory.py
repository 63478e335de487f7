"""A hub over simulated replicas with everything around it that a rollout loop needs."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.config.simulation_config import FaultConfig
from headway.environments.base import EnvironmentFactory
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.rewards.base import EpisodeReturn, Reward
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.rollout_loop import RolloutLoop, RunningGroup
from headway.settings import RunSettings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.types import DropReason, Episode, Task
from tests.flow.factory import Scripted, make_engine_cost, make_settings
from tests.sim.factory import serve


class Notebook:
    """A book of samples: what was written, in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.dropped: dict[str, tuple[DropReason, float]] = {}

    def start_sample(self, sample_id: str, group_id: int) -> None:
        assert sample_id not in self.started
        self.started.append(sample_id)

    def finish_sample(self, episode: Episode) -> None:
        assert episode.sample_id not in self.dropped
        self.finished.append(episode.sample_id)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        assert sample_id not in self.dropped
        self.dropped[sample_id] = (reason, asyncio.get_running_loop().time())

    def leave_sample(self, sample_id: str, length: int) -> None:
        assert length >= 0


class Rollout:
    """A rollout loop at work. An action takes a tenth of a second."""

    def __init__(
        self,
        *faults: FaultConfig,
        tasks: asyncio.TaskGroup,
        engines: int = 1,
        slots: int = 16,
        environments: EnvironmentFactory | None = None,
        reward: Reward | None = None,
        **settings: Any,
    ) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.injector = FaultInjector(faults, engines=engines)
        cost = make_engine_cost(step_s=0.1, slots=slots)
        names = [f"engine/{number}" for number in range(engines)]
        self.engines = [SimulatedEngine(name, cost, health=self.injector.health(name)) for name in names]
        self.settings: RunSettings = make_settings(**settings)
        self.events: list[LoggedEvent] = []
        self.book = Notebook()
        self.groups: list[tuple[RunningGroup, float]] = []
        """Groups handed on, and when."""
        self.given_up: list[tuple[RunningGroup, DropReason]] = []
        self.full = asyncio.Event()
        log = EventLog(self.event_loop.time, self.events.append)
        reliability = self.settings.reliability
        self.hub = InferenceHub(self.engines, events=log, reliability=reliability, clock=self.event_loop.time)
        self.loop = RolloutLoop(
            hub=self.hub,
            environments=environments or Scripted(),
            reward=reward or EpisodeReturn(),
            settings=self.settings,
            events=log,
            recorder=self.book,
            tasks=tasks,
            on_group=self._on_group,
            on_failed=lambda run, reason: self.given_up.append((run, reason)),
        )

    async def begin(self) -> Rollout:
        for replica in self.hub.replicas:
            await serve(replica.engine, 0)
            self.hub.version_changed(replica)
        self.injector.start()
        return self

    def start(self, group_id: int = 0) -> RunningGroup:
        return self.loop.start(group_id, Task(position=group_id))

    def times(self, kind: str, **data: Any) -> list[float]:
        """When events of a kind happened."""
        return [
            round(event.time_s, 3)
            for event in self.events
            if event.kind == kind and all(event.data.get(key) == value for key, value in data.items())
        ]

    def _on_group(self, run: RunningGroup) -> None:
        self.groups.append((run, self.event_loop.time()))
        self.full.set()
