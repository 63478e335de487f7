"""`headway status` of a run that somebody else started: at work, stopped, killed, ended, and none at all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from headway.cli import main
from headway.runs.run_condition import STATUS_FILE
from tests.runs.factory import Runs, count, gone, parts

STAGES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")


def ask(runs: Runs, tmp_path: Path, *words: str) -> tuple[int, str]:
    asked = runs.start(tmp_path / "asked", "status", *words)
    return asked.end(), asked.text


def test_a_run_says_what_each_stage_does_and_waits_for_until_it_is_killed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.train(tmp_path / "run", max_steps=5000, processes=True, track_with="[jsonl]")
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    code, said = ask(runs, tmp_path, str(run.directory))
    assert code == 0 and f"{run.directory}: at work; training, step " in said, said
    rows = {line.split()[1]: line for line in said.splitlines() if line and not line[0].isspace()}
    assert rows.keys() >= set(STAGES)
    assert any("waits for " in line for line in said.splitlines())
    assert "engine/0: up, version " in said and "memory in GB: controller " in said

    monkeypatch.chdir(tmp_path)
    assert main(["status", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["condition"] == "at work" and told["process"] == run.pid
    assert [stage["role"] for stage in told["stages"]][: len(STAGES)] == list(STAGES)
    assert all(stage["seconds"] >= 0 for stage in told["stages"])

    children = list(parts(run).values())
    run.kill()
    run.end()
    assert gone(children)
    code, said = ask(runs, tmp_path, str(run.directory))
    assert code == 1 and f"was killed, or its machine went down: process {run.pid} is gone" in said, said
    assert "last known state" in said and "generate" in said
    assert said.splitlines()[-1] == f"go on with: headway train {run.directory} --resume"

    (run.directory / STATUS_FILE).write_text('{"phase": "tra')
    code, said = ask(runs, tmp_path, str(run.directory))
    assert code == 1 and "by its event log" in said and "cannot be read" in said and "Traceback" not in said


def test_how_a_run_ended_is_told(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=2, track_with="[jsonl]")
    assert run.end() == 0, run.text
    code, said = ask(runs, tmp_path, str(run.directory))
    assert code == 0 and "all steps are done" in said
    assert "step 2 of 2, served 2" in said, "the last state, not one of before"
    curves = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    for name in ("memory/controller_gb", "memory/children_gb", "memory/host_gb", "lag/served_behind"):
        assert any(name in line for line in curves), name

    stopped = runs.train(tmp_path / "stopped", max_steps=5000)
    assert stopped.until(lambda: count(stopped.directory, "step.end") >= 1), stopped.text
    stopped.kill(signal.SIGINT)
    assert stopped.end() == 1
    code, said = ask(runs, tmp_path, str(stopped.directory))
    assert code == 1 and ", early: stopped by SIGINT" in said


def test_where_no_run_is_that_is_said(runs: Runs, tmp_path: Path) -> None:
    code, said = ask(runs, tmp_path, str(tmp_path / "nowhere"))
    assert code == 2 and "there is no such directory" in said
    (tmp_path / "empty").mkdir()
    code, said = ask(runs, tmp_path, str(tmp_path / "empty"))
    assert code == 2 and "no run has written its status there" in said


def test_a_run_whose_event_loop_is_blocked_names_the_culprit(runs: Runs, tmp_path: Path) -> None:
    blocking = """
import time
from headway.flow.stage import Stage, register_stage
from headway.types import SampleGroup

@register_stage("rock")
class Rock(Stage):
    consumes = produces = SampleGroup

    async def process(self, group):
        time.sleep(3600)
"""
    (tmp_path / "rock.py").write_text(blocking)
    own = {"plugins": f"[{tmp_path / 'rock.py'}]", "stages": "[{name: rock, after: rollout}]"}
    run = runs.train(tmp_path / "run", max_steps=5000, **own)
    try:
        told = run.directory / STATUS_FILE
        assert run.until(lambda: told.exists() and "event loop is blocked" in told.read_text()), run.text
        code, said = ask(runs, tmp_path, str(run.directory), "--timeout", "0.5")
        assert code == 1 and "does not answer" in said and "rock.py" in said, said
    finally:
        run.kill()
        run.end()


def test_a_run_whose_process_is_stopped_does_not_answer(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", max_steps=5000)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    run.kill(signal.SIGSTOP)
    try:
        code, said = ask(runs, tmp_path, str(run.directory), "--timeout", "1")
        assert code == 1 and "does not answer" in said and f"process {run.pid} is stopped" in said, said
    finally:
        run.kill(signal.SIGCONT)
        run.kill()
        run.end()
