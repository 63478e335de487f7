"""Measured costs: a synchronous run with known costs is measured, and the block that comes out has them again."""

from __future__ import annotations

import pytest

import headway
from headway.cli.measure_command import is_whole_answer, measure_costs
from headway.config import load_config
from headway.monitor.run_report import RunMonitor

SCENARIO = {
    "async_generation_ratio": 0,
    "filter_zero_variance": False,
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 2,
    "simulation.response_tokens": {"kind": "fixed", "mean": 40},
    "simulation.engine.step_s": 0.05,
    "simulation.engine.step_per_request_s": 0.002,
    "simulation.trainer": {"gpu_s_per_token": 0.004},
}


def test_costs_of_a_run_are_found_again() -> None:
    run = headway.simulate(SCENARIO, steps=3)
    monitor = RunMonitor(1)
    for event in run.events:
        monitor(event)
    lengths = [event.event.actions for event in run.events if is_whole_answer(event.event)]
    block = measure_costs(load_config(SCENARIO, []), monitor, lengths)
    assert block["response_tokens"]["mean"] == 40 and block["response_tokens"]["kind"] == "fixed"
    assert block["trainer"]["gpu_s_per_token"] == pytest.approx(0.004, rel=0.05)
    assert block["engine"]["step_s"] == pytest.approx(0.05, rel=0.1)
