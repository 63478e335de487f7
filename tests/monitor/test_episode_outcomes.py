"""How episodes in environments went, from the events."""

from __future__ import annotations

import pytest

from headway.monitor.episode_outcomes import EpisodeOutcomes
from headway.monitor.live_display import format_step_line, format_validation_line
from headway.monitor.report_tables import make_summary_rows
from headway.monitor.run_report import RunMonitor, make_run_report
from headway.monitor.scalar_series import compute_scalars
from tests.monitor.factory import ev

EVENTS = [
    ev(0, "validate.end", "validate", trained=0, reward=0.0, samples=2, success=0.0, turns=6.0, invalid=0.9),
    ev(
        1, "sample.finish", "generate", sample="0.0", actions=4, oldest=0, newest=0, success=1.0, turns=3.0, invalid=0.0
    ),
    ev(
        1, "sample.finish", "generate", sample="0.1", actions=4, oldest=0, newest=0, success=0.0, turns=5.0, invalid=2.0
    ),
    ev(
        1,
        "sample.finish",
        "validate",
        sample="v0.0",
        actions=4,
        oldest=0,
        newest=0,
        success=1.0,
        turns=9.0,
        invalid=9.0,
    ),
    ev(2, "step.begin", "train", trained=0, groups=1),
    ev(2, "group.train", "train", group=0, trained=0, oldest=0, in_flight=0, in_queue=0, samples=2, actions=8),
    ev(3, "step.end", "train", trained=1, groups=1, samples=2, actions=8, reward=0.5),
    ev(4, "validate.end", "validate", trained=1, reward=1.0, samples=2, success=0.5, turns=4.0, invalid=0.1),
]


def test_every_episode_that_ends_counts_and_those_of_validation_apart() -> None:
    report = make_run_report(EVENTS)
    assert report.episodes == (EpisodeOutcomes(trained=1, success=0.5, turns=4.0, invalid=0.25),)
    assert [one.success for one in report.held_out_episodes] == [0.0, 0.5]
    (row,) = [row for row in make_summary_rows(report) if row.name == "held-out success"]
    assert row.value == "0.0% → 50.0%" and row.note == "4.00 turns, 10.0% of them invalid (90.0% before)"


def test_trackers_and_the_log_are_told() -> None:
    points = {(point.step, "episode/turns" in point.values): point.values for point in compute_scalars(EVENTS)}
    assert points[1, True]["episode/success"] == 0.5 and points[1, True]["episode/invalid"] == 0.25
    assert points[0, False]["held_out/success"] == 0.0 and points[1, False]["held_out/turns"] == 4.0
    monitor = RunMonitor()
    for event in EVENTS:
        monitor(event)
    assert "reward 0.500, success 0.500, invalid 0.250, " in format_step_line(monitor)
    line = format_validation_line(monitor.incidents.validations[-1], monitor.episodes.validations)
    assert line.endswith("held-out after step 1: 1.00, success 0.500, invalid 0.100 (2)")


def test_runs_without_environments_say_nothing_about_episodes() -> None:
    plain = [ev(1, "sample.finish", "generate", sample="0.0", actions=4, oldest=0, newest=0), *EVENTS[4:7]]
    report = make_run_report(plain)
    assert report.episodes == () and "success" not in {row.name for row in make_summary_rows(report)}
    assert not any(name.startswith("episode/") for point in compute_scalars(plain) for name in point.values)
    assert pytest.approx(0.5) == report.throughput.steps[0].reward
