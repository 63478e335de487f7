"""Image runs that were kept are what they were, and their picture shows all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from benchmarks.image_learning import read_curves, wait_for_child
from benchmarks.pictures.reward_curves import draw_reward_curves
from benchmarks.pictures.saved_runs import SavedRuns, load_saved_runs

from headway.types import Image

_SVG = "{http://www.w3.org/2000/svg}"


def picture(shade: int) -> Image:
    return Image(height=2, width=3, pixels=bytes([shade]) * 18)


def cell(alpha: float, seed: int) -> dict[str, object]:
    return {"alpha": alpha, "seed": seed, "reward": [0.6, 0.7], "held_out": [[0, 0.55], [2, 0.8]]}


def test_what_was_kept_comes_back_in_order_and_without_pictures_where_a_run_failed(tmp_path: Path) -> None:
    kept = SavedRuns(
        strings=["12", "34"], before=[picture(1), picture(2)], machine="here", read_before={"ppocr": [0.5, 0.1]}
    )
    kept.add(cell(1.0, 2), [picture(5), picture(6)])
    kept.add({"alpha": 0.0, "seed": 3, "failed": "no room"}, [])
    kept.add(cell(1.0, 1), [picture(3), picture(4)])
    kept.save(tmp_path / "runs.npz")
    found = load_saved_runs(tmp_path / "runs.npz")
    assert found == kept
    assert [(one["alpha"], one["seed"]) for one in found.cells] == [(0.0, 3), (1.0, 1), (1.0, 2)]
    assert found.after == [[], [picture(3), picture(4)], [picture(5), picture(6)]]
    assert [file.name for file in tmp_path.iterdir()] == ["runs.npz"]


def test_curves_are_drawn_one_for_each_run_in_the_colour_of_its_lag() -> None:
    drawn = ElementTree.fromstring(
        draw_reward_curves([cell(0.0, 1), cell(0.0, 2), cell(1.0, 1), {"alpha": 1.0, "seed": 9}])
    )
    lines = [line.attrib["stroke"] for line in drawn.iter(f"{_SVG}polyline")]
    assert len(lines) == 3 and lines[0] == lines[1] != lines[2]
    assert len(list(drawn.iter(f"{_SVG}circle"))) == 6


def test_curves_count_what_was_dropped_before_each_step(tmp_path: Path) -> None:
    measures = {"train/clip_fraction": 0.25, "train/lag_mean": 1.0, "train/ratio_max": 1.5}
    events = [
        [1000, "validate.end", "validate", {"trained": 0, "reward": 0.5}],
        [1500, "sample.end", "reward", {"sample": "a", "end": "dropped", "reason": "zero_variance"}],
        [1600, "sample.end", "train", {"sample": "b", "end": "trained"}],
        [2_000_000, "step.end", "train", {"trained": 1, "reward": 0.75, **measures}],
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    found = read_curves(tmp_path)
    assert found["held_out"] == [[0, 0.5]] and found["reward"] == [0.75] and found["dropped"] == [1]
    assert found["end_s"] == [2.0] and found["clip_fraction"] == [0.25]


def test_a_run_that_takes_too_long_is_interrupted() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _, stopped = wait_for_child(child, 0.01)
    assert stopped and child.returncode
