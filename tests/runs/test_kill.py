"""`kill -9` at fourteen moments, and the same command again each time: nothing is lost, nothing is trained twice.

What is checked is read from outside: the ledger as a file, the event log, the checkpoints as `transformers` sees them.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headway.ledger.ledger_records import decode_episode, decode_generation
from tests.runs.factory import Run, Runs, audit, count, events, gone, parts, rows, segments

ALPHA, STEPS, GROUPS, MEMBERS = 1, 44, 2, 2
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS,
    "save_steps": 2,
    "save_total_limit": 2,
    "eval_steps": 3,
    "response_length": 24,
    "async_generation_ratio": ALPHA,
    "rollout_batch_size": GROUPS,
    "num_return_sequences_in_group": MEMBERS,
    "processes": True,
    "reliability.restart_backoff_s": 0,
    "validation.data_args.file_name": "addition",
}
Moment = tuple[str, float, Callable[[Run], bool]]
"""What to wait for, and how many seconds at most to wait after it."""


def another(what: str, after_s: float, measure: Callable[[Path], int]) -> Moment:
    """When there is more of something than when the life began."""
    begun: dict[int, int] = {}

    def reached(run: Run) -> bool:
        now = measure(run.directory)
        return now > begun.setdefault(run.pid, now)

    return what, after_s, reached


def event(kind: str, after_s: float) -> Moment:
    return another(kind, after_s, lambda directory: count(directory, kind))


def entry(what: str, after_s: float, query: str) -> Moment:
    return another(what, after_s, lambda directory: sum(number for (number,) in rows(directory, query)))


MOMENTS: tuple[Moment, ...] = (
    ("the directory", 0.1, lambda run: (run.directory / "run.lock").exists()),
    ("the ledger", 0.1, lambda run: (run.directory / "ledger.sqlite").exists()),
    ("the processes, the first weights, the first validation", 0.3, lambda run: len(parts(run)) == 2),
    ("a checkpoint half written", 0.003, lambda run: any((run.directory / "checkpoints").glob("*.partial"))),
    event("run.begin", 0.3),
    event("validate.end", 0.02),
    event("step.end", 0.05),
    event("checkpoint", 0.02),
    entry("a checkpoint half removed", 0.002, "SELECT ifnull(min(version), 0) FROM checkpoints"),
    entry("a group begun", 0.02, "SELECT count(*) FROM groups"),
    entry("a sample finished", 0.02, "SELECT ifnull(max(row), 0) FROM payloads"),
    entry("a group graded", 0.02, "SELECT ifnull(max(group_id), 0) FROM grades"),
)


class Books:
    """What the ledger has promised over all lives of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._finished: set[str] = set()
        self._partials: dict[str, tuple[int, ...]] = {}
        self.continued = 0

    def look(self) -> None:
        """After a kill, or at the end."""
        samples = rows(self._directory, "SELECT sample_id, end, reason FROM samples")
        ends = {name: (end, reason) for name, end, reason in samples}
        kept = dict(rows(self._directory, "SELECT sample_id, body FROM payloads JOIN samples USING (row)"))
        for sample in self._finished:
            end, reason = ends[sample]
            assert end == "trained" or (end == "dropped" and reason) or sample in kept, f"{sample} is lost"
        self._finished |= kept.keys()
        for sample, body in kept.items():
            begun = self._partials.pop(sample, None)
            if begun is not None:
                made = decode_episode(body).turns[0].generation.actions
                self.continued += tuple(made[: len(begun)]) == begun
        for sample, body in rows(self._directory, "SELECT sample_id, body FROM partials JOIN samples USING (row)"):
            self._partials[sample] = tuple(decode_generation(body).actions)


def check_history(directory: Path, alpha: int = ALPHA) -> None:
    """By the event log alone: lags, numbers of steps, and what the surviving versions were made of."""
    surviving: dict[int, list[int]] = {}
    batch: list[int] = []
    for event in events(directory):
        if event.kind in ("run.begin", "up") and event.who in ("run", "trainer"):
            reached = event.data["trained"] if event.kind == "run.begin" else event.data["version"]
            surviving = {version: groups for version, groups in surviving.items() if version <= reached}
        elif event.kind == "step.begin":
            assert event.data["trained"] == max(surviving, default=0), "a step was left out or made twice"
            batch = []
        elif event.kind == "group.train":
            assert event.data["trained"] - event.data["oldest"] <= alpha
            batch.append(event.data["group"])
        elif event.kind == "step.end":
            assert len(batch) == GROUPS
            surviving[event.data["trained"]] = batch
    assert list(surviving) == list(range(1, STEPS + 1))
    trained = [group for groups in surviving.values() for group in groups]
    assert len(set(trained)) == len(trained), "a group was trained twice"
    ledger = rows(directory, "SELECT group_id, trained_at FROM groups WHERE end = 'trained'")
    assert {group: version for version, groups in surviving.items() for group in groups} == dict(ledger)
    assert len(rows(directory, "SELECT 1 FROM samples WHERE end = 'trained'")) == STEPS * GROUPS * MEMBERS


def test_a_run_that_is_killed_fourteen_times_finishes_as_if_it_had_not_been(runs: Runs, tmp_path: Path) -> None:
    dice, directory, before = random.Random(20), tmp_path / "run", segments()
    books = Books(directory)
    order = dice.sample(MOMENTS, len(MOMENTS)) + dice.choices(MOMENTS[3:], k=14 - len(MOMENTS))
    for name, after_s, reached in order:
        run = runs.train(directory, **OPTIONS)
        assert run.until(partial(reached, run)), f"{name}: {run.text}"
        time.sleep(dice.random() * after_s)
        children = list(parts(run).values())
        run.kill()
        assert run.end() == -signal.SIGKILL
        assert gone(children), f"killed at {name}: {children} are left"
        if (directory / "ledger.sqlite").exists():
            audit(directory)
            books.look()
    last = runs.train(directory, **OPTIONS)
    assert last.end() == 0, last.text
    audit(directory)
    books.look()
    check_history(directory)
    assert segments() <= before, "shared memory is left behind"
    left = sorted((directory / "checkpoints").iterdir())
    assert [path.name for path in left] == [f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}"]
    for checkpoint in left:
        assert runs.template.call("tests.runs.factory:check_checkpoint", str(checkpoint)) == 0
