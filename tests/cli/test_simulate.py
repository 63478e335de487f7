"""`headway simulate`: what it prints, what it leaves behind, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.monitor.event_log import read_events
from headway.monitor.run_report import make_run_report
from tests.cli.factory import EXAMPLES, TINY


def test_it_prints_the_report_and_the_paths_of_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *TINY, "--steps", "5", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for expected in ("seconds per step", "Roles", "Lag of trained samples", "timeline.html", "trace.json"):
        assert expected in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        "timeline.html",
        "trace.json",
        "events.jsonl",
        "origins.json",
        "report.json",
    }
    assert (tmp_path / "timeline.html").read_text(encoding="utf-8").startswith("<!")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_json_prints_the_report_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TINY, "--steps", "5", "--json", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    summary = {"trained": 5, "finished": True, "reason": "", "restarts": 0, "rewards": {}, "held_out": {}}
    assert report["summary"] == summary
    assert report["lag"]["max"] <= 2


def test_the_event_log_gives_the_same_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TINY, "--steps", "5", "--json", "--out", str(tmp_path)]) == 0
    with (tmp_path / "events.jsonl").open(encoding="utf-8") as log:
        again = make_run_report(read_events(log), warmup_steps=3)
    printed = json.loads(capsys.readouterr().out)
    assert again.ends.trained == printed["ends"]["trained"]
    assert again.throughput.step_mean_s == pytest.approx(printed["throughput"]["step_mean_s"], abs=1e-5)


def test_another_seed_gives_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = []
    for seed in ("3", "4"):
        assert main(["simulate", *TINY, "--steps", "2", "--seed", seed, "--json", "--out", str(tmp_path / seed)]) == 0
        logs.append((tmp_path / seed / "events.jsonl").read_text(encoding="utf-8"))
    assert logs[0] != logs[1]


def test_a_synchronous_twin_takes_turns_and_has_no_lag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_pool = ("async_generation_ratio=0", "hybrid_engine=true", "actor_infer.device_mapping=list(range(0,2))")
    assert main(["simulate", *TINY, *one_pool, "--steps", "3", "--json", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["lag"]["max"] == 0


def test_a_run_that_ends_early_says_why_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forever = "simulation.faults=[{kind: crash, target: trainer, at_s: 1, for_s: 1000000}]"
    assert main(["simulate", *TINY, forever, "--steps", "3", "--json", "--out", str(tmp_path)]) == 1
    assert "ended early after step 0" in capsys.readouterr().err


def test_the_bad_day_is_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = str(EXAMPLES / "simulate_faults.yaml")
    assert main(["simulate", faults, "--json", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["restarts"] == 1  # the trainer was lost once
    assert report["faults"]["down"] >= 9  # one engine, then a node of eight
    assert report["faults"]["retry"] >= 1  # the corrupted bucket
    assert report["lag"]["max"] <= 2
    ends = report["ends"]
    assert ends["trained"] == 12 * 32 * 4
    assert ends["started"] == ends["trained"] + ends["dropped"] + ends["saved"]


def test_measured_phases_and_lengths_set_the_costs_and_are_printed_as_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 120 90\n900 800 1000\n300 350 280\n", encoding="utf-8")
    measured = ["--calibrate", "gen=20,update=8,sync=1", "--lengths", str(lengths)]
    assert main(["simulate", *TINY, "--steps", "3", "--json", "--out", str(tmp_path / "out"), *measured]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["phases"]["sync_s"] == pytest.approx(1.0)
    said = dict(line.split("=", 1) for line in printed.err.splitlines() if line.startswith("simulation."))
    assert said["simulation.response_tokens.file"] == str(lengths)
    assert float(said["simulation.response_correlation"]) > 0.9
    assert float(said["simulation.engine.step_s"]) > 0 and said["simulation.weights.send_s"] == "1.0"
    assert main(["simulate", *TINY, "--calibrate", "speed=3"]) == 2
    assert "--calibrate" in capsys.readouterr().err
