"""Environments that misbehave, in real runs: the episode is dropped with a reason, the run ends, nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.factory import world
from tests.runs.factory import Run, Runs, audit, events, rows

# Seeds whose first lakes are of every kind.
SHORT: dict[str, Any] = {"reliability__sample_retries": 0, "eval_steps": 0, "max_steps": 1}


def dropped(run: Run) -> set[str]:
    found = rows(run.directory, "SELECT DISTINCT reason FROM samples WHERE end = 'dropped'")
    return {str(reason) for (reason,) in found}


def processes_in(directory: Path) -> list[str]:
    """Whoever has been started by the run: its working directory is theirs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.readlink() == directory:
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def complaints(run: Run) -> str:
    return "\n".join(str(event.data["message"]) for event in events(run.directory, "error"))


def test_one_that_fails_now_and_then_costs_its_episodes_alone(runs: Runs, tmp_path: Path) -> None:
    run = world(runs, tmp_path / "run", "Moody", seed=2720, **SHORT)
    assert run.end() == 0, run.text
    assert {"environment_failed", "group_failed"} <= dropped(run)
    said = complaints(run)
    reasons = ("reset raised ValueError: in reset", "step raised ValueError: in step", "returned 7, not a Reply")
    assert sum(reason in said for reason in reasons) >= 2, "the first failure of a group ends it, whichever it is"
    audit(run.directory)


def test_one_that_hangs_and_one_that_prints_are_given_up(runs: Runs, tmp_path: Path) -> None:
    # Synchronous: the step waits for the group that hangs, and not only for faster ones.
    limits = {"custom_envs__lake__workers": 3, "reliability__environment_timeout_s": 4, "async_generation_ratio": 0}
    run = world(runs, tmp_path / "run", "Stuck", seed=540, **limits, **SHORT)
    assert run.end() == 0, run.text
    said = complaints(run)
    assert "no answer to step after 4.0 s" in said and "printed more than 16 MB" in said
    assert "environment_failed" in dropped(run)
    assert not processes_in(tmp_path)
    audit(run.directory)


@pytest.mark.parametrize("workers", [0, 1], ids=["here", "workers"])
def test_what_one_has_started_is_gone_after_the_run(runs: Runs, tmp_path: Path, workers: int) -> None:
    note = tmp_path / "pid"
    options = {"custom_envs__lake__env_config__what": "leaks", "custom_envs__lake__env_config__note": note}
    run = world(runs, tmp_path / "run", "Bad", custom_envs__lake__workers=workers, **options, **SHORT)
    assert run.end() == 0, run.text
    assert not Path(f"/proc/{note.read_text()}").exists() and not processes_in(tmp_path)


def test_one_that_always_exits_ends_the_run_in_one_line_that_names_it(runs: Runs, tmp_path: Path) -> None:
    run = world(runs, tmp_path / "run", "Bad", custom_envs__lake__env_config__what="dies", **SHORT)
    assert run.end() == 1, run.text
    (ending,) = [line for line in run.text.splitlines() if line.startswith("ended early after step 0")]
    assert "sample_environments:Bad: its worker process" in ending and "ended with exit code 3: last words" in ending
    assert "Traceback" not in run.text and "environment_failed" in dropped(run)
    audit(run.directory)
