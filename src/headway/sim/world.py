"""A simulated world around the real flow: the same scheduler, on the virtual clock, with back ends that only cost time.

`run` is a function of the scenario alone: the same scenario and seed give the same event log, byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.config.simulation import SimulatedScorer as ScorerCost
from headway.config.simulation import SimulationConfig
from headway.errors import ConfigError
from headway.flow.backends import Backends, Reserve
from headway.flow.flow import AsyncTrainingFlow, RunSummary
from headway.monitor.events import EventLog, Sink
from headway.settings import RunSettings
from headway.sim.changes import Changes
from headway.sim.clock import run as run_virtually
from headway.sim.engine import SimulatedEngine
from headway.sim.environment import SimulatedEnvironments
from headway.sim.faults import FaultInjector
from headway.sim.reward import SimulatedReward
from headway.sim.tasks import SimulatedTasks
from headway.sim.trainer import SimulatedScorer, SimulatedTrainer
from headway.sim.weights import SimulatedTransport

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
    insert: Mapping[str, str] = field(default_factory=dict)

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


def make_backends(scenario: Scenario, injector: FaultInjector) -> Backends:
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
        reserve=Reserve(make=engine, most=_MOST, why="that is more than anybody has simulated"),
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


async def play(
    scenario: Scenario,
    *,
    run_dir: Path,
    sinks: Sequence[Sink] = (),
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
        backends=make_backends(scenario, injector),
        settings=scenario.settings,
        events=EventLog(clock, *sinks),
        run_dir=run_dir,
        clock=clock,
        insert=scenario.insert,
    )
    if on_flow is not None:
        on_flow(flow)
    async with injector, Changes(scenario.simulation.changes, flow, most=scenario.engines + scenario.joins):
        return await flow.run()


def run(scenario: Scenario, *, sinks: Sequence[Sink] = (), run_dir: Path | None = None) -> RunSummary:
    """The whole run on the virtual clock. Without `run_dir` it leaves nothing behind."""
    if run_dir is not None:
        return run_virtually(play(scenario, run_dir=run_dir, sinks=sinks))
    with TemporaryDirectory(prefix="headway-sim-") as scratch:
        return run_virtually(play(scenario, run_dir=Path(scratch), sinks=sinks))
