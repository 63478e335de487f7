"""Roles with devices of their own are processes: a critic and two copies of the reference are killed and come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.runs.factory import Runs, audit, count, events, parts

ROLES: dict[str, Any] = {
    "processes": True,
    "max_steps": 10,
    "save_steps": 1,
    "save_total_limit": 2,
    "adv_estimator": "gae",
    "rewards.arithmetic.reward_fn": "regex",
    "rewards.arithmetic.reward_args": "{pattern: '[a-m]'}",
    "use_kl_loss": True,
    "reliability.restart_backoff_s": 0,
    "actor_train.device_mapping": "[0]",
    "actor_infer.device_mapping": "[1]",
    "reference.device_mapping": "[2, 3]",
    "critic.device_mapping": "[4]",
}


def test_a_critic_and_references_with_devices_of_their_own_are_killed(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", **{key.replace(".", "__"): value for key, value in ROLES.items()})
    assert run.until(lambda: count(run.directory, "checkpoint") >= 2), run.text
    before = parts(run)
    assert {"trainer", "engine-0", "critic", "reference-0", "reference-1"} <= before.keys()
    os.kill(before["reference-1"], signal.SIGKILL)
    os.kill(before["critic"], signal.SIGKILL)
    assert run.end() == 0, run.text
    audit(run.directory)
    (ended,) = events(run.directory, "run.end")
    assert ended.data["trained"] == 10 and ended.data["finished"], run.text
    assert [event for event in events(run.directory, "up") if event.who == "trainer"], "trainer and critic came back"
    steps = [event.data for event in events(run.directory, "step.end")]
    assert {step["trained"] for step in steps} == set(range(1, 11))
    assert any(step["train/value_loss"] > 0 for step in steps), "it has learnt something"
    names = {path.name for path in max((run.directory / "checkpoints").iterdir()).iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "critic.safetensors"} <= names
