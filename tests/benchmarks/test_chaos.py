"""The chaos benchmark finds what it looks for: each promise that was broken on purpose is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chaos import fault_checks
from benchmarks.chaos.fault_checks import FinishedSamples, check_platform_removed, check_run
from benchmarks.chaos.fault_platforms import PLATFORM_MARK as STAGE_MARK
from benchmarks.chaos.fault_platforms import RunPlatform
from benchmarks.chaos.fault_runs import (
    GROUPS,
    MEMBERS,
    RUN_MARK,
    STEPS,
    ChaosRun,
    find_descendants,
    list_shared_segments,
)

from headway.ledger import Ledger
from headway.types import DropReason, Episode, FinishReason, Generation, Task, Turn, VersionRun

Row = tuple[str, str, dict[str, Any]]
WRITES_AND_DIES = """
import os, sqlite3
db = sqlite3.connect("ledger.sqlite")
db.executescript('''
    PRAGMA journal_mode = WAL;
    CREATE TABLE samples (row, sample_id, end, reason);
    CREATE TABLE payloads (row);
    INSERT INTO samples VALUES (1, "0.0", NULL, NULL);
    INSERT INTO payloads VALUES (1);
''')
os.kill(os.getpid(), 9)
"""


def episode(sample: str) -> Episode:
    made = Generation(actions=(1,), logps=(-1.0,), runs=(VersionRun(version=0, count=1),), finish=FinishReason.STOP)
    return Episode(sample_id=sample, task=Task(position=0), turns=(Turn(observation=(), generation=made),))


def make_run(
    directory: Path, *, lag: int = 1, twice: bool = False, left_out: int = 0, open_sample: bool = False
) -> ChaosRun:
    """A run that is over, as its files tell it."""
    directory.mkdir()
    ledger = Ledger(directory / "ledger.sqlite")
    rows: list[Row] = [("run.begin", "run", {"trained": 0})]
    for step in range(STEPS - left_out):
        rows.append(("step.begin", "train", {"trained": step}))
        for number in range(GROUPS):
            group = step * GROUPS + number
            samples = [f"{group}.{member}" for member in range(MEMBERS)]
            ledger.start_group(group, group)
            for sample in samples:
                ledger.start_sample(sample, group)
                ledger.finish_sample(episode(sample))
            ledger.train_group(group, samples, step + 1)
            told = 0 if twice and step == 1 else group
            rows.append(("group.train", "train", {"group": told, "trained": step, "oldest": max(step - lag, -lag)}))
        rows.append(("step.end", "train", {"trained": step + 1}))
    ledger.start_group(10_000, 10_000)
    ledger.start_sample("10000.0", 10_000)
    if not open_sample:
        ledger.drop_group(10_000, DropReason.SURPLUS_GROUP)
    ledger.close()
    text = "".join(json.dumps([at, *row]) + "\n" for at, row in enumerate(rows))
    (directory / "events.jsonl").write_text(text, encoding="utf-8")
    return ChaosRun(directory, [])


def problems(run: ChaosRun, stage: RunPlatform | None = None) -> list[str]:
    return check_run(run, FinishedSamples(run), stage or RunPlatform(), list_shared_segments()).problems


def test_a_run_that_kept_its_promises_has_no_problem(tmp_path: Path) -> None:
    assert problems(make_run(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"lag": 2}, "a sample was trained 2 versions late"),
        ({"twice": True}, "groups [0] were trained twice"),
        ({"left_out": 1}, f"samples trained of {STEPS * GROUPS * MEMBERS}"),
        ({"open_sample": True}, "1 samples have no end"),
    ],
)
def test_a_broken_promise_is_named(tmp_path: Path, broken: dict[str, Any], named: str) -> None:
    assert any(named in problem for problem in problems(make_run(tmp_path / "run", **broken)))


def test_a_finished_sample_that_is_gone_is_missed(tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, [])
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.start_group(0, 0)
    ledger.start_sample("0.0", 0)
    ledger.finish_sample(episode("0.0"))
    ledger.close()
    finished = FinishedSamples(run)
    assert finished.check() == []
    (tmp_path / "ledger.sqlite").unlink()
    Ledger(tmp_path / "ledger.sqlite").close()
    assert finished.check() == ["sample 0.0 was finished and is lost"]


def test_a_look_recovers_nothing_that_a_killed_run_has_left_to_recover(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITES_AND_DIES], cwd=tmp_path, check=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}
    finished = FinishedSamples(ChaosRun(tmp_path, []))
    assert finished.check() == [] and len(finished) == 1
    assert {name: (tmp_path / name).read_bytes() for name in before} == before and "ledger.sqlite-wal" in before


def test_what_a_stage_still_has_of_a_run_and_what_is_left_of_a_stage_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(make_run(tmp_path / "run"), RunPlatform(find_leftovers=lambda: ["actor a is left"])) == [
        "actor a is left"
    ]
    monkeypatch.setattr(fault_checks, "PLATFORM_EXIT_TIMEOUT_S", 0.05)
    stage = RunPlatform(mark=tmp_path.name)
    with subprocess.Popen([sys.executable, "-c", "input()"], env={STAGE_MARK: stage.mark}, stdin=-1) as process:
        assert f"process {process.pid} of the platform is left" in check_platform_removed(stage, list_shared_segments())
    assert stage.list_leftover_processes() == []


def test_a_node_is_lost_with_all_its_processes() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=-1, stdout=-1) as process:
        assert process.stdout and process.stdout.readline()
        (grandchild,) = find_descendants(process.pid)
        assert grandchild in find_descendants(os.getpid()) and process.pid in find_descendants(os.getpid())


def test_a_process_that_is_left_is_found_whoever_its_parent_is_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_checks, "EXIT_TIMEOUT_S", 0.05)
    run = make_run(tmp_path / "run")
    grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", grandchild], env={RUN_MARK: run.mark}, check=True)
    deadline = time.monotonic() + 10
    while not run.list_processes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pid,) = run.list_processes()
    assert f"process {pid} is left" in problems(run)
    while run.list_processes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
