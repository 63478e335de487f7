"""Predicts the scenario with the simulator: the same scheduler as in the runs, on a virtual clock.

The simulator draws waits with the μ and σ of the environments. One measured run gives it the costs of the policy: of a
request to the engine, of a training step, of a weight update, and the numbers of tokens and turns. What waits for what
follows from the scheduler. The simulator does not know that components share CPU cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agentic.measured_runs import (
    AgenticScenario,
    MeasuredRow,
    StepCosts,
    compute_costs,
    count_turns,
    find_requests,
)

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
class CostCalibration:
    """Costs of the policy in one measured run."""

    engine_s: float
    """Time per token of a request, including queueing and prefill."""
    train_s: float
    update_s: float
    tokens: tuple[int, ...]
    """Number of tokens of every request."""
    turns: tuple[int, ...]
    """Number of turns of every episode."""


def calibrate_costs(found: StepCosts, events: list[LoggedEvent]) -> CostCalibration:
    """Return the costs of a measured run."""
    asked = find_requests(events)
    return CostCalibration(
        engine_s=sum(end_s - begin_s for begin_s, end_s, _ in asked) / sum(tokens for _, _, tokens in asked),
        train_s=found.train_s,
        update_s=found.update_s,
        tokens=tuple(tokens for _, _, tokens in asked),
        turns=tuple(count_turns(events)),
    )


def predict_costs(
    sizes: AgenticScenario, row: MeasuredRow, resolved: ResolvedConfig, known: CostCalibration, seeds: Sequence[int]
) -> StepCosts:
    """Return the simulated costs of a row, averaged over the seeds."""
    with TemporaryDirectory(prefix="headway-agentic-") as scratch:
        simulation = _make_simulation(sizes, row, known, Path(scratch))
        found = [_simulate_row(sizes, row, resolved, simulation, seed) for seed in seeds]
    return StepCosts(
        **{one.name: sum(getattr(each, one.name) for each in found) / len(found) for one in fields(StepCosts)}
    )


def _simulate_row(
    sizes: AgenticScenario, row: MeasuredRow, resolved: ResolvedConfig, simulation: SimulationConfig, seed: int
) -> StepCosts:
    events: list[LoggedEvent] = []
    scenario = Scenario(settings=make_run_settings(resolved), simulation=simulation, seed=seed)
    summary = run_scenario(scenario, sinks=[events.append])
    if not summary.finished:
        raise RuntimeError(f"{row.name} ended early in the simulator: {summary.reason}")
    return compute_costs(sizes, row, events)


def _make_simulation(
    sizes: AgenticScenario, row: MeasuredRow, known: CostCalibration, scratch: Path
) -> SimulationConfig:
    return SimulationConfig(
        response_tokens=_write_distribution(known.tokens, scratch / "tokens"),
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
            turns=_write_distribution(known.turns, scratch / "turns"),
            step_s=DistributionConfig(kind="gaussian", mean=sizes.mean_s, std=sizes.std_s),
            hang_probability=sizes.hang,
        ),
    )


def _write_distribution(values: Sequence[int], file: Path) -> DistributionConfig:
    file.write_text("\n".join(map(str, values)), encoding="utf-8")
    return DistributionConfig(kind="empirical", file=str(file))
