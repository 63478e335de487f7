"""The scaling benchmark: its quick part holds, and its own bookkeeping does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.scaling.calibration import THINK
from benchmarks.scaling.cells import Cell
from benchmarks.scaling.report import summary
from benchmarks.scaling.world import PromptLengths

from headway.types import Task

ROOT = Path(__file__).parents[2]


def cell(simulated: float, *, checked: bool = True) -> Cell:
    return Cell(table="t", row="r", column="c", published=100.0, simulated=simulated, checked=checked)


def test_the_resource_split_is_reproduced() -> None:
    command = [sys.executable, "benchmarks/scaling.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 cells" in done.stdout


def test_a_checked_cell_more_than_15_percent_off_fails() -> None:
    assert not cell(114.0).failed
    assert cell(116.0).failed
    assert not cell(116.0, checked=False).failed
    assert summary([cell(100.0), cell(50.0)]) == "2 cells, 1 within 15 %, 0 on the list, 1 failed"


def test_answers_to_a_prompt_are_long_or_short_together() -> None:
    assert THINK.lengths is not None
    environments = PromptLengths(THINK.lengths, THINK.simulation, seed=0)
    groups = [[environments(Task(position=n, prompt=()))._length for _ in range(8)] for n in range(200)]
    means = [sum(group) / len(group) for group in groups]
    overall = sum(means) / len(means)
    between = sum((mean - overall) ** 2 for mean in means) / len(means)
    within = sum((length - mean) ** 2 for group, mean in zip(groups, means, strict=True) for length in group) / 1600
    assert between > within
    assert max(max(group) for group in groups) <= THINK.lengths.longest
