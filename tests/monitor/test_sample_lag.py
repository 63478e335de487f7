"""Lag, the served version and the drops, against hand-made runs and for any run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitor.event_log import LoggedEvent
from headway.monitor.run_report import make_run_report
from headway.monitor.sample_lag import VersionTracker
from tests.monitor.factory import ev, in_order, step


def trained_group(time_s: float, trained: int, in_flight: int, in_queue: int, samples: int) -> LoggedEvent:
    oldest = trained - in_flight - in_queue
    return ev(
        time_s, "group.train", "train", group=int(time_s * 1000), trained=trained, oldest=oldest,
        in_flight=in_flight, in_queue=in_queue, samples=samples, actions=samples * 10,
    )  # fmt: skip


def test_the_histogram_counts_samples_and_splits_the_lag() -> None:
    events = [trained_group(1, 0, 0, 0, 4), trained_group(2, 3, 1, 2, 4), trained_group(3, 3, 1, 0, 8)]
    lag = make_run_report(events).lag
    assert [(b.lag, b.samples, b.in_flight, b.in_queue) for b in lag.histogram] == [
        (0, 4, 4, 12),
        (1, 8, 12, 0),
        (2, 0, 0, 4),
        (3, 4, 0, 0),
    ]
    assert lag.max == 3
    assert lag.mean == pytest.approx((4 * 3 + 8 * 1) / 16)
    assert lag.mean_in_flight == pytest.approx(12 / 16)
    assert lag.mean_in_queue == pytest.approx(8 / 16)


def test_means_leave_the_warm_up_out_and_maxima_do_not() -> None:
    events = in_order(
        [trained_group(1, 5, 5, 0, 2), trained_group(11, 6, 1, 0, 2)],
        step(0, 10, 6),
        step(10.5, 20, 7),
    )
    lag = make_run_report(events, warmup_steps=1).lag
    assert lag.max == 5
    assert lag.mean == 1
    assert lag.samples == 4


def test_served_is_behind_until_the_slowest_engine_has_flipped() -> None:
    events = in_order(
        [ev(0, "served", f"engine/{n}", version=0, trained=0) for n in range(2)],
        step(0, 10, 1),
        [ev(12, "served", "engine/0", version=1, trained=1), ev(14, "served", "engine/1", version=1, trained=1)],
        step(14, 20, 2),
    )
    lag = make_run_report(events, warmup_steps=0).lag
    assert lag.behind_max == 1
    assert lag.behind_mean == pytest.approx(4 / 20)
    assert make_run_report(events, warmup_steps=1).lag.behind_mean == pytest.approx(4 / 10)


def test_nobody_waits_for_the_version_of_an_engine_that_is_down() -> None:
    versions = VersionTracker()
    versions.set_trained(3)
    versions.set_served("engine/0", 3)
    versions.set_served("engine/1", 1)
    assert versions.behind == 2
    versions.remove_engine("engine/1")
    assert versions.behind == 0
    versions.add_engine("engine/1")
    assert versions.served == 3


def test_an_engine_that_is_up_again_serves_the_version_it_was_seeded_with() -> None:
    events = in_order(
        [ev(0, "served", f"engine/{n}", version=0, trained=0) for n in range(2)],
        [ev(1, "down", "engine/1", reason="crash")],
        step(0, 2, 1),
        [ev(3, "served", "engine/0", version=1, trained=1), ev(5, "up", "engine/1", version=1)],
        step(6, 12, 2),
    )
    assert make_run_report(events, warmup_steps=0).lag.behind_mean == pytest.approx(1 / 12)


def test_engines_that_never_reported_serve_what_training_started_from() -> None:
    versions = VersionTracker()
    versions.set_trained(7)
    versions.add_engine("engine/0")
    versions.set_trained(8)
    assert (versions.served, versions.behind) == (7, 1)


def test_drops_are_counted_by_reason_most_frequent_first() -> None:
    events = [
        ev(0, "sample.start", "generate", sample="a"),
        ev(1, "sample.end", "reward", sample="a", end="dropped", reason="zero_variance"),
        ev(1, "sample.end", "generate", sample="b", end="dropped", reason="stale_in_flight"),
        ev(1, "sample.end", "generate", sample="c", end="dropped", reason="stale_in_flight"),
        ev(2, "sample.end", "train", sample="d", end="trained"),
    ]
    ends = make_run_report(events).ends
    assert list(ends.drops.items()) == [("stale_in_flight", 2), ("zero_variance", 1)]
    assert (ends.started, ends.trained, ends.dropped, ends.saved) == (1, 1, 3, 0)
    assert ends.drop_share == pytest.approx(0.75)


groups = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 16))


@given(st.lists(groups, max_size=40))
def test_every_column_of_the_histogram_adds_up_to_the_samples_trained(rows: list[tuple[int, int, int]]) -> None:
    events = [trained_group(t, 20, flight, queue, n) for t, (flight, queue, n) in enumerate(rows)]
    report = make_run_report(events)
    total = sum(n for _, _, n in rows)
    assert report.lag.samples == total
    assert sum(b.samples for b in report.lag.histogram) == total
    assert sum(b.in_flight for b in report.lag.histogram) == total
    assert sum(b.in_queue for b in report.lag.histogram) == total
    assert report.lag.mean == pytest.approx(report.lag.mean_in_flight + report.lag.mean_in_queue)


@given(st.lists(st.tuples(st.sampled_from(["e/0", "e/1", "e/2"]), st.integers(0, 9) | st.none()), max_size=30))
def test_the_served_version_is_the_minimum_over_live_engines(changes: list[tuple[str, int | None]]) -> None:
    versions, live = VersionTracker(), {}
    for engine, version in changes:
        if version is None:
            versions.remove_engine(engine)
            live.pop(engine, None)
        else:
            versions.set_served(engine, version)
            live[engine] = version
        if live:
            assert versions.served == min(live.values())
