"""The report as a tree, as JSON and as text."""

from __future__ import annotations

import io
import json

import pytest

from headway.monitor.event_log import encode_event, read_events
from headway.monitor.report_tables import format_duration, format_number, format_report_text
from headway.monitor.run_report import RunMonitor, make_run_report
from tests.monitor.factory import ev, toy_run


def test_equal_logs_give_equal_json() -> None:
    texts = [json.dumps(make_run_report(toy_run(seed=3)).to_dict(), allow_nan=False) for _ in range(2)]
    assert texts[0] == texts[1]
    assert list(json.loads(texts[0]))[:4] == ["duration_s", "events", "window", "throughput"]


def test_json_has_the_derived_shares_and_no_nan() -> None:
    events = [
        ev(0, "state", "train", old="idle", new="running"),
        ev(1, "validate.end", "validate", trained=1, reward=float("nan"), samples=3),
    ]
    plain = make_run_report(events).to_dict()
    assert plain["usage"]["roles"][0]["bubble"] == 0.0
    assert plain["validations"][0]["reward"] is None


def test_a_toy_run_balances() -> None:
    report = make_run_report(toy_run())
    assert report.lag.samples == report.ends.trained == report.throughput.samples
    assert sum(report.ends.drops.values()) == report.ends.dropped
    assert report.faults == {"error": 1, "restart": 1}


def test_a_report_can_be_asked_for_at_any_time_without_changing_the_end() -> None:
    curious, patient = RunMonitor(), RunMonitor()
    for event in toy_run(steps=4):
        curious(event)
        curious.report()
        patient(event)
    left, right = curious.report().to_dict(), patient.report().to_dict()
    assert json.dumps(left) == json.dumps(right)


def test_an_empty_log_has_a_report() -> None:
    assert "duration" in format_report_text(make_run_report([]))


def test_the_text_fits_a_hundred_columns_and_has_no_colour() -> None:
    text = format_report_text(make_run_report(toy_run(engines=40)))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "…" not in text
    assert "all 40 engines" in text
    assert "zero_variance" in text


def test_markup_in_names_is_not_interpreted() -> None:
    text = format_report_text(make_run_report([ev(0, "state", "[red]x[/red]", old="idle", new="running")]))
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12345, "12,345"), (0.0, "0"), (0.5, "0.500"), (12.345, "12.35"), (1e-4, "1.0e-04")]
)
def test_numbers_are_rounded_for_people(value: float, text: str) -> None:
    assert format_number(value) == text


def test_durations_are_written_for_people() -> None:
    assert [format_duration(4.2), format_duration(200), format_duration(7500)] == ["4.20 s", "3 min 20 s", "2 h 05 min"]


def test_a_torn_last_line_ends_a_log_and_a_torn_middle_is_left_out_and_told() -> None:
    lines = [encode_event(event) + "\n" for event in toy_run(steps=1)[:5]]
    assert len(list(read_events(io.StringIO("".join(lines) + lines[0][:9])))) == 5
    _, damage, second = read_events([lines[0], "[1,2", lines[1]])
    assert (damage.kind, damage.time_s) == ("error", second.time_s)
    assert damage.data["message"] == "line 2 is damaged and left out"


def test_a_tear_far_into_a_log_is_found_with_its_line() -> None:
    lines = [encode_event(ev(n, "state", "train", old="idle", new="waiting")) + "\n" for n in range(2000)]
    assert [event.time_s for event in read_events([*lines, "\n", "[1,"])] == list(range(2000))
    found = list(read_events([*lines[:1024], "[1,", "\0\0\n", *lines[1024:]]))
    assert found[1024].data["message"] == "2 lines from line 1025 on are damaged and left out" and len(found) == 2001
    found = list(read_events([*lines[:2], lines[2].strip() + "," + lines[3], *lines[4:]]))
    assert found[2].data["message"] == "line 3 is damaged and left out" and len(found) == 1999
