"""Checks of a run after a fault: its ledger, its event log, and the machine it ran on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.chaos.fault_platforms import RunPlatform
from benchmarks.chaos.fault_runs import (
    ALPHA,
    EPOCH,
    GROUPS,
    MEMBERS,
    STEPS,
    ChaosRun,
    is_segment_in_use,
    list_shared_segments,
)

from headway.errors import HeadwayError
from headway.ledger import Ledger

EXIT_TIMEOUT_S = 5.0
"""How long the processes of a run may take to end with it."""
PLATFORM_EXIT_TIMEOUT_S = 40.0
"""How long the processes of a platform may take: agents of Ray check for their raylet only now and then."""


@dataclass
class RunFindings:
    """Results of the checks of one run."""

    problems: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
    """Number of started samples by how they ended."""
    lag: int = 0
    """Largest lag of a trained sample."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Number of restarts by component."""


class FinishedSamples:
    """Remembers the samples that the ledger has recorded as finished: none may be lost later."""

    def __init__(self, run: ChaosRun) -> None:
        self._run, self._finished = run, set[str]()

    def __len__(self) -> int:
        return len(self._finished)

    def check(self) -> list[str]:
        """Record finished samples and report lost ones. Called before a kill, after it, and at the end."""
        rows = self._run.query_ledger("SELECT sample_id, end, reason, row IN (SELECT row FROM payloads) FROM samples")
        ends = {name: (end, reason) for name, end, reason, _ in rows}
        kept = {name for name, _, _, has_payload in rows if has_payload}
        lost = [name for name in sorted(self._finished) if not _is_accounted_for(ends.get(name), name in kept)]
        self._finished |= kept
        return [f"sample {name} was finished and is lost" for name in lost]


def _is_accounted_for(end: tuple[str | None, str | None] | None, kept: bool) -> bool:
    if end is None:
        return False
    return end[0] == "trained" or (end[0] == "dropped" and bool(end[1])) or kept


def check_run(
    run: ChaosRun, finished: FinishedSamples, platform: RunPlatform, segments_before: set[str], *, alpha: int = ALPHA
) -> RunFindings:
    """Run all checks after the last end of the run, while its platform is still up."""
    found = RunFindings()
    found.problems += finished.check()
    _check_ledger(run, found)
    _check_history(run, alpha, found)
    _check_coverage(run, found)
    _check_machine(run, segments_before, found)
    found.problems += platform.find_leftovers()
    return found


def check_platform_removed(platform: RunPlatform, segments_before: set[str]) -> list[str]:
    """Report what a platform has left behind: processes, and shared memory that nobody uses."""
    return _wait_until_empty(
        lambda: platform.list_leftover_processes() + _find_abandoned_segments(segments_before), PLATFORM_EXIT_TIMEOUT_S
    )


def _check_ledger(run: ChaosRun, found: RunFindings) -> None:
    """Check that every started sample is in exactly one state."""
    try:
        ledger = Ledger(run.directory / "ledger.sqlite")
    except HeadwayError as error:
        found.problems.append(f"ledger: {error}")
        return
    try:
        found.problems += [f"ledger: {problem}" for problem in ledger.audit()]
        found.samples = dict(ledger.counts())
    finally:
        ledger.close()
    if found.samples.get("open", 0):
        found.problems.append(f"ledger: {found.samples['open']} samples have no end")
    if found.samples.get("trained", 0) != STEPS * GROUPS * MEMBERS:
        found.problems.append(
            f"ledger: {found.samples.get('trained', 0)} samples trained of {STEPS * GROUPS * MEMBERS}"
        )


def _check_history(run: ChaosRun, alpha: int, found: RunFindings) -> None:
    """Check the staleness bound, and that the surviving versions contain each step once and each group once."""
    surviving: dict[int, list[int]] = {}
    batch: list[int] = []
    for event in run.read_events():
        if event.kind in ("run.begin", "up") and event.who in ("run", "trainer"):
            reached = event.data["trained"] if event.kind == "run.begin" else event.data["version"]
            surviving = {version: groups for version, groups in surviving.items() if version <= reached}
        elif event.kind == "restart":
            found.restarts[event.who] += 1
        elif event.kind == "step.begin":
            batch = []
            if event.data["trained"] != max(surviving, default=0):
                found.problems.append(f"a step from version {event.data['trained']} at {max(surviving, default=0)}")
        elif event.kind == "group.train":
            found.lag = max(found.lag, event.data["trained"] - event.data["oldest"])
            batch.append(event.data["group"])
        elif event.kind == "step.end":
            surviving[event.data["trained"]] = batch
    if found.lag > alpha:
        found.problems.append(f"a sample was trained {found.lag} versions late, the bound is {alpha}")
    if list(surviving) != list(range(1, STEPS + 1)):
        found.problems.append(f"steps {list(surviving)} of {STEPS}")
    twice = [
        group for group, times in Counter(group for made in surviving.values() for group in made).items() if times > 1
    ]
    if twice:
        found.problems.append(f"groups {twice} were trained twice")


def _check_coverage(run: ChaosRun, found: RunFindings) -> None:
    """Check that every task of the first epoch was trained once: no drop of these runs ends a task for good.

    A straggler that was generated again may still be under way when the run ends.
    """
    rows = run.query_ledger("SELECT position, group_id, end, reason FROM groups ORDER BY group_id")
    times = Counter(position for position, _, end, _ in rows if end == "trained")
    under_way = {position for position, _, end, _ in rows if end is None}
    missing = [at for at in range(EPOCH) if times[at] != 1 and not (times[at] == 0 and at in under_way)]
    if missing:
        ends = [[(group, reason or end) for at, group, end, reason in rows if at == position] for position in missing]
        found.problems.append(f"tasks {missing} of the first {EPOCH} were not trained once: {ends}")


def _check_machine(run: ChaosRun, segments_before: set[str], found: RunFindings) -> None:
    """Check that no process and no shared memory of the run is left; a running platform may use some."""

    def left() -> list[str]:
        return [f"process {pid} is left" for pid in run.list_processes()] + _find_abandoned_segments(segments_before)

    found.problems += _wait_until_empty(left, EXIT_TIMEOUT_S)
    for pid in run.list_processes():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _wait_until_empty(left: Callable[[], list[str]], longest_s: float) -> list[str]:
    deadline = time.monotonic() + longest_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _find_abandoned_segments(segments_before: set[str]) -> list[str]:
    new = sorted(list_shared_segments() - segments_before)
    return [f"segment {name} is left" for name in new if not is_segment_in_use(name)]
