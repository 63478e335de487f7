"""Small worlds for tests of the scheduler: everything has a fixed cost, so that times can be told in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.cluster.base import DevicePools
from headway.config import ReliabilityConfig
from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedEngineConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.environments.base import Observation
from headway.flow.pipeline import Pipeline
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.ledger import Ledger
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.monitor.wait_graph import WaitGraph
from headway.registry import STAGES
from headway.rollout.inference_hub import InferenceHub
from headway.settings import RunSettings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_run import Scenario, make_simulated_backends, play_scenario
from headway.sim.virtual_clock import run_on_virtual_clock as run_virtually
from headway.types import (
    Episode,
    FinishReason,
    Generation,
    RepeatedValue,
    Sample,
    SampleGroup,
    Task,
    Turn,
    VersionRun,
)

RELIABILITY = ReliabilityConfig(
    request_timeout_s=60.0,
    abort_timeout_s=3.0,
    episode_timeout_s=200.0,
    environment_timeout_s=8.0,
    reward_timeout_s=8.0,
    train_timeout_s=30.0,
    transfer_timeout_s=6.0,
    lock_timeout_s=500.0,
    stall_timeout_s=100.0,
    restart_backoff_s=0.5,
    probe_s=10.0,
    quiet_s=40.0,
)


def make_costs(**changes: Any) -> SimulationConfig:
    """An answer takes a second (100 actions), a training step takes one, weights travel at once."""
    base = SimulationConfig(
        response_tokens=DistributionConfig(mean=100),
        prompt_tokens=DistributionConfig(mean=0),
        engine=make_engine_cost(),
        trainer=SimulatedTrainerConfig(fixed_s=1.0, save_s=0.1, restart_s=2.0),
        weights=SimulatedWeightsConfig(buckets=2),
        gpus_per_node=1,
    )
    return replace(base, **changes)


def make_engine_cost(**changes: Any) -> SimulatedEngineConfig:
    base = SimulatedEngineConfig(slots=8, step_s=0.01, step_per_request_s=0.0, prefill_tokens_per_s=1e9, restart_s=2.0)
    return replace(base, **changes)


def make_settings(**changes: Any) -> RunSettings:
    base: dict[str, Any] = {
        "groups_per_step": 2,
        "group_size": 1,
        "max_steps": 3,
        "filter_zero_variance": False,
        "max_num_gen_batches": 0,
        "save_steps": 0,
        "save_total_limit": 0,
        "eval_steps": 0,
        "eval_at_start": False,
        "seed": 0,
        "reliability": RELIABILITY,
    }
    settings = {**base, **changes}
    settings.setdefault("staleness_window", 2 * settings["groups_per_step"])
    return RunSettings(**settings)


def make_scenario(
    *faults: FaultConfig, engines: int = 1, costs: SimulationConfig | None = None, world: Any = None, **settings: Any
) -> Scenario:
    """`settings` are those of the run, `world` what else the scenario has."""
    return Scenario(
        settings=make_settings(**settings),
        simulation=replace(costs or make_costs(), faults=faults),
        infer_devices=tuple(range(1, 1 + engines)),
        **(world or {}),
    )


@dataclass
class Played:
    """A run that has ended."""

    summary: RunSummary
    events: list[LoggedEvent]
    flow: AsyncTrainingFlow

    def of(self, kind: str, **data: Any) -> list[LoggedEvent]:
        """Events of a kind that carry `data` (`who` among it)."""
        return [event for event in self.events if event.kind == kind and matches(event, data)]

    def first(self, kind: str, **data: Any) -> LoggedEvent:
        found = self.of(kind, **data)
        assert found, f"no {kind} with {data}"
        return found[0]


def matches(event: LoggedEvent, data: Mapping[str, Any]) -> bool:
    known = {"who": event.who, **event.data}
    return all(known.get(key) == value for key, value in data.items())


def play_through(
    scenario: Scenario,
    run_dir: Path,
    *,
    prepare: Callable[[AsyncTrainingFlow], None] | None = None,
    on_event: Callable[[LoggedEvent], None] | None = None,
    max_time_s: float = 50_000.0,
) -> Played:
    """The whole run on the virtual clock. `prepare` sees the flow before it starts."""
    events: list[LoggedEvent] = []
    flows: list[AsyncTrainingFlow] = []

    def on_flow(flow: AsyncTrainingFlow) -> None:
        flows.append(flow)
        if prepare is not None:
            prepare(flow)

    sinks = [events.append] if on_event is None else [events.append, on_event]
    summary = run_virtually(
        play_scenario(scenario, run_dir=run_dir, sinks=sinks, on_flow=on_flow), max_time_s=max_time_s
    )
    return Played(summary=summary, events=events, flow=flows[0])


class Scripted:
    """Environments whose answers are as long as a script says, by position and then by number of the episode.

    An exception in the script is raised by the step, `None` never returns from it. What the script does not say
    takes `otherwise` actions. A tuple is an episode of several turns.
    """

    def __init__(self, script: Mapping[int, Sequence[Any]] | None = None, *, otherwise: Any = 100) -> None:
        self._script = dict(script or {})
        self._otherwise = otherwise
        self._episodes: dict[int, int] = {}
        self.closed = 0
        """Environments closed so far."""

    def __call__(self, task: Task) -> ScriptedEnvironment:
        number = self._episodes.get(task.position, 0)
        self._episodes[task.position] = number + 1
        lines = self._script.get(task.position, ())
        pipeline = lines[number] if number < len(lines) else self._otherwise
        return ScriptedEnvironment(self, pipeline if isinstance(pipeline, tuple) else (pipeline,))

    def use(self, flow: AsyncTrainingFlow) -> None:
        """Let a flow that has not started play in these."""
        flow.backends = replace(flow.backends, environments=self)


class ScriptedEnvironment:
    def __init__(self, shared: Scripted, turns: tuple[Any, ...]) -> None:
        self._shared = shared
        self._turns = list(turns)

    async def reset(self, task: Task) -> Observation:
        return Observation(hint=self._length())

    async def step(self, generation: Generation) -> Observation:
        ended = self._turns.pop(0)
        if ended is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(ended, Exception):
            raise ended
        if not self._turns:
            return Observation(done=True, reward=1.0)
        return Observation(hint=self._length())

    async def close(self) -> None:
        self._shared.closed += 1

    def _length(self) -> int:
        return self._turns[0] if isinstance(self._turns[0], int) else 1


def make_sample_group(number: int, *versions: int, actions: int = 1) -> SampleGroup:
    """A group with one member, made by `versions` in turn, `actions` each."""
    runs = tuple(VersionRun(version=version, count=actions) for version in versions)
    count = actions * len(versions)
    made = Generation(
        actions=RepeatedValue(0, count), logps=RepeatedValue(-1.0, count), runs=runs, finish=FinishReason.STOP
    )
    name, task = f"{number}.0", Task(position=number)
    episode = Episode(sample_id=name, task=task, turns=(Turn(observation=(), generation=made),))
    sample = Sample(sample_id=name, episode=episode, oldest=min(versions), newest=max(versions), actions=count)
    return SampleGroup(group_id=number, task=task, samples=(sample,))


@contextmanager
def own_stages() -> Iterator[None]:
    """What is registered inside is forgotten outside."""
    with STAGES.isolate():
        yield


def make_line(
    scenario: Scenario, run_dir: Path, *, tasks: asyncio.TaskGroup, injector: FaultInjector | None = None
) -> tuple[Pipeline, list[LoggedEvent]]:
    """A line without stages, and everything that happens on it."""
    clock, events = asyncio.get_running_loop().time, list[LoggedEvent]()
    log, waits = EventLog(clock, events.append), WaitGraph(clock)
    injector = injector or FaultInjector(scenario.simulation.faults, engines=scenario.engines)
    backends = make_simulated_backends(scenario, injector)
    reliability = scenario.settings.reliability
    ledger = Ledger(run_dir / "ledger.sqlite")
    pipeline = Pipeline(
        settings=scenario.settings,
        backends=backends,
        events=log,
        waits=waits,
        ledger=ledger,
        restored=ledger.restore(0),
        hub=InferenceHub(backends.engines, events=log, reliability=reliability, clock=clock),
        devices=DevicePools(backends.devices, waits=waits, clock=clock),
        tasks=tasks,
        run_dir=run_dir,
        checkpoint_dir=run_dir / "checkpoints",
        clock=clock,
    )
    return pipeline, events


def audit(run_dir: Path) -> dict[str, int]:
    """How samples ended, by the ledger, in which nothing is wrong."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        assert ledger.audit() == []
        return dict(ledger.counts())
    finally:
        ledger.close()
