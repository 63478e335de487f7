"""Started, dropped, trained: what the report says about them."""

from __future__ import annotations

from typing import Any

import pytest

from headway.monitor.event_log import LoggedEvent
from headway.monitor.report_tables import format_report_text
from headway.monitor.run_report import make_run_report
from headway.monitor.sample_bias import BiasSummary
from headway.monitor.scalar_series import compute_scalars
from tests.monitor.factory import ev, training_run


def steps(**metrics: float) -> list[LoggedEvent]:
    return [ev(n, "step.end", "train", trained=n, groups=1, samples=1, **metrics) for n in (1, 2, 3)]


def test_a_run_without_these_numbers_has_no_bias() -> None:
    assert make_run_report(steps()).bias is None


def test_the_report_has_the_means_of_the_run_and_a_sentence() -> None:
    numbers: dict[str, Any] = {"length/trained": 90.0, "length/started": 95.0, "length/dropped": 200.0}
    events = steps(**numbers, **{"bias/length": -0.1, "bias/reward": 0.03, "reward/dropped": 0.5})
    report = make_run_report(events)
    assert report.bias is not None
    assert (report.bias.length_trained, report.bias.length_dropped) == (90.0, 200.0)
    assert report.bias.length_started == pytest.approx(100.0), "over the whole run, in which it is a tenth less"
    text = format_report_text(report)
    assert "Started, dropped, trained" in text and "-10.0%" in text
    assert "trained samples are 10.0% shorter and 3.0% better rewarded than the samples that were started" in text


@pytest.mark.parametrize(("length", "reward", "told"), [(0.019, -0.019, False), (0.021, 0.0, True), (0.0, -0.03, True)])
def test_two_per_cent_are_worth_a_sentence(length: float, reward: float, told: bool) -> None:
    none = dict.fromkeys(("started", "dropped", "trained"))
    lengths, rewards = ({f"{name}_{key}": value for key, value in none.items()} for name in ("length", "reward"))
    summary = BiasSummary(**lengths, **rewards, length_bias=length, reward_bias=reward)
    assert bool(summary.describe()) is told


def test_the_numbers_are_curves() -> None:
    point = [point for point in compute_scalars(training_run(steps=3)) if "time/step_s" in point.values][-1]
    assert {"length/started", "length/dropped", "length/trained", "bias/length", "bias/reward"} <= point.values.keys()
