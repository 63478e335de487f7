"""The promises of the line, over random scenarios with faults. HEADWAY_SCENARIOS says how many (100)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.flow.training_flow import RunSummary
from headway.seeding import make_rng
from headway.sim.simulated_run import Scenario
from tests.flow.scenarios import check_ends, check_ledger, check_slots, live, random_scenario
from tests.flow.witness import Witness

SCENARIOS = int(os.environ.get("HEADWAY_SCENARIOS", "100"))
FIRST = int(os.environ.get("HEADWAY_FIRST_SCENARIO", "0"))
CHUNK = 25


def chunks() -> list[range]:
    return [range(n, min(n + CHUNK, FIRST + SCENARIOS)) for n in range(FIRST, FIRST + SCENARIOS, CHUNK)]


def to_the_end(seed: int, tmp: Path) -> None:
    scenario = random_scenario(seed)
    witness = Witness(scenario.settings)
    run_dir = tmp / f"run-{seed}"
    summary = live(scenario, run_dir, witness)
    assert summary is not None and witness.flow is not None
    assert "no progress" not in summary.reason, summary.reason
    check_ends(witness.events)
    check_ledger(run_dir, witness)
    check_slots(witness.flow)
    if not scenario.simulation.faults and scenario.tasks is None:
        assert summary.finished, summary
    if not scenario.simulation.faults and scenario.settings.staleness_policy == "wait":
        reasons = {event.data["reason"] for event in witness.events if event.kind == "group.drop"}
        assert not {reason for reason in reasons if reason.startswith("stale")}, "everything started has its place"
    if summary.finished:
        assert summary.trained == scenario.settings.max_steps == len(witness.lineage)
        trained = sum(len(ids) for ids in witness.lineage.values())
        assert witness.flow.backends.trainer.samples == trained  # type: ignore[attr-defined]


def resumed(seed: int, tmp: Path) -> None:
    """Stopped or killed at random events, again and again, and taken up each time."""
    rng = make_rng(seed, "lives")
    scenario = random_scenario(seed, faults=1.5)
    witness = Witness(scenario.settings)
    run_dir = tmp / f"run-{seed}"
    summary = None
    for _ in range(3):
        how = "stop" if rng.random() < 0.5 else "kill"
        clean = summary is not None and summary.reason == "the test said so"
        summary = one_life(scenario, run_dir, witness, clean=clean, until=1 + rng.randrange(0, 600), how=how)
        if summary is not None:
            check_ledger(run_dir, witness)
    clean = summary is not None and summary.reason == "the test said so"
    summary = one_life(scenario, run_dir, witness, clean=clean)
    assert summary is not None and witness.flow is not None
    assert "no progress" not in summary.reason, summary.reason
    check_ledger(run_dir, witness)
    check_slots(witness.flow)
    if summary.finished:
        assert sorted(witness.lineage) == list(range(1, scenario.settings.max_steps + 1))


def one_life(
    scenario: Scenario, run_dir: Path, witness: Witness, *, clean: bool, until: int | None = None, how: str = ""
) -> RunSummary | None:
    """After a clean stop, nothing that was in the line is given up for being taken up again."""
    seen = len(witness.events)
    summary = live(scenario, run_dir, witness, until=until, how=how)
    for event in witness.events[seen:] if clean else []:
        if event.kind == "restart" and event.who == "trainer":
            break
        assert event.data.get("reason") != "lost_lineage", event
    return summary


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
