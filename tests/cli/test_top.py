"""`headway top`: a run that somebody else started, in a terminal of any size and in a pipe."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from headway.cli import main
from headway.monitor.event_files import read_event_log
from headway.monitor.live_display import LiveDisplay
from headway.monitor.run_report import RunMonitor
from headway.monitor.run_status import EngineStatus, RunStatus, StageStatus, WaitStatus
from headway.runs.run_condition import write_status
from tests.dashboard.factory import make_simulated_run

WAITS = (WaitStatus(on="engine/0", what="request 49.0/0, 3 tokens so far, the oldest of 8 " * 3, seconds=75.0),)
STAGES = tuple(
    StageStatus(role=f"stage_number_{n}", state="waiting", seconds=75.0, queue=16, waits=WAITS) for n in range(14)
)
ENGINES = tuple(EngineStatus(name=f"engine/{n}", health="up", version=n, requests=8) for n in range(20))
STATUS = RunStatus(
    phase="ended", finished=True, steps=10, trained=10, stages=STAGES, engines=ENGINES, usage={"memory/host_gb": 4.0}
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 24), (140, 50)])
def test_the_panel_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    make_simulated_run(tmp_path / "run")
    monitor = RunMonitor()
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    display = LiveDisplay(monitor, console, steps=10)
    for event in read_event_log(tmp_path / "run"):
        monitor(event)
    display.show(STATUS)
    console.print(display.panel(600.0))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().rstrip("\n").splitlines()
    assert len(lines) <= height - 1 and max(map(len, lines)) <= width
    assert lines[0].startswith("step 10/10") and "reward" in lines[1]
    assert sum("stage_number" in line for line in lines) >= 8


def test_a_run_of_somebody_else_is_shown_by_its_index_and_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    make_simulated_run(run)
    write_status(run, STATUS)
    capsys.readouterr()
    assert main(["top", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "all steps are done" in shown and "step 10/10" in shown and "stage_number_0" in shown
    assert main(["top", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["top", str(tmp_path / "empty")]) == 2


def test_a_run_at_work_is_followed_in_plain_lines_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    make_simulated_run(run)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    ends = [place for place, line in enumerate(lines) if '"step.end"' in line]
    (run / "events.jsonl").write_text("".join(lines[: ends[3] + 1]))
    status = {**json.loads(json.dumps(STATUS.to_json())), "phase": "training", "finished": None, "host": "elsewhere"}

    def put(phase: str) -> None:
        body = {**status, "phase": phase, "finished": phase == "ended" or None, "time_s": time.time()}
        (run / "status.json").write_text(json.dumps(body))

    put("training")
    capsys.readouterr()
    more = [ends[4], ends[5], ends[9]]

    def write_on(seconds: float) -> None:
        """Let the run write on, in place of waiting for it."""
        (run / "events.jsonl").write_text("".join(lines[: more.pop(0) + 1]))
        put("training" if more else "ended")

    monkeypatch.setattr("headway.cli.top_command.time.sleep", write_on)
    assert main(["top", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    steps = [line.partition("step ")[2].partition(":")[0] for line in shown if "] step " in line]
    assert steps == ["4", "5", "6", "7", "8", "9", "10"]
    assert "all steps are done" in shown[-1]
