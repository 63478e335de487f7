"""Several training steps between two weight syncs, and training that begins with a part of what one version makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from headway.config import ConfigErrors, load_config
from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEngineConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)
from headway.errors import ConfigError
from headway.flow.training_flow import RunSummary
from headway.settings import RunSettings
from headway.sim.simulated_run import Scenario
from tests.flow.scenarios import check_ends, check_ledger, check_slots, live
from tests.flow.witness import Witness

STEPS = 12


def make_scenario(updates: int, alpha: float, *, groups: int = 4, steps: int = STEPS, seed: int = 1) -> Scenario:
    return Scenario(
        settings=RunSettings(
            groups_per_step=groups,
            group_size=2,
            max_steps=steps,
            async_generation_ratio=alpha,
            updates_per_sync=updates,
            filter_zero_variance=False,
            save_steps=2,
        ),
        simulation=SimulationConfig(
            response_tokens=DistributionConfig(kind="lognormal", mean=100, std=120, min=1),
            engine=SimulatedEngineConfig(slots=8, step_s=0.01, step_per_request_s=0.001),
            trainer=SimulatedTrainerConfig(gpu_s_per_token=0.003, save_s=0.1),
            weights=SimulatedWeightsConfig(send_s=0.5),
        ),
        seed=seed,
    )


def play(scenario: Scenario, run_dir: Path) -> tuple[RunSummary, Witness]:
    witness = Witness(scenario.settings)
    summary = live(scenario, run_dir, witness)
    assert summary is not None and witness.flow is not None
    check_ends(witness.events)
    check_ledger(run_dir, witness)
    check_slots(witness.flow)
    return summary, witness


def lags_of(witness: Witness) -> Counter[int]:
    trained = [event.data for event in witness.events if event.kind == "group.train"]
    return Counter(group["trained"] - group["oldest"] for group in trained)


def served_by(witness: Witness) -> list[int]:
    return [event.data["version"] for event in witness.events if event.kind == "served"]


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
def test_engines_get_every_so_manieth_version_and_the_last(updates: int, tmp_path: Path) -> None:
    summary, witness = play(make_scenario(updates, updates - 1.0, steps=11), tmp_path)
    assert summary.finished
    assert sorted(set(served_by(witness))) == sorted({*range(0, 12, updates), 11})


def test_a_depth_of_the_steps_between_two_syncs_trains_what_one_version_made_and_drops_nothing(tmp_path: Path) -> None:
    summary, witness = play(make_scenario(4, 3.0), tmp_path)
    assert summary.finished
    assert lags_of(witness) == dict.fromkeys(range(4), STEPS)  # 4 groups a step, and each place in the cycle alike
    assert not [event for event in witness.events if event.kind == "group.drop"]


def test_training_begins_before_the_rest_of_what_a_version_makes_is_ready(tmp_path: Path) -> None:
    parts, whole = make_scenario(4, 3.0), make_scenario(1, 0.0, groups=16, steps=STEPS // 4)
    _, streamed = play(parts, tmp_path / "parts")
    _, waited = play(whole, tmp_path / "whole")
    begun = [next(e.time_s for e in witness.events if e.kind == "step.begin") for witness in (streamed, waited)]
    ended = [witness.events[-1].time_s for witness in (streamed, waited)]
    assert begun[0] < 0.7 * begun[1]
    assert ended[0] < ended[1]  # the same groups, the same versions to make them, and training in between


@pytest.mark.parametrize("alpha", [3.4, 4.2, 5.0])
def test_more_than_one_cycle_ahead_keeps_the_bound(alpha: float, tmp_path: Path) -> None:
    summary, witness = play(make_scenario(4, alpha), tmp_path)
    assert summary.finished
    assert max(lags_of(witness)) <= -(-alpha // 1)


def test_a_validated_version_is_served_out_of_turn(tmp_path: Path) -> None:
    base = make_scenario(4, 3.0)
    settings = replace(base.settings, eval_steps=3, val_batch_size=2, eval_at_start=False)
    summary, witness = play(replace(base, settings=settings), tmp_path)
    assert summary.finished
    assert {0, 3, 4, 6, 8, 9, 12} == set(served_by(witness))


def test_a_run_that_is_killed_between_two_syncs_goes_on(tmp_path: Path) -> None:
    scenario = make_scenario(4, 3.0)
    witness = Witness(scenario.settings)
    assert live(scenario, tmp_path, witness, until=400, how="kill") is None
    reached = max(witness.lineage)
    assert 0 < reached < STEPS
    summary = live(scenario, tmp_path, witness)
    assert summary is not None and summary.finished
    check_ledger(tmp_path, witness)
    assert sorted(witness.lineage) == list(range(1, STEPS + 1))


def test_too_little_depth_for_the_steps_between_two_syncs_is_refused() -> None:
    with pytest.raises(ConfigError, match="updates_per_sync"):
        make_scenario(4, 2.0)
    with pytest.raises(ConfigErrors, match="async_generation_ratio and pipeline_depth of at least 3"):
        load_config({"updates_per_sync": 4, "async_generation_ratio": 2})
    assert load_config({"updates_per_sync": 4, "async_generation_ratio": 3}).config.updates_per_sync == 4
