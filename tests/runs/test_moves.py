"""A run goes on wherever it is called from, and wherever its directory has been moved to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.runs.factory import SMALL, Runs, audit, events

ROWS = [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n), "domain": "addition"} for n in range(20)]


def relative_words() -> list[str]:
    """The overrides of a small run whose paths are all relative."""
    options = {
        **SMALL,
        "pretrain": "models/tiny",
        "output_dir": "runs/one",
        "checkpoint_dir": "runs/one/kept",
        "actor_train.data_args.file_name": "data/sums.jsonl",
        "rewards.arithmetic.reward_fn": "judge.py:judge",
        "max_steps": 2,
        "save_steps": 1,
    }
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]


def make_project(runs: Runs, project: Path) -> None:
    shutil.copytree(runs.model, project / "models" / "tiny")
    (project / "data").mkdir()
    (project / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (project / "judge.py").write_text("def judge(answer, expected, **_):\n    return float(len(answer) % 2)\n")


def steps(directory: Path) -> list[int]:
    return [event.data["trained"] for event in events(directory, "step.end")]


def test_a_run_with_relative_paths_is_called_from_elsewhere_renamed_and_moved(runs: Runs, tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    make_project(runs, project)
    elsewhere.mkdir()
    one, two, three = project / "runs" / "one", project / "runs" / "two", tmp_path / "archive" / "three"
    first = runs.start(tmp_path / "first", "train", *relative_words(), cwd=project)
    assert first.end() == 0, first.text

    second = runs.start(tmp_path / "second", "train", str(one), "max_steps=3", "--resume", cwd=elsewhere)
    assert second.end() == 0, second.text
    assert "going on from step 2" in second.text and steps(one) == [1, 2, 3]
    assert "max_steps: 2 → 3" in second.text and "pretrain: " not in second.text and "reward_fn: " not in second.text
    assert not list(elsewhere.iterdir()), "nothing is written where it was called from"

    one.rename(two)
    third = runs.start(tmp_path / "third", "train", "runs/two", "max_steps=4", "--resume", cwd=project)
    assert third.end() == 0, third.text
    assert steps(two) == [1, 2, 3, 4] and (two / "kept" / "step-00000004").is_dir() and not one.exists()

    three.parent.mkdir()
    shutil.move(two, three)
    fourth = runs.start(tmp_path / "fourth", "train", "../archive/three", "max_steps=5", "--resume", cwd=elsewhere)
    assert fourth.end() == 0, fourth.text
    assert steps(three) == [1, 2, 3, 4, 5] and (three / "kept" / "step-00000005").is_dir()
    assert not one.exists() and not two.exists() and not list(elsewhere.iterdir())
    audit(three)


def test_a_project_that_is_moved_as_a_whole_goes_on(runs: Runs, tmp_path: Path) -> None:
    make_project(runs, tmp_path / "project")
    first = runs.start(tmp_path / "first", "train", *relative_words(), cwd=tmp_path / "project")
    assert first.end() == 0, first.text
    moved = (tmp_path / "project").rename(tmp_path / "moved")
    second = runs.start(tmp_path / "second", "train", "runs/one", "max_steps=3", "--resume", cwd=moved)
    assert second.end() == 0, second.text
    assert steps(moved / "runs" / "one") == [1, 2, 3] and not (tmp_path / "project").exists()
