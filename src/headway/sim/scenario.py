"""From a configuration to a scenario: the same file that trains can be simulated.

The scheduler's settings are those of the real run, except that it ends after `simulation.steps` steps. Whatever the
configuration says about devices holds; what they cost is in its `simulation` block.
"""

from __future__ import annotations

from dataclasses import replace

from headway.config import ResolvedConfig, SimulationConfig
from headway.config.simulation_config import SimulatedScorerConfig
from headway.settings import make_run_settings
from headway.sim.simulated_run import Scenario

_GPUS = "simulation.engine.gpus"


def make_scenario(resolved: ResolvedConfig) -> Scenario:
    """The scenario that a configuration describes."""
    config, devices = resolved.config, resolved.derived.devices
    return Scenario(
        settings=replace(make_run_settings(resolved), max_steps=config.simulation.steps),
        simulation=_simulation(resolved),
        train_devices=devices["actor_train"],
        infer_devices=devices["actor_train"] if resolved.derived.hybrid_engine else devices["actor_infer"],
        lend=config.lend_idle_trainer,
        seed=config.seed,
        stages=config.stages,
    )


def trainer_granularity(resolved: ResolvedConfig) -> int:
    """Devices that one copy of the trained model needs: the trainer grows in steps of these."""
    sizes = resolved.config.actor_train.strategy_args.strategy_config
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def _simulation(resolved: ResolvedConfig) -> SimulationConfig:
    """The costs, with replicas as large as the engine's parallel sizes unless the block says otherwise."""
    simulation, devices = resolved.config.simulation, resolved.derived.devices
    engine = simulation.engine
    if resolved.provenance.get(_GPUS, "default") == "default":
        sizes = resolved.config.actor_infer.strategy_args.strategy_config
        engine = replace(engine, gpus=sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size)
    trainers = devices["actor_train"]
    return replace(
        simulation,
        engine=engine,
        logp=_scorer(simulation.logp, devices["logp"], trainers),
        ref_logp=_scorer(simulation.ref_logp, devices["reference"], trainers),
        critic=_scorer(simulation.critic, devices["critic"], trainers),
    )


def _scorer(cost: SimulatedScorerConfig, devices: tuple[int, ...], trainers: tuple[int, ...]) -> SimulatedScorerConfig:
    """A scorer with devices of its own does not wait for the trainer, and is as fast as those are many."""
    if set(devices) & set(trainers):
        return cost
    ratio = len(trainers) / len(devices)
    return replace(cost, with_trainer=False, gpu_s_per_token=cost.gpu_s_per_token * ratio)
