"""The starter project, completion in shells, costs that are assumed, and the table of exit codes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.cli import COMMANDS, EXIT_CODES, main
from headway.config import load_config
from headway.launch.training_session import prepare_run


def test_the_starter_project_can_be_trained_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sums"]) == 0
    assert "next: cd sums && headway train run.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "sums")
    prepared = prepare_run(load_config("run.yaml", []))
    assert len(prepared.sources.train) == 80 and prepared.sources.validation is not None
    assert main(["init"]) == 2
    assert "holds train.jsonl, my_rewards.py, run.yaml already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, expected",
    [("headway tr", "train"), ("headway train max_st", "max_steps="), ("headway eval --ans", "--answers")],
)
def test_bash_completes_commands_options_and_keys(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = line.split()
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _headway; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [expected], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(f" {name}" in script for name in COMMANDS)
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n", "-c", script], timeout=30).returncode == 0


def test_assumed_costs_are_said_and_given_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["rollout_batch_size=2", "num_return_sequences_in_group=2", "simulation.response_tokens.mean=10"]
    out = ["--steps", "1", "--json", "--out", str(tmp_path / "out")]
    assert main(["simulate", *small, *out]) == 0
    assert "the costs of an engine and the trainer are assumed" in capsys.readouterr().err
    costs = tmp_path / "costs.yaml"
    costs.write_text("simulation: {engine: {step_s: 0.5}, trainer: {gpu_s_per_token: 0.1}}", encoding="utf-8")
    assert main(["simulate", *small, *out, "--costs", str(costs)]) == 0
    assert "assumed" not in capsys.readouterr().err


def test_exit_codes_are_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    text = page.read_text(encoding="utf-8")
    for line in EXIT_CODES.splitlines()[1:]:
        assert f"| {line.split()[0]} |" in text
