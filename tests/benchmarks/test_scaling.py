"""The scaling benchmark: its quick part holds, and its own bookkeeping does what it says."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import islice

import pytest
from benchmarks.scaling import training_tables
from benchmarks.scaling.__main__ import TABLES, main
from benchmarks.scaling.calibration import THINK
from benchmarks.scaling.cells import Cell
from benchmarks.scaling.report import format_summary
from benchmarks.scaling.setups import PromptLengthEnvironments

from headway.types import Task


@pytest.fixture(autouse=True)
def rare_collections() -> Iterator[None]:
    """As in the benchmark, which makes millions of small objects; of this process afterwards as before."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    yield
    gc.set_threshold(*before)


def cell(simulated: float, *, checked: bool = True) -> Cell:
    return Cell(table="t", row="r", column="c", published=100.0, simulated=simulated, checked=checked)


@pytest.mark.soak
def test_the_resource_split_is_reproduced() -> None:
    """Up to the best split; `benchmarks/scaling.py --quick` has all of them."""
    cells = list(islice(training_tables.simulate_split(), 3))
    assert [one.row for one in cells] == ["sync", "8T32I", "16T24I"]
    assert format_summary(cells) == "3 cells, 3 within 15 %, 0 on the list, 0 failed"


@pytest.mark.parametrize(("simulated", "code"), [(100.0, 0), (50.0, 1)])
def test_the_exit_code_says_whether_a_cell_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], simulated: float, code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--quick"])
    monkeypatch.setitem(TABLES, "split", lambda: iter([cell(simulated)]))
    assert main() == code
    assert f"1 cells, {1 - code} within 15 %, 0 on the list, {code} failed" in capsys.readouterr().out


def test_a_checked_cell_more_than_15_percent_off_fails() -> None:
    assert not cell(114.0).failed
    assert cell(116.0).failed
    assert not cell(116.0, checked=False).failed
    assert format_summary([cell(100.0), cell(50.0)]) == "2 cells, 1 within 15 %, 0 on the list, 1 failed"


def test_answers_to_a_prompt_are_long_or_short_together() -> None:
    assert THINK.lengths is not None
    environments = PromptLengthEnvironments(THINK.lengths, THINK.simulation, seed=0)
    groups = [[environments(Task(position=n, prompt=()))._length for _ in range(8)] for n in range(200)]
    means = [sum(group) / len(group) for group in groups]
    overall = sum(means) / len(means)
    between = sum((mean - overall) ** 2 for mean in means) / len(means)
    within = sum((length - mean) ** 2 for group, mean in zip(groups, means, strict=True) for length in group) / 1600
    assert between > within
    assert max(max(group) for group in groups) <= THINK.lengths.longest
