"""The promises of the line, over random scenarios with faults. HEADWAY_SCENARIOS says how many (500)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.seeding import seeded
from tests.flow.scenarios import Witness, check_ends, check_ledger, check_slots, live, random_scenario

SCENARIOS = int(os.environ.get("HEADWAY_SCENARIOS", "500"))
FIRST = int(os.environ.get("HEADWAY_FIRST_SCENARIO", "0"))
CHUNK = 25


def chunks() -> list[range]:
    return [range(n, min(n + CHUNK, FIRST + SCENARIOS)) for n in range(FIRST, FIRST + SCENARIOS, CHUNK)]


def to_the_end(seed: int, tmp: Path) -> None:
    scenario = random_scenario(seed)
    witness = Witness(alpha=scenario.settings.alpha, group_size=scenario.settings.group_size)
    run_dir = tmp / f"run-{seed}"
    summary = live(scenario, run_dir, witness)
    assert summary is not None and witness.flow is not None
    assert "no progress" not in summary.reason, summary.reason
    check_ends(witness.events)
    check_ledger(run_dir, witness)
    check_slots(witness.flow)
    if not scenario.simulation.faults and scenario.tasks is None:
        assert summary.finished, summary
    if summary.finished:
        assert summary.trained == scenario.settings.max_steps == len(witness.lineage)


def resumed(seed: int, tmp: Path) -> None:
    """Stopped or killed at random events, again and again, and taken up each time."""
    rng = seeded(seed, "lives")
    scenario = random_scenario(seed, faults=1.5)
    witness = Witness(alpha=scenario.settings.alpha, group_size=scenario.settings.group_size)
    run_dir = tmp / f"run-{seed}"
    for _ in range(3):
        how = "stop" if rng.random() < 0.5 else "kill"
        summary = live(scenario, run_dir, witness, until=1 + rng.randrange(0, 600), how=how)
        if summary is not None:
            check_ledger(run_dir, witness)
    summary = live(scenario, run_dir, witness)
    assert summary is not None and witness.flow is not None
    assert "no progress" not in summary.reason, summary.reason
    check_ledger(run_dir, witness)
    check_slots(witness.flow)
    if summary.finished:
        assert sorted(witness.lineage) == list(range(1, scenario.settings.max_steps + 1))


@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_run_with_faults_keeps_every_promise(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        try:
            to_the_end(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_run_saved_or_killed_at_any_event_goes_on(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        try:
            resumed(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
