"""Finds the costs of a simulation from the measured phases of a synchronous run, so that other runs can be predicted.

    phases = parse_phases("gen=247,logp=88,update=286,sync=1,switch=74,gpus=16")
    overrides = calibrate_costs(make_scenario(resolved), phases)

Every phase sets costs of its own. The seconds of generation scale all decoding costs by one factor: the shape of a
decode step (what it costs alone, for each request, for each token of context) stays as the configuration has it, and
decides how engines behave with more or fewer requests than the measured run had. Update and log-probabilities become
GPU-seconds for each token. Batch, lengths and everything else come from the scenario.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headway.config.simulation_config import (
    ColocatedCostsConfig,
    SimulatedScorerConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
)
from headway.errors import ConfigError
from headway.monitor.run_report import RunMonitor
from headway.sim.distributions import read_length_rows
from headway.sim.folded_scenario import scale_decoding
from headway.sim.simulated_run import Scenario, run_scenario

_KEY = "--calibrate"
_MANY_SAMPLES = 4096
_ROUNDS = 4
_CLOSE_ENOUGH = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhases:
    """Seconds per step of a synchronous run whose trainer and engines shared all devices. `None`: not measured."""

    gen: float | None = None
    """Generating the whole batch."""
    logp: float | None = None
    """Log-probabilities that every run computes."""
    colocated_logp: float | None = None
    """Log-probabilities that only the run on shared devices computes."""
    update: float | None = None
    """The training step."""
    sync: float | None = None
    """Bringing the new weights to the engines."""
    switch: float | None = None
    """Handing the devices from generation to training and back."""
    gpus: float | None = None
    """Devices of that run. `None`: all devices of the configuration."""


def parse_phases(text: str) -> MeasuredPhases:
    """Read `name=seconds` pairs with commas in between. Raises `ConfigError`."""
    names, found = [field.name for field in fields(MeasuredPhases)], {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals:
            raise ConfigError(f"{part!r} is not one of {', '.join(names)} with =seconds", key=_KEY, value=text)
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (name == "gpus" and (value < 1 or value != int(value))):
            raise ConfigError(f"{name} = {number!r} is not a number that can be meant", key=_KEY, value=text)
        found[name] = value
    return MeasuredPhases(**found)


def calibrate_costs(scenario: Scenario, phases: MeasuredPhases) -> dict[str, float]:
    """Return the keys of the configuration with which the synchronous run has these phases."""
    shared = _make_synchronous(scenario, phases)
    made: dict[str, float] = {}
    tokens = 0.0
    if phases.gen is not None:
        shared, tokens = _fit_generation(shared, phases.gen)
        engine = shared.simulation.engine
        for name in ("step_s", "step_per_request_s", "step_per_context_token_s", "prefill_tokens_per_s"):
            made[f"simulation.engine.{name}"] = getattr(engine, name)
    elif any(value is not None for value in (phases.logp, phases.colocated_logp, phases.update)):
        tokens = _measure_generation(shared)[1]
    made |= _fit_gpu_work(scenario, phases, len(shared.train_devices) / max(tokens, 1.0))
    if phases.sync is not None:
        names = ("gather_s", "load_s", "flip_s")
        made |= {"simulation.weights.send_s": phases.sync, **{f"simulation.weights.{name}": 0.0 for name in names}}
    if phases.switch is not None:
        made["simulation.colocated.switch_s"] = phases.switch
    return {key: float(f"{value:.6g}") for key, value in made.items()}


def _fit_gpu_work(scenario: Scenario, phases: MeasuredPhases, gpus_per_token: float) -> dict[str, float]:
    """Return the costs of training and log-probabilities; a step has 1/`gpus_per_token` tokens for each device."""
    costs, made = scenario.simulation, {}
    if phases.update is not None:
        fixed, factor = costs.trainer.fixed_s, costs.colocated.trainer_factor
        if phases.update < fixed * factor:
            problem = f"update = {phases.update:g} is less than what simulation.trainer.fixed_s alone costs"
            raise ConfigError(problem, key=_KEY, value=f"{fixed * factor:g}")
        made["simulation.trainer.gpu_s_per_token"] = (phases.update / factor - fixed) * gpus_per_token
        made["simulation.trainer.gpu_s_per_sample"] = 0.0
    for key, seconds in (("logp", phases.logp), ("colocated.logp", phases.colocated_logp)):
        if seconds is not None:
            made[f"simulation.{key}.gpu_s_per_token"] = seconds * gpus_per_token
            made[f"simulation.{key}.fixed_s"] = 0.0
    return made


def _make_synchronous(scenario: Scenario, phases: MeasuredPhases) -> Scenario:
    """Return the synchronous run on shared devices, where only generation costs anything."""
    settings = scenario.settings
    samples = settings.groups_per_step * settings.group_size
    gpus = int(phases.gpus or len({*scenario.train_devices, *scenario.infer_devices}))
    free = SimulatedScorerConfig()
    settings = replace(
        settings, async_generation_ratio=0.0, pipeline_depth=None, updates_per_sync=1, save_steps=0, eval_steps=0
    )
    return replace(
        scenario,
        settings=replace(settings, hybrid_engine=True, max_steps=1 if samples >= _MANY_SAMPLES else 4),
        simulation=replace(
            scenario.simulation,
            trainer=SimulatedTrainerConfig(save_s=0.0),
            weights=SimulatedWeightsConfig(buckets=1),
            colocated=ColocatedCostsConfig(),
            logp=free,
            ref_logp=free,
            critic=free,
            faults=(),
            changes=(),
        ),
        train_devices=tuple(range(gpus)),
        infer_devices=tuple(range(gpus)),
        lend=False,
    )


def _fit_generation(shared: Scenario, wanted_s: float) -> tuple[Scenario, float]:
    """Return the scenario whose generation takes `wanted_s` a step, and the tokens of a step."""
    for _ in range(_ROUNDS):
        measured_s, tokens = _measure_generation(shared)
        if abs(measured_s - wanted_s) <= _CLOSE_ENOUGH * wanted_s:
            break
        engine = scale_decoding(shared.simulation.engine, max(wanted_s, 1e-9) / measured_s)
        shared = replace(shared, simulation=replace(shared.simulation, engine=engine))
        if not _has_latencies(shared):
            break  # everything was scaled
    else:
        measured_s, tokens = _measure_generation(shared)
        if abs(measured_s - wanted_s) > 0.02 * wanted_s:
            problem = f"gen = {wanted_s:g} cannot be met: environments and rewards alone leave {measured_s:.4g} s"
            raise ConfigError(problem, key=_KEY, value=wanted_s)
    return shared, tokens


def _has_latencies(scenario: Scenario) -> bool:
    """Return whether environments or rewards take time, which no engine makes shorter."""
    environment, reward = scenario.simulation.environment, scenario.simulation.reward
    waits = (environment.reset_s, environment.step_s, reward.latency_s)
    return any(one.mean or one.std or one.min or one.file for one in waits)


def _measure_generation(shared: Scenario) -> tuple[float, float]:
    """Return the seconds and the trained tokens of a step."""
    monitor = RunMonitor(0)
    summary = run_scenario(shared, sinks=[monitor])
    if not summary.finished:
        raise ConfigError(f"the synchronous run does not end: {summary.reason}", key=_KEY, value="gen")
    speed = monitor.report().throughput
    return speed.step_mean_s, speed.actions / len(speed.steps)


def describe_lengths(file: str) -> Mapping[str, str | float]:
    """Return the keys that make a file of lengths the lengths of the simulation.

    Where a line has several numbers, they are the answers to one prompt, and their correlation is measured.
    """
    rows = read_length_rows(file, "--lengths")
    keys: dict[str, str | float] = {
        "simulation.response_tokens.kind": "empirical",
        "simulation.response_tokens.file": str(Path(file).absolute()),
    }
    several = [row for row in rows if len(row) > 1]
    if len(several) > 1:
        keys["simulation.response_correlation"] = round(_measure_correlation(several), 4)
    return keys


def _measure_correlation(rows: list[tuple[float, ...]]) -> float:
    """Return the correlation of the logarithms within a row: the share of their variance that lies between rows."""
    logs = [[math.log(max(value, 1.0)) for value in row] for row in rows]
    count, total = len(logs), sum(map(len, logs))
    centre = sum(map(sum, logs)) / total
    means = [sum(row) / len(row) for row in logs]
    between = sum(len(row) * (mean - centre) ** 2 for row, mean in zip(logs, means, strict=True)) / (count - 1)
    within = sum((value - mean) ** 2 for row, mean in zip(logs, means, strict=True) for value in row) / (total - count)
    size = (total - sum(len(row) ** 2 for row in logs) / total) / (count - 1)
    spread = between + (size - 1) * within
    return min(max((between - within) / spread, 0.0), 1.0) if spread > 0 else 0.0
