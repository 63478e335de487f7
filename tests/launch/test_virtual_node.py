"""The layout of a node on the CPU: two ranks and four engines on logical devices, one of each killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.factory import Runs

SIZES = "--shape tiny --device cpu --engines 4 --prompts 2 --group 2 --length 6 --steps 6 --no-single"
ROUNDING = 2e-3
"""Losses are differences of numbers near 1, in float32."""


def check_layout(layout: str, directory: str) -> None:
    """Run the layout, in a process whose children are forks."""
    from benchmarks.end_to_end import make_model
    from benchmarks.virtual_node import measure_layout, parse_arguments

    args, scratch = parse_arguments(SIZES.split()), Path(directory)
    result = measure_layout(args, layout, make_model(scratch / "model", args), scratch)
    assert result.unequal == [] and result.versions >= 7, "every engine has served every version"
    assert result.lost == [] and result.restarts == {"engine/1": 1, "trainer": 1}
    assert len(result.losses) == 6 and result.largest_difference < ROUNDING, "the losses of one process"
    slept = {"device turns: engines go to sleep", "optimizer: moments from the host and back"} <= result.spans_s.keys()
    assert slept is (layout == "hybrid"), "the timeline shows what it costs to share memory"


@pytest.mark.parametrize("layout", ["hybrid", "decoupled"])
def test_a_node_learns_what_one_process_learns_and_survives_kills(runs: Runs, tmp_path: Path, layout: str) -> None:
    assert runs.template.call("tests.launch.test_virtual_node:check_layout", layout, str(tmp_path)) == 0
