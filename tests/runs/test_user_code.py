"""Real runs with rewards of users that misbehave: nothing is lost, and the run goes on or says why it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs.factory import Runs, audit, events, rows

MIXED = """
import os, sys, time, zlib
from pathlib import Path

def misbehave(text):
    what = zlib.crc32(text.encode()) % 12
    if what == 0:
        os._exit(7)
    if what == 1:
        sys.exit("enough")
    if what == 2:
        raise KeyboardInterrupt
    if what == 3:
        time.sleep(3600)
    if what == 4:
        return None
    if what == 5:
        os.chdir("/")
    print("judged", text)
    return float(what % 2) + float(Path("bonus.txt").read_text())

def plain(text, data):
    return misbehave(text)

async def coroutine(text, data):
    return misbehave(text)

async def blocking(text, data):
    time.sleep(3600)
"""


def train(runs: Runs, tmp_path: Path, function: str, **options: Any) -> Any:
    (tmp_path / "mine.py").write_text(MIXED)
    (tmp_path / "bonus.txt").write_text("0")
    own = {"rewards.arithmetic.reward_fn": f"mine.py:{function}", "reliability.reward_timeout_s": 1, "processes": True}
    return runs.train(tmp_path / "run", **{**own, "output_dir": "run", **options})


@pytest.mark.parametrize("function", ["plain", "coroutine"])
def test_a_run_survives_a_reward_that_does_everything_wrong(runs: Runs, tmp_path: Path, function: str) -> None:
    run = train(runs, tmp_path, function, **{"reliability.sample_retries": 1, "max_steps": 4})
    assert run.end() == 0, run.text
    assert "Traceback" not in run.text, "it has a log of its own"
    assert not any(line.startswith("judged") for line in run.text.splitlines()), "what it prints goes there"
    said = "\n".join(str(event.data["message"]) for event in events(run.directory, "error"))
    assert all(f"mine.py:{function}" in line for line in said.splitlines() if line.startswith("rewards.arithmetic"))
    (log,) = (run.directory / "logs").glob("reward-*.log")
    assert "judged" in log.read_text()
    ((failed,),) = rows(run.directory, "SELECT count(*) FROM samples WHERE reason = 'reward_failed'")
    assert failed
    audit(run.directory)


def test_a_run_whose_reward_blocks_every_time_ends_and_names_it(runs: Runs, tmp_path: Path) -> None:
    run = train(runs, tmp_path, "blocking", **{"reliability.sample_retries": 0})
    assert run.end() == 1, run.text
    (ending,) = [line for line in run.text.splitlines() if line.startswith("ended early after step 0")]
    assert "mine.py:blocking: no verdict after 1 s: it blocks its process in blocking at" in ending
    assert "Traceback" not in run.text
    audit(run.directory)
