"""Usage against hand-made runs with known answers, and its adding-up for any run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitor.event_log import LoggedEvent
from headway.monitor.role_usage import STATES, natural_sort_key
from headway.monitor.run_report import make_run_report
from tests.monitor.factory import ev, in_order, step


def test_seconds_by_state_leave_the_warm_up_out() -> None:
    events = in_order(
        step(1, 10, 1),
        step(15, 20, 2),
        [
            ev(0, "state", "train", old="idle", new="waiting"),
            ev(1, "state", "train", old="waiting", new="running"),
            ev(12, "state", "train", old="running", new="waiting"),
            ev(15, "state", "train", old="waiting", new="running"),
        ],
    )
    report = make_run_report(events, warmup_steps=1)
    (train,) = report.usage.roles
    assert (report.window.start_s, report.window.end_s, report.window.steps) == (10, 20, 1)
    assert train.states["running"] == pytest.approx(7)
    assert train.states["waiting"] == pytest.approx(3)
    assert train.bubble == pytest.approx(0.3)
    assert train.waiting == pytest.approx(0.3)


def test_a_run_shorter_than_its_warm_up_is_measured_whole() -> None:
    events = [
        ev(2, "state", "reward", old="idle", new="running"),
        ev(5, "state", "reward", old="running", new="idle"),
        ev(6, "checkpoint", "flow", trained=0),
    ]
    report = make_run_report(events, warmup_steps=3)
    assert not report.window.warmed_up
    assert report.window.seconds == 4
    assert report.usage.roles[0].states["running"] == 3
    assert report.usage.roles[0].states["idle"] == 1


def test_a_stage_first_heard_of_inside_the_window_was_in_its_old_state_before() -> None:
    events = in_order(step(0, 10, 1), step(11, 20, 2), [ev(14, "state", "late", old="idle", new="running")])
    (late,) = make_run_report(events, warmup_steps=1).usage.roles
    assert late.states["idle"] == pytest.approx(4)
    assert late.states["running"] == pytest.approx(6)


def test_an_engine_is_busy_while_it_has_a_request() -> None:
    events = [
        ev(0, "request.start", "engine/0", request="a"),
        ev(2, "request.start", "engine/0", request="b"),
        ev(4, "request.end", "engine/0", request="a", actions=10, finish="stop"),
        ev(6, "request.end", "engine/0", request="b", actions=30, finish="stop"),
        ev(10, "checkpoint", "flow", trained=0),
    ]
    (engine,) = make_run_report(events).usage.engines
    assert engine.busy == pytest.approx(0.6)
    assert engine.bubble == pytest.approx(0.4)
    assert engine.concurrency == pytest.approx(0.8)
    assert (engine.peak, engine.requests, engine.actions) == (2, 2, 40)
    assert engine.actions_per_s == pytest.approx(4)


def test_requests_of_an_engine_that_went_down_are_no_longer_open() -> None:
    events = [
        ev(0, "request.start", "engine/0", request="a"),
        ev(3, "down", "engine/0", reason="crash"),
        ev(4, "request.end", "engine/0", request="a", actions=0, finish="aborted"),
        ev(10, "up", "engine/0"),
    ]
    (engine,) = make_run_report(events).usage.engines
    assert engine.busy == pytest.approx(0.3)


def test_a_role_with_spans_is_judged_by_them() -> None:
    events = [
        ev(0, "state", "ref_logp", old="idle", new="running"),
        ev(1, "span.begin", "ref_logp", span=1, name="score"),
        ev(2, "span.begin", "ref_logp", span=2, name="score"),
        ev(4, "span.end", "ref_logp", span=1, name="score"),
        ev(5, "span.end", "ref_logp", span=2, name="score"),
        ev(8, "checkpoint", "flow", trained=0),
    ]
    (role,) = make_run_report(events).usage.roles
    assert role.busy == pytest.approx(0.5)
    assert role.concurrency == pytest.approx(6 / 8)
    assert role.spans == 2


def test_scores_are_a_pool_beside_the_reward_stage() -> None:
    events = [
        ev(0, "state", "reward", old="idle", new="waiting"),
        ev(2, "score.start", "reward", sample="a"),
        ev(4, "score.end", "reward", sample="a"),
        ev(8, "checkpoint", "flow", trained=0),
    ]
    stage, scoring = make_run_report(events).usage.roles
    assert (stage.role, stage.busy) == ("reward", 0.0)
    assert (scoring.role, scoring.busy, scoring.spans) == ("scoring", 0.25, 1)


def test_the_pool_is_the_mean_share_and_the_sum_of_counts() -> None:
    events = [
        ev(0, "request.start", "engine/10", request="a"),
        ev(0, "request.start", "engine/2", request="b"),
        ev(5, "request.end", "engine/2", request="b", actions=7, finish="stop"),
        ev(10, "request.end", "engine/10", request="a", actions=3, finish="stop"),
    ]
    usage = make_run_report(events).usage
    assert [engine.engine for engine in usage.engines] == ["engine/2", "engine/10"]
    assert usage.pool is not None
    assert usage.pool.busy == pytest.approx(0.75)
    assert (usage.pool.requests, usage.pool.actions) == (2, 10)


def test_names_with_numbers_sort_by_number() -> None:
    assert sorted(["engine/10", "engine/9", "train"], key=natural_sort_key) == ["engine/9", "engine/10", "train"]


@st.composite
def runs(draw: st.DrawFn) -> list[LoggedEvent]:
    gaps = draw(st.lists(st.floats(0, 10), min_size=1, max_size=60))
    state = {"a": "idle", "b": "waiting"}
    events, now, trained = [], 0.0, 0
    for gap in gaps:
        now += gap
        if draw(st.booleans()):
            trained += 1
            events.append(ev(now, "step.end", "train", trained=trained, groups=1))
        else:
            who, new = draw(st.sampled_from(sorted(state))), draw(st.sampled_from(STATES))
            events.append(ev(now, "state", who, old=state[who], new=new))
            state[who] = new
    return events


@given(runs(), st.integers(0, 5))
def test_the_seconds_of_every_stage_add_up_to_the_window(events: list[LoggedEvent], warmup_steps: int) -> None:
    report = make_run_report(events, warmup_steps=warmup_steps)
    for role in report.usage.roles:
        assert sum(role.states.values()) == pytest.approx(report.window.seconds, abs=1e-9)
        assert all(seconds >= -1e-9 for seconds in role.states.values())
        assert -1e-9 <= role.bubble <= 1 + 1e-9
