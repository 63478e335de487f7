"""Runs whose world is somebody else's agent: they train, and nothing of it outlives them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.factory import Runs, audit, events, gone

pytest.importorskip("aiohttp")
pytest.importorskip("openai")

AGENT = Path(__file__).parents[2] / "examples" / "openai_agent.py"
FOREIGN: dict[str, Any] = {
    "num_return_sequences_in_group": None,
    "actor_train.data_args.file_name": None,
    "rewards.arithmetic.reward_fn": None,
    "rewards.arithmetic.tag_included": None,
    "rollout_batch_size": 4,
    "response_length": 48,
    "max_steps": 2,
    "train_env_manager.group_size": 2,
    "train_env_manager.tags": "[sums]",
    "custom_envs.sums.env_type": "openai_agent",
    "custom_envs.sums.max_tokens_per_step": 4,
}
SLEEPER = """
import os, sys, time

with open(sys.argv[1] + f".{os.getpid()}", "w"):
    time.sleep(600)
"""


def words(**more: Any) -> dict[str, Any]:
    return {**FOREIGN, **{f"custom_envs.sums.env_config.{key}": value for key, value in more.items()}}


def test_an_agent_of_somebody_else_is_trained(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", **words(agent=f"{AGENT}:solve"))
    assert run.end() == 0, run.text
    assert len(events(run.directory, "step.end")) == 2
    finished = events(run.directory, "sample.finish")
    assert {event.data["turns"] for event in finished} <= {1, 2}
    assert not events(run.directory, "error")
    audit(run.directory)


def test_mistakes_are_told_before_the_run(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", **words(agent=f"{AGENT}:solve"), **{"custom_envs.sums.history": False})
    assert run.end() == 2
    assert "sees to its history itself" in run.text and "Traceback" not in run.text


def test_programs_of_a_killed_run_are_gone(runs: Runs, tmp_path: Path) -> None:
    program, mark = tmp_path / "sleeper.py", tmp_path / "alive"
    program.write_text(SLEEPER)
    command = f"[{sys.executable}, -S, {program}, {mark}]"
    run = runs.train(tmp_path / "run", **words(command=command))

    def marks() -> list[int]:
        return [int(path.suffix[1:]) for path in tmp_path.glob("alive.*")]

    assert run.until(lambda: len(marks()) >= 2), run.text
    run.kill()
    assert gone(marks(), within_s=30.0)
