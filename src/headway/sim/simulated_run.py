"""Simulated runs: the real scheduler on a virtual clock, with back ends that only cost time.

`make_scenario` turns a configuration into a scenario, so the file that trains can be simulated. Settings and devices
are those of the real run, except that it ends after `simulation.steps` steps; costs are in the `simulation` block.
`run_scenario` depends on the scenario alone: the same scenario gives the same event log, byte for byte.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.config import ResolvedConfig, SimulationConfig, StageConfig
from headway.config.simulation_config import EngineChangeConfig, SimulatedScorerConfig
from headway.config.strategies import SERVER_STRATEGIES
from headway.errors import ConfigError
from headway.flow.backends import Backends, EngineReserve, RunContext
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.monitor.event_log import EventLog, EventSink
from headway.monitor.events import ErrorReport
from headway.settings import RunSettings, make_run_settings
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_environment import SimulatedEnvironments, SimulatedReward, SimulatedTasks
from headway.sim.simulated_trainer import SimulatedScorer, SimulatedTrainer
from headway.sim.simulated_weights import SimulatedTransport
from headway.sim.virtual_clock import VirtualEventLoop, run_on_virtual_clock

_ENGINE_NAME = re.compile(r"engine/(\d+)")
_MOST_ENGINES = 100_000
_ENGINE_GPUS_KEY = "simulation.engine.gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulated run depends on."""

    settings: RunSettings
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    train_devices: tuple[int, ...] = (0,)
    infer_devices: tuple[int, ...] = (1,)
    """Equal to `train_devices` if trainer and engines take turns."""
    lend: bool = False
    """Whether engines on the trainer's devices work while it waits."""
    seed: int = 0
    tasks: int | None = None
    """Number of tasks; None if they never end."""
    stages: tuple[StageConfig, ...] = ()
    """Stages that the user adds."""

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and engines take turns on the same devices."""
        return self.train_devices == self.infer_devices

    @property
    def costs(self) -> SimulationConfig:
        """Costs with those that only a run on shared devices pays, if this is one."""
        costs, shared = self.simulation, self.simulation.colocated
        if not self.shares_devices:
            return costs
        trainer, factor = costs.trainer, shared.trainer_factor
        trainer = replace(
            trainer,
            gpu_s_per_token=trainer.gpu_s_per_token * factor,
            gpu_s_per_sample=trainer.gpu_s_per_sample * factor,
            fixed_s=trainer.fixed_s * factor + shared.switch_s,
        )
        return replace(costs, trainer=trainer, logp=costs.logp if shared.logp is None else shared.logp)

    @property
    def engines(self) -> int:
        """Number of replicas on the inference devices."""
        return len(self.infer_devices) // self.simulation.engine.gpus

    @property
    def lent(self) -> int:
        """Number of replicas on the trainer's devices."""
        return len(self.train_devices) // self.simulation.engine.gpus if self.lend else 0

    @property
    def most_engines(self) -> int:
        """Number of replicas with those that join on the way."""
        return self.engines + sum(change.kind == "join" for change in self.simulation.changes)


def make_scenario(resolved: ResolvedConfig) -> Scenario:
    """Return the scenario that a configuration describes."""
    config, devices = resolved.config, resolved.derived.devices
    return Scenario(
        settings=replace(make_run_settings(resolved), max_steps=config.simulation.steps),
        simulation=_make_simulation(resolved),
        train_devices=devices["actor_train"],
        infer_devices=devices["actor_train"] if resolved.derived.hybrid_engine else devices["actor_infer"],
        lend=config.lend_idle_trainer,
        seed=config.seed,
        stages=config.stages,
    )


def _make_simulation(resolved: ResolvedConfig) -> SimulationConfig:
    """Return the costs, with replicas as large as the engine's parallel sizes unless the block says otherwise."""
    simulation, devices = resolved.config.simulation, resolved.derived.devices
    engine, train_devices = simulation.engine, devices["actor_train"]
    if resolved.provenance.get(_ENGINE_GPUS_KEY, "default") == "default":
        sizes = resolved.config.actor_infer.strategy_args.strategy_config
        engine = replace(engine, gpus=sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size)

    def adjust(cost: SimulatedScorerConfig, role: str) -> SimulatedScorerConfig:
        """Let a scorer on devices of its own run beside the trainer, as fast as its number of devices."""
        if set(devices[role]) & set(train_devices):
            return cost
        ratio = len(train_devices) / len(devices[role])
        return replace(cost, with_trainer=False, gpu_s_per_token=cost.gpu_s_per_token * ratio)

    weights = simulation.weights
    if weights.recompute_cache is None:
        weights = replace(weights, recompute_cache=resolved.derived.strategies["actor_infer"] in SERVER_STRATEGIES)
    return replace(
        simulation,
        engine=engine,
        weights=weights,
        logp=adjust(simulation.logp, "logp"),
        ref_logp=adjust(simulation.ref_logp, "reference"),
        critic=adjust(simulation.critic, "critic"),
    )


def make_simulated_backends(scenario: Scenario, injector: FaultInjector) -> Backends:
    """Return the simulated back ends of a scenario. Raises `ConfigError`."""
    costs, seed, gpus = scenario.costs, scenario.seed, len(scenario.train_devices)
    if scenario.engines < 1:
        problem = f"{len(scenario.infer_devices)} devices do not make one replica of {costs.engine.gpus}"
        raise ConfigError(problem, key=_ENGINE_GPUS_KEY, value=costs.engine.gpus)
    if scenario.lend and not scenario.lent:
        problem = f"the trainer's {gpus} devices do not make one replica of {costs.engine.gpus}"
        raise ConfigError(problem, key="lend_idle_trainer", value=True)
    devices = {"train": scenario.train_devices, "generate": scenario.infer_devices}

    def make_scorer(name: str, cost: SimulatedScorerConfig) -> SimulatedScorer | None:
        if not cost.gpu_s_per_token and not cost.fixed_s:
            return None
        if cost.with_trainer:
            devices[name] = scenario.train_devices
        return SimulatedScorer(name, cost, gpus=gpus, health=injector.health(name))

    def make_engine(name: str) -> SimulatedEngine:
        return SimulatedEngine(name, costs.engine, costs.weights, health=injector.health(name))

    return Backends(
        trainer=SimulatedTrainer(costs.trainer, costs.weights, gpus=gpus, health=injector.health("trainer")),
        engines=[make_engine(f"engine/{n}") for n in range(scenario.engines)],
        reserve=EngineReserve(make=make_engine, most=_MOST_ENGINES, why="that is more than anybody has simulated"),
        lent=[make_engine(f"engine/lent-{n}") for n in range(scenario.lent)],
        transport=SimulatedTransport(costs.weights, health=injector.health("weights")),
        tasks=SimulatedTasks(costs, seed=seed, size=scenario.tasks),
        environments=SimulatedEnvironments(costs, seed=seed, health=injector.health("environment")),
        reward=SimulatedReward(costs.reward, seed=seed, health=injector.health("reward")),
        logp=make_scorer("logp", costs.logp),
        ref_logp=make_scorer("ref_logp", costs.ref_logp),
        critic=make_scorer("critic", costs.critic),
        validation_tasks=SimulatedTasks(costs, seed=seed + 1),
        devices=devices,
    )


class EngineChangeSchedule:
    """Adds and removes engines at the configured times while it is entered, as `headway scale` does in a real run.

    A removal that is refused (the last engine in service stays) is an error in the log, and the run goes on.
    """

    def __init__(self, changes: Iterable[EngineChangeConfig], flow: AsyncTrainingFlow, *, most_engines: int) -> None:
        self._changes, self._flow = tuple(changes), flow
        self._timers: list[asyncio.TimerHandle] = []
        for index, change in enumerate(self._changes):
            _check_change(change, most_engines, f"simulation.changes[{index}].engine")

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


def _check_change(change: EngineChangeConfig, most_engines: int, key: str) -> None:
    if change.engine is None:
        return
    if change.kind == "join":
        raise ConfigError("a newcomer gets the next free name", key=key, value=change.engine, hint="leave it out")
    found = _ENGINE_NAME.fullmatch(change.engine)
    if found is None or int(found[1]) >= most_engines:
        raise ConfigError(f"there are at most {most_engines} engines", key=key, value=change.engine, hint="engine/0")


async def play_scenario(
    scenario: Scenario,
    *,
    run_dir: Path,
    sinks: Sequence[EventSink] = (),
    on_flow: Callable[[AsyncTrainingFlow], None] | None = None,
) -> RunSummary:
    """Run the flow of a scenario on the running loop, with its faults."""
    clock, simulation = asyncio.get_running_loop().time, scenario.simulation
    injector = FaultInjector(
        simulation.faults,
        engines=scenario.most_engines,
        engine_gpus=simulation.engine.gpus,
        gpus_per_node=simulation.gpus_per_node,
        first_gpu=scenario.infer_devices[0],
    )
    context = RunContext(
        backends=make_simulated_backends(scenario, injector),
        settings=scenario.settings,
        events=EventLog(clock, *sinks),
        run_dir=run_dir,
        clock=clock,
        stages=scenario.stages,
    )
    flow = AsyncTrainingFlow(trainer=context)
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualEventLoop):
        loop.describe = flow.waits.describe
    if on_flow is not None:
        on_flow(flow)
    async with injector, EngineChangeSchedule(simulation.changes, flow, most_engines=scenario.most_engines):
        return await flow.run()


def run_scenario(scenario: Scenario, *, sinks: Sequence[EventSink] = (), run_dir: Path | None = None) -> RunSummary:
    """Run a scenario to its end on the virtual clock. Without `run_dir` it leaves nothing behind."""
    with TemporaryDirectory(prefix="headway-sim-") as scratch:
        return run_on_virtual_clock(play_scenario(scenario, run_dir=run_dir or Path(scratch), sinks=sinks))
