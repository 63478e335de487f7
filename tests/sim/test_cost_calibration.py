"""Calibration: costs that are found from the phases of a synchronous run give that run back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.monitor.run_report import RunMonitor, RunReport
from headway.seeding import make_rng
from headway.sim.cost_calibration import MeasuredPhases, calibrate_costs, describe_lengths, parse_phases
from headway.sim.simulated_environment import SimulatedEnvironments
from headway.sim.simulated_run import Scenario, make_scenario, run_scenario
from headway.types import Task

SHARED: dict[str, Any] = {
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 4,
    "filter_zero_variance": False,
    "response_length": 4096,
    "hybrid_engine": True,
    "num_gpus_per_node": 4,
    "simulation.steps": 4,
    "simulation.response_tokens": {"kind": "lognormal", "mean": 500, "std": 400, "min": 1},
}


def report_of(scenario: Scenario) -> RunReport:
    monitor = RunMonitor(0)
    assert run_scenario(scenario, sinks=[monitor]).finished
    return monitor.report()


def test_the_calibrated_synchronous_run_has_the_measured_phases() -> None:
    measured = parse_phases("gen=247,logp=88,update=286,sync=7,switch=74")
    costs = calibrate_costs(make_scenario(load_config(SHARED)), measured)
    report = report_of(make_scenario(load_config(SHARED, costs)))
    phases = report.phases
    assert phases.generation_s == pytest.approx(247, rel=0.02)
    assert phases.logp_s == pytest.approx(88, rel=0.02)
    assert phases.update_s == pytest.approx(286 + 74, rel=0.02)
    assert phases.sync_s == pytest.approx(7, rel=0.02)
    total = 247 + 88 + 286 + 74 + 7
    assert report.throughput.step_mean_s == pytest.approx(total, rel=0.03)  # the last sync ends after the last step


def test_the_phases_of_fewer_gpus_are_those_of_their_number() -> None:
    scenario = make_scenario(load_config(SHARED))
    on_two = calibrate_costs(scenario, MeasuredPhases(update=10.0, gpus=2))
    on_four = calibrate_costs(scenario, MeasuredPhases(update=10.0))
    key = "simulation.trainer.gpu_s_per_token"
    assert on_four[key] == pytest.approx(2 * on_two[key], rel=0.05)


def test_only_shared_devices_pay_what_is_colocated() -> None:
    costs = {"switch_s": 50.0, "trainer_factor": 2.0, "logp": {"gpu_s_per_token": 0.01}}
    config = load_config({**SHARED, "simulation.trainer.gpu_s_per_token": 0.01, "simulation.colocated": costs})
    shared = make_scenario(config)
    apart = replace(shared, infer_devices=(4, 5, 6, 7), settings=replace(shared.settings, hybrid_engine=False))
    tokens = report_of(apart).throughput.actions / 4
    assert report_of(apart).phases.logp_s == 0
    assert report_of(apart).phases.update_s == pytest.approx(tokens * 0.01 / 4, rel=0.01)
    assert report_of(shared).phases.update_s == pytest.approx(50 + 2 * tokens * 0.01 / 4, rel=0.01)
    assert report_of(shared).phases.logp_s == pytest.approx(tokens * 0.01 / 4, rel=0.01)


@pytest.mark.parametrize(
    "text", ["", "gen", "gen=x", "gen=-1", "speed=3", "gen=nan", "gpus=0", "gpus=1.5", "gen=1;logp=2"]
)
def test_phases_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--calibrate"):
        parse_phases(text)


def test_a_generation_that_environments_alone_exceed_is_refused() -> None:
    slow = {**SHARED, "simulation.environment.step_s": {"mean": 60.0}}
    with pytest.raises(ConfigError, match="environments and rewards alone"):
        calibrate_costs(make_scenario(load_config(slow)), MeasuredPhases(gen=5.0))


def test_a_file_of_lengths_says_how_alike_the_answers_to_a_prompt_are(tmp_path: Path) -> None:
    file, rng = tmp_path / "lengths.txt", make_rng(3)
    rows = []
    for _ in range(400):
        prompt = rng.gauss(0.0, 0.8)
        rows.append(" ".join(f"{round(1000 * 2.718 ** (prompt + rng.gauss(0.0, 0.6)))}" for _ in range(8)))
    file.write_text("\n".join(rows))
    keys = describe_lengths(str(file))
    assert keys["simulation.response_correlation"] == pytest.approx(0.64, abs=0.05)  # 0.8² / (0.8² + 0.6²)
    file.write_text("10\n20\n30\n")
    assert "simulation.response_correlation" not in describe_lengths(str(file))


@pytest.mark.parametrize("kind", ["lognormal", "empirical"])
def test_answers_to_one_prompt_are_as_alike_as_asked_and_keep_their_mean(kind: str, tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"kind": kind, "mean": 500, "std": 300, "min": 1}
    if kind == "empirical":
        file = tmp_path / "lengths.txt"
        file.write_text("\n".join(str(100 + number) for number in range(900)))
        lengths = {"kind": kind, "file": str(file)}
    config = load_config({**SHARED, "simulation.response_tokens": lengths, "simulation.response_correlation": 0.7})
    environments = SimulatedEnvironments(config.config.simulation, seed=5)
    pairs = []
    for position in range(3000):
        rng = make_rng(5, "environment", position)
        pairs.append((environments.draw_response(position, rng), environments.draw_response(position, rng)))
    assert environments(Task(position=0)) is not None
    sides = list(zip(*pairs, strict=True))
    means = [sum(side) / len(pairs) for side in sides]
    assert means == pytest.approx([500 if kind == "lognormal" else 549.5] * 2, rel=0.04)
    spreads = [sum((value - mean) ** 2 for value in side) for side, mean in zip(sides, means, strict=True)]
    product = sum((left - means[0]) * (right - means[1]) for left, right in pairs)
    assert product / (spreads[0] * spreads[1]) ** 0.5 == pytest.approx(0.67, abs=0.06)
