"""What must be true of a run that was hurt: by its ledger, by its event log, and by the machine it ran on."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from benchmarks.chaos.fault_runs import ALPHA, GROUPS, MEMBERS, STEPS, Run, in_use, segments
from benchmarks.chaos.fault_stages import Stage

from headway.errors import HeadwayError
from headway.ledger import Ledger

GONE_S = 5.0
"""How long what a run has started may take to be gone with it."""
STAGE_GONE_S = 40.0
"""How long what a stage has started may take: agents of Ray look for their raylet now and then."""


@dataclass
class Finding:
    """What was seen of one run."""

    problems: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
    """Started samples by their end."""
    lag: int = 0
    """The largest that was trained."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Of whom."""


class Promises:
    """Samples that the ledger has called finished: none of them may be lost later."""

    def __init__(self, run: Run) -> None:
        self._run, self._finished = run, set[str]()

    def __len__(self) -> int:
        return len(self._finished)

    def look(self) -> list[str]:
        """Before a kill, after one that ends the run, and at the end."""
        path = self._run.directory / "ledger.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:  # what is to be recovered stays as it is
            try:
                ends = {
                    name: (end, reason)
                    for name, end, reason in db.execute("SELECT sample_id, end, reason FROM samples")
                }
                kept = {name for (name,) in db.execute("SELECT sample_id FROM payloads JOIN samples USING (row)")}
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
                return []  # killed before they were made
        lost = [name for name in sorted(self._finished) if not _accounted(ends.get(name), name in kept)]
        self._finished |= kept
        return [f"sample {name} was finished and is lost" for name in lost]


def _accounted(end: tuple[str | None, str | None] | None, kept: bool) -> bool:
    if end is None:
        return False
    return end[0] == "trained" or (end[0] == "dropped" and bool(end[1])) or kept


def examine(run: Run, promises: Promises, stage: Stage, segments_before: set[str]) -> Finding:
    """Everything, after its last life, while its stage still stands."""
    found = Finding()
    found.problems += promises.look()
    _examine_ledger(run, found)
    _examine_history(run, found)
    _examine_machine(run, segments_before, found)
    found.problems += stage.books()
    return found


def examine_after(stage: Stage, segments_before: set[str]) -> list[str]:
    """What a stage that was taken down has left: processes, and memory that nobody uses."""
    return _waited(lambda: stage.left() + _abandoned(segments_before), STAGE_GONE_S)


def _examine_ledger(run: Run, found: Finding) -> None:
    """Every started sample in exactly one state."""
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


def _examine_history(run: Run, found: Finding) -> None:
    """The bound, and what the surviving versions were made of: each step once, each group once."""
    surviving: dict[int, list[int]] = {}
    batch: list[int] = []
    for event in run.events():
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
    if found.lag > ALPHA:
        found.problems.append(f"a sample was trained {found.lag} versions late, the bound is {ALPHA}")
    if list(surviving) != list(range(1, STEPS + 1)):
        found.problems.append(f"steps {list(surviving)} of {STEPS}")
    twice = [
        group for group, times in Counter(group for made in surviving.values() for group in made).items() if times > 1
    ]
    if twice:
        found.problems.append(f"groups {twice} were trained twice")


def _examine_machine(run: Run, segments_before: set[str], found: Finding) -> None:
    """No process of the run and none of its memory is left; what a stage that still stands uses is not left."""

    def left() -> list[str]:
        return [f"process {pid} is left" for pid in run.left()] + _abandoned(segments_before)

    found.problems += _waited(left, GONE_S)
    for pid in run.left():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _waited(left: Callable[[], list[str]], longest_s: float) -> list[str]:
    deadline = time.monotonic() + longest_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _abandoned(segments_before: set[str]) -> list[str]:
    return [f"segment {name} is left" for name in sorted(segments() - segments_before) if not in_use(name)]
