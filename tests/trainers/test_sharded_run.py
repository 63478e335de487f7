"""`headway train` with two ranks, one of which is killed or stopped on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.runs.factory import Runs, audit, count, events, hold_after, parts

TWO_RANKS = {
    "processes": True,
    "max_steps": 4,
    "save_steps": 2,
    "save_total_limit": 1,
    "reliability.restart_backoff_s": 0,
    "reliability.rank_timeout_s": 4,
    "actor_train.device_mapping": "[0,1]",
    "actor_infer.device_mapping": "[2]",
    "actor_train.training_args.per_device_train_batch_size": 2,
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_survives_the_loss_of_a_rank(runs: Runs, tmp_path: Path, number: signal.Signals) -> None:
    held, opened = hold_after(2, tmp_path)
    run = runs.train(tmp_path / "run", **{key.replace(".", "__"): value for key, value in TWO_RANKS.items()}, **held)
    assert run.until(lambda: count(run.directory, "checkpoint") >= 1), run.text
    before = parts(run)
    assert {"trainer-0", "trainer-1", "engine-0"} <= before.keys()
    os.kill(before["trainer-1"], number)
    opened.touch()
    assert run.end() == 0, run.text
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "which is stopped) in phase"
    messages = [str(event.data["message"]) for event in events(run.directory, "error")]
    assert any("trainer/1" in message and how in message for message in messages), messages
    audit(run.directory)
    ups = [event for event in events(run.directory, "up") if event.who == "trainer"]
    assert len(ups) >= 1, "the trainer came back"
    (ended,) = events(run.directory, "run.end")
    assert ended.data["trained"] == 4 and ended.data["finished"]
    (newest,) = (run.directory / "checkpoints").iterdir()
    assert runs.template.call("tests.runs.factory:check_checkpoint", str(newest)) == 0
    assert not list(newest.glob("pieces")) and json.loads((newest / "trainer.json").read_text())["version"] == 4
