"""The trace: well-formed rows that balance, and the counter of held slots."""

from __future__ import annotations

import io
import json
from collections import Counter

import pytest

from headway.monitor.perfetto_trace import FLOW_PID, make_trace_rows, write_perfetto_trace
from tests.monitor.factory import NASTY, ev, step, toy_run


def test_the_written_trace_is_json_with_every_phase() -> None:
    stream = io.StringIO()
    count = write_perfetto_trace(toy_run(steps=8), stream)
    rows = json.loads(stream.getvalue())["traceEvents"]
    assert len(rows) == count
    assert {row["ph"] for row in rows} == {"M", "X", "C", "b", "e", "i"}
    assert all(isinstance(row["ts"], int) for row in rows if row["ph"] != "M")
    assert all(row["dur"] >= 0 for row in rows if row["ph"] == "X")
    assert any(NASTY in row["args"].get("message", "") for row in rows if row["ph"] == "i")


def test_every_thread_and_process_that_is_used_has_a_name() -> None:
    rows = list(make_trace_rows(toy_run(steps=6)))
    threads = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    processes = {row["pid"] for row in rows if row["name"] == "process_name"}
    assert {(row["pid"], row["tid"]) for row in rows if row["ph"] == "X"} <= threads
    assert {row["pid"] for row in rows} == processes


def test_states_become_slices_without_gaps() -> None:
    events = [
        ev(0, "state", "train", old="idle", new="waiting"),
        ev(2, "state", "train", old="waiting", new="running"),
        ev(5, "checkpoint", "flow", trained=0),
    ]
    slices = [(r["ts"], r["dur"], r["name"]) for r in make_trace_rows(events) if r["ph"] == "X"]
    assert slices == [(0, 2_000_000, "waiting"), (2_000_000, 3_000_000, "running")]


def test_requests_that_ended_were_begun_once() -> None:
    rows = list(make_trace_rows(toy_run(steps=6)))
    begun = Counter(row["id"] for row in rows if row["ph"] == "b")
    ended = Counter(row["id"] for row in rows if row["ph"] == "e")
    assert max(begun.values()) == 1
    assert ended <= begun


def test_a_slot_is_held_until_the_weights_made_from_it_are_served() -> None:
    events = [
        ev(0, "served", "engine/0", version=0, trained=0),
        ev(0, "served", "engine/1", version=0, trained=0),
        ev(1, "group.start", "generate", group=1, position=0, served=0),
        ev(1, "group.start", "generate", group=2, position=1, served=0),
        ev(2, "group.drop", "reward", group=2, reason="zero_variance"),
        ev(3, "group.train", "train", group=1, trained=0, oldest=0, in_flight=0, in_queue=0, samples=4, actions=9),
        ev(4, "step.end", "train", trained=1, groups=1),
        ev(5, "served", "engine/0", version=1, trained=1),
        ev(6, "served", "engine/1", version=1, trained=1),
    ]
    rows = [r for r in make_trace_rows(events) if r["ph"] == "C" and r["pid"] == FLOW_PID]
    held = [(r["ts"] // 1_000_000, r["args"]["groups"]) for r in rows if r["name"] == "outstanding"]
    assert held[-5:] == [(1, 2), (2, 1), (4, 1), (5, 1), (6, 0)]
    assert [r["args"]["version"] for r in rows if r["name"] == "served"][-2:] == [0, 1]


def test_a_metric_that_is_not_a_number_does_not_spoil_the_file() -> None:
    stream = io.StringIO()
    write_perfetto_trace(step(0, 1, 1, loss=float("nan")), stream)
    rows = json.loads(stream.getvalue(), parse_constant=lambda word: pytest.fail(word))["traceEvents"]
    assert [row["args"]["loss"] for row in rows if row["ph"] == "X"] == [None]


def test_an_engine_that_is_down_holds_no_requests() -> None:
    events = [ev(0, "request.start", "engine/0", request="a"), ev(1, "down", "engine/0", reason="crash")]
    assert [r["args"]["open"] for r in make_trace_rows(events) if r["ph"] == "C" and r["name"] == "requests"] == [1, 0]
