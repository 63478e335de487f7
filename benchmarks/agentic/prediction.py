"""The same scenario in the simulator: the very scheduler of the runs, on a virtual clock.

It is told how long waits are by the same μ and σ as the environments, draws its own, and is told the costs of the
policy as one run had them: of a request to the engine, of a training step, of a weight update, and how many tokens
and turns there were. Who waits for whom it has to find out. It knows nothing of cores that parts have to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agentic.measured_runs import Costs, Row, Sizes, costs, requests, turns

from headway.config import ResolvedConfig
from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEngineConfig,
    SimulatedEnvironmentConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.monitor.event_log import LoggedEvent
from headway.settings import make_run_settings
from headway.sim.simulated_run import Scenario, run_scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one run says about the policy. Times in seconds."""

    engine_s: float
    """Of a token of a request, waiting for its turn and the reading of the prompt included."""
    train_s: float
    update_s: float
    tokens: tuple[int, ...]
    """Of every request."""
    turns: tuple[int, ...]
    """Of every episode."""


def calibrated(found: Costs, events: list[LoggedEvent]) -> Calibration:
    """The costs of a run."""
    asked = requests(events)
    return Calibration(
        engine_s=sum(end_s - begin_s for begin_s, end_s, _ in asked) / sum(tokens for _, _, tokens in asked),
        train_s=found.train_s,
        update_s=found.update_s,
        tokens=tuple(tokens for _, _, tokens in asked),
        turns=tuple(turns(events)),
    )


def predicted(sizes: Sizes, row: Row, resolved: ResolvedConfig, known: Calibration, seeds: Sequence[int]) -> Costs:
    """What the simulator says of a row, on average over the seeds."""
    with TemporaryDirectory(prefix="headway-agentic-") as scratch:
        simulation = _simulation(sizes, row, known, Path(scratch))
        found = [_simulated(sizes, row, resolved, simulation, seed) for seed in seeds]
    return Costs(**{one.name: sum(getattr(each, one.name) for each in found) / len(found) for one in fields(Costs)})


def _simulated(sizes: Sizes, row: Row, resolved: ResolvedConfig, simulation: SimulationConfig, seed: int) -> Costs:
    events: list[LoggedEvent] = []
    scenario = Scenario(settings=make_run_settings(resolved), simulation=simulation, seed=seed)
    summary = run_scenario(scenario, sinks=[events.append])
    if not summary.finished:
        raise RuntimeError(f"{row.name} ended early in the simulator: {summary.reason}")
    return costs(sizes, row, events)


def _simulation(sizes: Sizes, row: Row, known: Calibration, scratch: Path) -> SimulationConfig:
    return SimulationConfig(
        response_tokens=_as_seen(known.tokens, scratch / "tokens"),
        prompt_tokens=DistributionConfig(mean=1),
        engine=SimulatedEngineConfig(
            slots=row.episodes(sizes),
            step_s=known.engine_s,
            step_per_request_s=0.0,
            prefill_tokens_per_s=1e9,
        ),
        trainer=SimulatedTrainerConfig(fixed_s=known.train_s),
        weights=SimulatedWeightsConfig(buckets=1, load_s=known.update_s),
        environment=SimulatedEnvironmentConfig(
            turns=_as_seen(known.turns, scratch / "turns"),
            step_s=DistributionConfig(kind="gaussian", mean=sizes.mean_s, std=sizes.std_s),
            hang_probability=sizes.hang,
        ),
    )


def _as_seen(values: Sequence[int], file: Path) -> DistributionConfig:
    file.write_text("\n".join(map(str, values)), encoding="utf-8")
    return DistributionConfig(kind="empirical", file=str(file))
