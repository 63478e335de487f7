"""Every task of an epoch ends exactly once, whatever is killed; and what was given back is drawn before anything new.

HEADWAY_SCENARIOS / 10 says how many scenarios of each kind (10): `make soak` plays 1,000.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from headway.ledger import Ledger
from headway.monitor.event_log import LoggedEvent
from headway.seeding import Rng, make_rng
from headway.sim.simulated_run import Scenario
from headway.types import DropReason
from tests.flow.scenarios import live, random_scenario
from tests.flow.test_properties import FIRST, SCENARIOS
from tests.flow.witness import Witness

CHUNK = 20
MOST_IN_HAND = 3
"""Tasks that have left the cursor and have not started: in the channel, and in the hands of the stages beside it."""


def chunks() -> list[range]:
    return [range(n, n + CHUNK) for n in range(FIRST, FIRST + max(SCENARIOS // 10, CHUNK), CHUNK)]


def make_scenario(seed: int, rng: Rng, *, tasks: int | None) -> Scenario:
    """A random scenario that runs until its tasks run out, or for a few steps if they do not."""
    scenario = random_scenario(seed, faults=0.0 if rng.random() < 0.6 else 1.5)
    alpha = (0.0, 1.0, 2.0, 2.0, 3.0)[rng.randrange(0, 5)]
    settings = replace(
        scenario.settings,
        max_steps=1000 if tasks else 8,
        save_steps=1 + rng.randrange(0, 3),
        async_generation_ratio=alpha,
        pipeline_depth=None,
        updates_per_sync=min(scenario.settings.updates_per_sync, 1 + int(alpha)),
        eval_steps=0,
    )
    return replace(scenario, tasks=tasks, settings=settings)


def play(scenario: Scenario, run_dir: Path, rng: Rng, kills: int) -> Witness:
    """Run to the end, killed a few times on the way, also while it resumes."""
    witness = Witness(scenario.settings)
    for _ in range(kills):
        until = 1 + rng.randrange(0, 40 if rng.random() < 0.3 else 800)
        if live(scenario, run_dir, witness, until=until, how="kill") is not None:
            return witness
    summary = live(scenario, run_dir, witness)
    assert summary is not None and "no progress" not in summary.reason, summary
    return witness


def count_final_ends(run_dir: Path) -> tuple[Counter[int], int]:
    """Return how often each position was trained or dropped for good, and how many groups are still open."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.audit() == []
    ledger.close()
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        rows = db.execute("SELECT position, end, reason FROM groups").fetchall()
    ends = Counter(
        at for at, end, reason in rows if end == "trained" or (reason and not DropReason(reason).regenerates)
    )
    return ends, sum(end is None for _, end, _ in rows)


def check_epoch(seed: int, tmp: Path) -> None:
    rng = make_rng(seed, "coverage")
    tasks = rng.randrange(8, 40)
    scenario = make_scenario(seed, rng, tasks=tasks)
    for kills in (0, 1 + rng.randrange(0, 5)):
        run_dir = tmp / f"run-{seed}-{kills}"
        play(scenario, run_dir, rng, kills)
        ends, still_open = count_final_ends(run_dir)
        shutil.rmtree(run_dir)
        assert still_open < scenario.settings.groups_per_step, f"{still_open} groups are left, enough for a batch"
        assert set(ends.values()) <= {1}, f"ended twice with {kills} kills: {ends}"
        assert len(ends) + still_open == tasks, f"{tasks - still_open - len(ends)} lost with {kills} kills"


def find_overtaken(events: list[LoggedEvent]) -> dict[int, int]:
    """Return the positions that were given back, with the number of new ones that started before they did again."""
    positions: dict[int, int] = {}
    overtaken: dict[int, int] = {}
    given_back: set[int] = set()
    unread = 0
    for event in events:
        if event.kind == "group.drop" and DropReason(event.data["reason"]).regenerates:
            at = positions[event.data["group"]]
            given_back.add(at)
            overtaken[at] = 0
        elif event.kind == "group.start":
            at = positions[event.data["group"]] = event.data["position"]
            given_back.discard(at)
            if at >= unread:
                unread = at + 1
                for one in given_back:
                    overtaken[one] += 1
    return overtaken


def check_order(seed: int, tmp: Path) -> None:
    rng = make_rng(seed, "order")
    run_dir = tmp / f"run-{seed}"
    witness = play(make_scenario(seed, rng, tasks=None), run_dir, rng, kills=1 + rng.randrange(0, 3))
    shutil.rmtree(run_dir)
    late = {at: count for at, count in find_overtaken(witness.events).items() if count > MOST_IN_HAND}
    assert not late, f"given back, and overtaken by new ones: {late}"


@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_every_task_of_an_epoch_ends_as_often_as_without_kills(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        try:
            check_epoch(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_what_was_given_back_is_drawn_before_anything_new(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        try:
            check_order(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
