"""The door: exit codes, errors as text, and the same bytes for the same seed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway import __version__
from headway.cli import main, simulate_command
from tests.cli.factory import EXAMPLES, SMALL


def headway(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "headway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"headway {__version__}\n"


@pytest.mark.parametrize("command", ["simulate", "plan --gpus 4"])
def test_a_wrong_configuration_is_said_on_standard_error_without_a_traceback(command: str) -> None:
    name, *options = command.split()
    done = headway(name, SMALL, "async_generation_ratoi=2", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "async_generation_ratoi" in done.stderr and "async_generation_ratio" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_an_output_directory_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["simulate", SMALL, "--out", str(tmp_path / "file" / "below")]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_full_disk_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "events.jsonl"))

    def write(args: object) -> int:
        raise full

    monkeypatch.setattr(simulate_command, "run_command", write)
    assert main(["simulate", SMALL]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'events.jsonl'}: No space left on device\n"
    full.errno = errno.EBADF
    with pytest.raises(OSError):
        main(["simulate", SMALL])


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["simulate", SMALL, "--stesp", "3"])
    assert done.value.code == 2
    assert "--stesp" in capsys.readouterr().err


def test_overrides_may_stand_behind_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", SMALL, "--steps", "1", "rollout_batch_size=2", "--out", str(tmp_path), "--json"]) == 0
    assert '"samples": 16' in capsys.readouterr().out


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_command, "run_scenario", interrupted)
    assert main(["simulate", SMALL, "--json", "--out", str(tmp_path)]) == 130


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_is_a_configuration_that_can_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(EXAMPLES / name)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_the_same_seed_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    arguments = ("simulate", str(EXAMPLES / "simulate_faults.yaml"), "--steps", "8", "--json", "--out")
    runs = [headway(*arguments, str(tmp_path / seed), hash_seed=seed) for seed in ("1", "20")]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    for name in ("events.jsonl", "report.json", "trace.json", "timeline.html"):
        first, second = ((tmp_path / seed / name).read_bytes() for seed in ("1", "20"))
        assert first and first == second, name


@pytest.mark.parametrize("command", ["train", "eval", "config", "cluster", "simulate"])
def test_the_help_of_a_command_shows_how_it_is_called(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"\n    headway {command} " in capsys.readouterr().out
