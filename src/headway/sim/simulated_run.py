"""Engines that join and leave a simulated run at given times, through the same door as those of a real one.

A leave that is refused (the last engine in service stays) is an error in the log, and the run goes on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.config import StageConfig
from headway.config.simulation_config import EngineChangeConfig, SimulationConfig
from headway.config.simulation_config import SimulatedScorerConfig as ScorerCost
from headway.errors import ConfigError
from headway.flow.backends import Backends, EngineReserve, RunContext
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.monitor.event_log import EventLog, EventSink
from headway.monitor.events import ErrorReport
from headway.settings import RunSettings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_environment import SimulatedEnvironments, SimulatedReward, SimulatedTasks
from headway.sim.simulated_trainer import SimulatedScorer, SimulatedTrainer
from headway.sim.simulated_weights import SimulatedTransport
from headway.sim.virtual_clock import run_on_virtual_clock as run_virtually

_ENGINE = re.compile(r"engine/(\d+)")


class EngineChangeSchedule:
    """Applies changes on the running loop while it is entered. `most`: engines that the run may come to have."""

    def __init__(self, changes: Iterable[EngineChangeConfig], flow: AsyncTrainingFlow, *, most: int) -> None:
        self._changes, self._flow = tuple(changes), flow
        self._timers: list[asyncio.TimerHandle] = []
        for index, change in enumerate(self._changes):
            _check(change, most, f"simulation.changes[{index}].engine")

    async def __aenter__(self) -> EngineChangeSchedule:
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(change.at_s, self._apply, change) for change in self._changes]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def _apply(self, change: EngineChangeConfig) -> None:
        fleet = self._flow.fleet
        assert fleet is not None
        try:
            if change.engine is not None:
                fleet.remove(change.engine)
            else:
                fleet.scale(len(fleet.names) + (1 if change.kind == "join" else -1))
        except ConfigError as error:
            self._flow.events.emit(ErrorReport(who="fleet", error="ConfigError", message=str(error)))


def _check(change: EngineChangeConfig, most: int, key: str) -> None:
    if change.engine is None:
        return
    if change.kind == "join":
        raise ConfigError("a newcomer gets the next free name", key=key, value=change.engine, hint="leave it out")
    found = _ENGINE.fullmatch(change.engine)
    if found is None or int(found[1]) >= most:
        raise ConfigError(f"there are at most {most} engines", key=key, value=change.engine, hint="engine/0")


_MOST = 100_000
"""Engines of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulated run depends on."""

    settings: RunSettings
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    train_devices: tuple[int, ...] = (0,)
    infer_devices: tuple[int, ...] = (1,)
    """Equal to `train_devices`: trainer and engines take turns."""
    lend: bool = False
    """Engines on the trainer's devices work while it waits."""
    seed: int = 0
    tasks: int | None = None
    """Size of the source; without end by default."""
    stages: tuple[StageConfig, ...] = ()
    """Stages of the user's own."""

    @property
    def engines(self) -> int:
        """Replicas that the devices make."""
        return len(self.infer_devices) // self.simulation.engine.gpus

    @property
    def lent(self) -> int:
        """Replicas that the trainer's devices make."""
        return len(self.train_devices) // self.simulation.engine.gpus if self.lend else 0

    @property
    def joins(self) -> int:
        """Replicas that join on the way."""
        return sum(change.kind == "join" for change in self.simulation.changes)


def make_simulated_backends(scenario: Scenario, injector: FaultInjector) -> Backends:
    """The simulated back ends of a scenario."""
    costs, seed, gpus = scenario.simulation, scenario.seed, len(scenario.train_devices)
    if scenario.engines < 1:
        raise ConfigError(
            f"{len(scenario.infer_devices)} devices do not make one replica of {costs.engine.gpus}",
            key="simulation.engine.gpus",
            value=costs.engine.gpus,
        )
    if scenario.lend and not scenario.lent:
        problem = f"the trainer's {gpus} devices do not make one replica of {costs.engine.gpus}"
        raise ConfigError(problem, key="lend_idle_trainer", value=True)
    devices = {"train": scenario.train_devices, "generate": scenario.infer_devices}

    def scorer(name: str, cost: ScorerCost) -> SimulatedScorer | None:
        if not cost.gpu_s_per_token and not cost.fixed_s:
            return None
        if cost.with_trainer:
            devices[name] = scenario.train_devices
        return SimulatedScorer(name, cost, gpus=gpus, health=injector.health(name))

    def engine(name: str) -> SimulatedEngine:
        return SimulatedEngine(name, costs.engine, costs.weights, health=injector.health(name))

    return Backends(
        trainer=SimulatedTrainer(costs.trainer, costs.weights, gpus=gpus, health=injector.health("trainer")),
        engines=[engine(f"engine/{n}") for n in range(scenario.engines)],
        reserve=EngineReserve(make=engine, most=_MOST, why="that is more than anybody has simulated"),
        lent=[engine(f"engine/lent-{n}") for n in range(scenario.lent)],
        transport=SimulatedTransport(costs.weights, health=injector.health("weights")),
        tasks=SimulatedTasks(costs, seed=seed, size=scenario.tasks),
        environments=SimulatedEnvironments(costs, seed=seed, health=injector.health("environment")),
        reward=SimulatedReward(costs.reward, seed=seed, health=injector.health("reward")),
        logp=scorer("logp", costs.logp),
        ref_logp=scorer("ref_logp", costs.ref_logp),
        critic=scorer("critic", costs.critic),
        validation_tasks=SimulatedTasks(costs, seed=seed + 1),
        devices=devices,
    )


async def play_scenario(
    scenario: Scenario,
    *,
    run_dir: Path,
    sinks: Sequence[EventSink] = (),
    on_flow: Callable[[AsyncTrainingFlow], None] | None = None,
) -> RunSummary:
    """Run the flow of a scenario on the running loop, with its faults."""
    clock = asyncio.get_running_loop().time
    injector = FaultInjector(
        scenario.simulation.faults,
        engines=scenario.engines + scenario.joins,
        engine_gpus=scenario.simulation.engine.gpus,
        gpus_per_node=scenario.simulation.gpus_per_node,
        first_gpu=scenario.infer_devices[0],
    )
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=make_simulated_backends(scenario, injector),
            settings=scenario.settings,
            events=EventLog(clock, *sinks),
            run_dir=run_dir,
            clock=clock,
            stages=scenario.stages,
        )
    )
    if on_flow is not None:
        on_flow(flow)
    async with (
        injector,
        EngineChangeSchedule(scenario.simulation.changes, flow, most=scenario.engines + scenario.joins),
    ):
        return await flow.run()


def run_scenario(scenario: Scenario, *, sinks: Sequence[EventSink] = (), run_dir: Path | None = None) -> RunSummary:
    """The whole run on the virtual clock. Without `run_dir` it leaves nothing behind."""
    if run_dir is not None:
        return run_virtually(play_scenario(scenario, run_dir=run_dir, sinks=sinks))
    with TemporaryDirectory(prefix="headway-sim-") as scratch:
        return run_virtually(play_scenario(scenario, run_dir=Path(scratch), sinks=sinks))
