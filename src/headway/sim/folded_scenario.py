"""Folds a scenario: a fraction of the batch on the same fraction of the engines, which takes about as long.

Every engine has the same load as before, and a training step takes as long as before. Only the tail is slightly too
short, because the longest of fewer answers is shorter. Where the engines do not divide, the nearest number is taken and
each engine is made faster or slower by the rest, so that all of them together are as fast as they should be.
"""

from dataclasses import replace
from math import ceil

from headway.config.simulation_config import SimulatedEngineConfig, SimulatedScorerConfig, SimulationConfig
from headway.sim.simulated_run import Scenario

_LEAST_SAMPLES = 512
"""A batch is not folded below this."""
_LEAST_ENGINES = 2
_MOST_DISTORTION = 0.07
"""Largest change of an engine's speed that folding may need."""


def choose_fold(scenario: Scenario) -> int:
    """Return the largest divisor of the batch by which a scenario can be folded."""
    groups, size, engines = scenario.settings.groups_per_step, scenario.settings.group_size, scenario.engines
    fits = [n for n in range(1, groups + 1) if groups % n == 0 and groups // n * size >= _LEAST_SAMPLES]
    kept = [n for n in fits if round(engines / n) >= _LEAST_ENGINES]
    return max((n for n in kept if abs(round(engines / n) * n / engines - 1) <= _MOST_DISTORTION), default=1)


def fold_scenario(scenario: Scenario, fold: int) -> Scenario:
    """Return the scenario with 1/fold of the batch and the engines, whose training takes as long as before."""
    if fold == 1:
        return scenario
    settings, unit = scenario.settings, scenario.simulation.engine.gpus
    colocated = scenario.infer_devices == scenario.train_devices
    engines = round(scenario.engines / fold)
    first = scenario.infer_devices[0]
    devices = tuple(range(first, first + engines * unit))
    work = len(devices) / len(scenario.train_devices) if colocated else 1.0
    costs = _fold_costs(scenario.simulation, fold * work, fold)
    return replace(
        scenario,
        settings=replace(
            settings,
            groups_per_step=settings.groups_per_step // fold,
            additional_groups=ceil(settings.additional_groups / fold),
            staleness_window=ceil(settings.staleness_window / fold),
        ),
        simulation=replace(costs, engine=scale_decoding(costs.engine, engines * fold / scenario.engines)),
        train_devices=devices if colocated else scenario.train_devices,
        infer_devices=devices,
    )


def scale_decoding(engine: SimulatedEngineConfig, factor: float) -> SimulatedEngineConfig:
    """Return an engine that takes `factor` times as long for everything that it generates."""
    return replace(
        engine,
        step_s=engine.step_s * factor,
        step_per_request_s=engine.step_per_request_s * factor,
        step_per_context_token_s=engine.step_per_context_token_s * factor,
        prefill_tokens_per_s=engine.prefill_tokens_per_s / factor,
    )


def _fold_costs(costs: SimulationConfig, work: float, groups: float) -> SimulationConfig:
    def scorer(cost: SimulatedScorerConfig) -> SimulatedScorerConfig:
        return replace(cost, gpu_s_per_token=cost.gpu_s_per_token * work, fixed_s=cost.fixed_s * groups)

    per_token, per_sample = costs.trainer.gpu_s_per_token * work, costs.trainer.gpu_s_per_sample * work
    shared = costs.colocated.logp
    return replace(
        costs,
        trainer=replace(costs.trainer, gpu_s_per_token=per_token, gpu_s_per_sample=per_sample),
        logp=scorer(costs.logp),
        ref_logp=scorer(costs.ref_logp),
        critic=scorer(costs.critic),
        colocated=replace(costs.colocated, logp=None if shared is None else scorer(shared)),
    )
