"""Training from Python: the page's own example, and what is refused."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import headway
from headway.errors import ConfigError
from headway.models.tiny_model import make_tiny_model
from tests.cli.factory import EXAMPLES
from tests.runs.factory import Runs

START = (EXAMPLES.parent / "docs" / "start.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", START, re.DOTALL)[number]


def test_the_run_of_ones_own_goes_on_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the page, with fewer steps of an untaught model, in threads; then twice as many, from its directory."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", steps=20)
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(5)]
    Path("train.jsonl").write_text("".join(rows), encoding="utf-8")
    small = {"pretrain": "model", "max_steps": 1, "processes": False, "track_with": [], "filter_zero_variance": False}
    Path("run.yaml").write_text(yaml.safe_dump(yaml.safe_load(block("yaml")) | small), encoding="utf-8")
    script = ModuleType("script_of_ones_own")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    exec(compile(block("python", 1), "start.md", "exec"), script.__dict__)
    assert (script.summary.trained, script.summary.finished) == (1, True)
    assert "script_of_ones_own:closeness" in Path("runs/python/config.yaml").read_text(encoding="utf-8")
    more: Any = headway.train("runs/python", {"max_steps": 2})
    assert (more.trained, more.finished, sorted(more.rewards)) == (2, True, [1, 2])
    assert headway.train("runs/python").trained == 2, "there is nothing left to do"


def test_a_function_without_a_name_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine.*has no name that it could be found by again"):
        headway.train({}, rewards={"mine": lambda text, row: 1.0})


def test_a_notebook_simulates_beside_its_loop() -> None:
    async def notebook() -> int:
        small = {"rollout_batch_size": 2, "num_return_sequences_in_group": 2, "simulation.response_tokens.mean": 10}
        return headway.simulate(small, steps=1).summary.trained

    assert asyncio.run(notebook()) == 1


def test_where_a_loop_runs_it_has_to_be_awaited() -> None:
    async def notebook() -> None:
        headway.train({})

    with pytest.raises(RuntimeError, match=r"await headway\.train_async"):
        asyncio.run(notebook())
    with pytest.raises(ConfigError, match="pretrain"):
        asyncio.run(headway.train_async({}))


SCRIPT = """
import headway


def closeness(text, row):
    return float(len(text))


summary = headway.train("run.yaml", {"output_dir": "run"}, rewards={"mine": closeness})
print("REWARDS", sorted(summary.rewards))
"""


def test_a_run_of_a_script_goes_on_and_is_judged_by_commands(runs: Runs, tmp_path: Path) -> None:
    """The script has no guard: a command imports it for the reward, and does not start it again."""
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    small = {"pretrain": str(runs.model), "max_steps": 1, "processes": False, "filter_zero_variance": False}
    small |= {"track_with": [], "rollout_batch_size": 4, "num_return_sequences_in_group": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(block("yaml")) | small), encoding="utf-8")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert "REWARDS [1]" in done.stdout, done.stderr
    assert f"{tmp_path}/script.py:closeness" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    again = runs.start(tmp_path / "run", "train", "run", "max_steps=2")
    assert again.end() == 0 and "going on from step 1" in again.text, again.text
    judged = runs.start(tmp_path / "run", "eval", "run", "--limit", "2", "--json")
    assert judged.end() == 0 and '"failed": 0' in judged.text and "REWARDS" not in judged.text, judged.text
