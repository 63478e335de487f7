"""The index of an event log: whoever opens a log by it knows what reading it tells, at any moment of the run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.cli.simulate_command import load_simulation, simulate_run
from headway.monitor import event_files
from headway.monitor.event_files import LOG_FILE, EventFileWriter, read_event_log
from headway.monitor.event_log import LoggedEvent, encode_event
from headway.monitor.events import RunBegin
from headway.monitor.log_follower import LogFollower, read_part_events
from headway.monitor.log_index import MOST_BINS, OccupancyBins, PartSummary
from headway.monitor.monitor_history import add_past_part
from headway.monitor.run_report import RunMonitor
from headway.monitor.scalar_series import ScalarMeter
from tests.cli.factory import TINY


@pytest.fixture(scope="module")
def logged() -> list[LoggedEvent]:
    """The events of a short simulated run."""
    _, resolved = load_simulation([*TINY, "async_generation_ratio=2"], steps=12)
    return simulate_run(resolved).events


def write_log(directory: Path, events: list[LoggedEvent]) -> None:
    with EventFileWriter(directory, on_failure=pytest.fail) as log:
        for event in events:
            log(event)


def read_all(follower: LogFollower) -> LogFollower:
    while follower.advance(1 << 13):
        pass
    return follower


def describe(follower: LogFollower) -> dict[str, Any]:
    """Everything that a log tells, however it is cut into parts."""
    parts = follower.all_parts()
    seconds: dict[str, float] = {}
    for part in parts:
        for key, values in part.series.items():
            seconds[key] = seconds.get(key, 0.0) + sum(values)
    return {
        "events": follower.events,
        "seconds": {key: value for key, value in seconds.items() if value > 0.1},
        "points": [(p.step, p.rewind) for part in parts for p in part.points],
        "values": {f"{n} {p.step}": value for part in parts for p in part.points for n, value in p.values.items()},
        "steps": [step[2] for part in parts for step in part.steps],
    }


def assert_equal(follower: LogFollower, other: Path | LogFollower) -> None:
    """Two logs tell the same, up to the digits that are kept."""
    first = describe(follower)
    second = describe(other if isinstance(other, LogFollower) else read_all(LogFollower(other)))
    for name in ("seconds", "values"):
        assert first.pop(name) == pytest.approx(second.pop(name), rel=1e-3, abs=1e-3)
    assert first == second


def test_an_index_tells_what_reading_the_log_tells(
    tmp_path: Path, logged: list[LoggedEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "_SMALLEST_STRETCH", 1 << 14)
    write_log(tmp_path, logged)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / LOG_FILE).write_text("".join(encode_event(event) + "\n" for event in logged))
    by_index = read_all(LogFollower(tmp_path))
    assert len(by_index.parts) > 3 and not by_index.indexer.part.events, "the run has written every index itself"
    assert_equal(by_index, whole)
    for index in (tmp_path / "event_index").iterdir():
        index.write_bytes(b"damaged")
    assert_equal(read_all(LogFollower(tmp_path)), whole)
    assert len(list((tmp_path / "event_index").iterdir())) == len(by_index.parts), "what was read has an index again"
    assert_equal(read_all(LogFollower(tmp_path)), whole)


def test_a_large_plain_log_is_cut_into_parts_that_the_next_reader_finds(
    tmp_path: Path, logged: list[LoggedEvent]
) -> None:
    (tmp_path / LOG_FILE).write_text("".join(encode_event(event) + "\n" for event in logged))
    first = read_all(LogFollower(tmp_path, part_bytes=1 << 14))
    assert len(first.parts) > 3
    read: list[LoggedEvent] = []
    second = read_all(LogFollower(tmp_path, part_bytes=1 << 14, on_event=read.append))
    assert_equal(second, first)
    assert len(read) == first.indexer.part.events, "only what has no index is read"
    times = [event.time_s for part in second.all_parts() for event in read_part_events(tmp_path, part)]
    assert times == pytest.approx([event.time_s for event in logged], abs=1e-6)


def test_a_reader_follows_a_run_through_moves_compression_and_a_kill(
    tmp_path: Path, logged: list[LoggedEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "_SMALLEST_STRETCH", 1 << 14)
    chance, follower = random.Random(5), LogFollower(tmp_path)
    half = len(logged) // 2
    log = EventFileWriter(tmp_path, on_failure=pytest.fail)
    log.__enter__()
    for place, event in enumerate(logged[:half]):
        log(event)
        if chance.random() < 0.01:
            log.flush()
            follower.advance(1 << chance.randrange(8, 20))
            assert follower.events <= place + 1
    log.flush()  # the process is killed here: nothing is closed
    resumed = [LoggedEvent(logged[half].time_s, RunBegin(who="run", resumed=True, trained=3))]
    write_log(tmp_path, [*resumed, *logged[half:]])
    read_all(follower)
    assert follower.events == len(logged) + 1
    assert_equal(follower, tmp_path)


def test_a_log_that_was_replaced_is_read_anew(tmp_path: Path, logged: list[LoggedEvent]) -> None:
    path = tmp_path / LOG_FILE
    path.write_text("".join(encode_event(event) + "\n" for event in logged))
    follower = read_all(LogFollower(tmp_path, part_bytes=1 << 14))
    before = follower.generation
    path.write_text("".join(encode_event(LoggedEvent(t + 1, event)) + "\n" for t, event in logged[: len(logged) // 3]))
    assert read_all(follower).events == len(logged) // 3 and follower.generation > before
    assert read_all(LogFollower(tmp_path)).events == len(logged) // 3, "the old index belongs to another log"


def test_torn_and_damaged_lines_stop_nobody(tmp_path: Path, logged: list[LoggedEvent]) -> None:
    lines = [encode_event(event) + "\n" for event in logged[:300]]
    lines[100] = "no event\n"
    (tmp_path / LOG_FILE).write_text("".join(lines) + '[12, "ste')
    follower = read_all(LogFollower(tmp_path))
    assert follower.events == 300 and not follower.advance()  # 299 and the report of the damage


def test_bins_keep_sums_while_they_grow() -> None:
    bins, chance, time_s, total = OccupancyBins(3.7), random.Random(1), 3.7, 0.0
    for _ in range(2000):
        until_s, amount = time_s + chance.expovariate(3.0), chance.randrange(5)
        bins.add("lane", time_s, until_s, amount)
        total += amount * (until_s - time_s)
        time_s = until_s
    assert len(bins.series["lane"]) == MOST_BINS and bins.width_s > 1.0
    assert sum(bins.series["lane"]) == pytest.approx(total, rel=1e-3)


def test_a_summary_survives_its_file_and_another_version_is_not_used(logged: list[LoggedEvent], tmp_path: Path) -> None:
    write_log(tmp_path, logged)
    part = read_all(LogFollower(tmp_path)).parts[0]
    data = part.to_json()
    again = PartSummary.from_json(data)
    assert again.series == part.series and again.state == part.state and len(again.points) == len(part.points)
    with pytest.raises(ValueError, match="another version"):
        PartSummary.from_json({**data, "index": 99})


def test_a_monitor_that_is_filled_by_an_index_shows_what_one_shows_that_saw_everything(
    tmp_path: Path, logged: list[LoggedEvent]
) -> None:
    write_log(tmp_path, logged)
    seen, filled = RunMonitor(), RunMonitor()
    for event in read_event_log(tmp_path):
        seen(event)
    for part in read_all(LogFollower(tmp_path)).parts:
        add_past_part(filled, part)
    assert [step.trained for step in filled.throughput.steps] == [step.trained for step in seen.throughput.steps]
    assert [s.reward for s in filled.throughput.steps] == pytest.approx(
        [s.reward for s in seen.throughput.steps], rel=1e-4
    )
    assert filled.lag.dropped == seen.lag.dropped
    assert filled.lag.versions.served == seen.lag.versions.served
    assert filled.clock.events == seen.clock.events


def test_a_meter_goes_on_from_its_state_after_a_step(logged: list[LoggedEvent]) -> None:
    whole, first = ScalarMeter(), ScalarMeter()
    points = [whole(event) for event in logged]
    cut = (
        next(place for place, event in enumerate(logged) if event.kind == "step.end" and event.data["trained"] == 5) + 1
    )
    for event in logged[:cut]:
        first(event)
    second = ScalarMeter.from_state(first.save_state())
    assert [second(event) for event in logged[cut:]] == points[cut:]
