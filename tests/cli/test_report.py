"""`headway report`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main
from tests.cli.factory import TINY
from tests.monitor.factory import training_run
from tests.monitor.test_report_page import CONFIG, written


def test_it_prints_the_table_and_leaves_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "one", training_run(steps=6), CONFIG)
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    for expected in ("one  finished  model tiny-model", "held-out reward", "trainer waited", "report.html"):
        assert expected in printed
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_prints_the_report_and_writes_only_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "one", training_run(steps=6))
    assert main(["report", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["state"] == {"is": "done", "said": "finished"}
    assert report["validations"][-1]["trained"] == 5
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "--json", "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(written(tmp_path / name, training_run(steps=4))) for name in ("a", "b", "c")]
    assert main(["report", runs[0], "--compare", *runs[1:], "--out", str(tmp_path / "all.html")]) == 0
    assert capsys.readouterr().out.count("training reward") == 3
    assert main(["report", runs[0], "--compare", runs[1], "--json"]) == 0
    assert [report["name"] for report in json.loads(capsys.readouterr().out)] == ["a", "b"]


def test_a_simulated_run_can_be_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TINY, "--steps", "3", "--json", "--out", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert "3 in" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run to report on" in capsys.readouterr().err
    run = written(tmp_path / "one", training_run(steps=1))
    assert main(["report", str(run), "seed=3"]) == 2
    assert "takes no overrides" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(run)]) == 2
    assert "--out" in capsys.readouterr().err
