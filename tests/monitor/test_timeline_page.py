"""The page: nothing gets out of its data block, nothing comes from outside, and big runs stay small."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.monitor.role_usage import STATES
from headway.monitor.run_record import make_run_record
from headway.monitor.timeline_lanes import (
    MOST_ENGINE_LANES,
    TimelineLanes,
    compute_binned_mean,
    make_area_lane,
    make_state_lane,
    thin_lanes,
)
from headway.monitor.timeline_page import DATA_MARK, embed_json, make_timeline_data, render_timeline_page
from tests.monitor.factory import NASTY, ev, in_order, step, toy_run


def embedded(page: str) -> dict:
    """The data as a browser would find it: from the opening tag to the first thing that ends a script block."""
    _, _, rest = page.partition('<script type="application/json" id="data">')
    block, _, _ = rest.partition("</script")
    return json.loads(block)


def test_nasty_names_and_messages_come_back_unchanged_and_stay_data() -> None:
    events = [
        ev(0, "state", NASTY, old="idle", new="running"),
        ev(1, "error", "engine/0", error="EngineCrashed", message=NASTY),
        ev(2, "request.start", NASTY, request=1),
        ev(3, "sample.end", "reward", sample="a", end="dropped", reason=NASTY),
    ]
    page = render_timeline_page(events, title=NASTY + DATA_MARK)
    data = embedded(page)
    assert data["title"] == NASTY + DATA_MARK
    assert [lane["name"] for lane in data["lanes"]] == [NASTY, NASTY]
    assert NASTY in data["markers"][0][3]
    assert NASTY in data["drops"][0][2]
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_the_page_refers_to_nothing_outside_itself() -> None:
    page = render_timeline_page(toy_run(steps=3))
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|\bsrc=|@import|url\(", page.replace("src=x onerror", ""))
    assert "default-src 'none'" in page


@given(st.text())
def test_any_text_survives_the_embedding(text: str) -> None:
    encoded = embed_json([text])
    assert json.loads(encoded) == [text]
    assert not set("<>&\u2028\u2029") & set(encoded)


def test_numbers_json_does_not_have_become_null() -> None:
    events = [*step(0, 1, 1), ev(2, "validate.end", "validate", trained=1, reward=float("inf"), samples=1)]
    assert "Infinity" not in render_timeline_page(events).split('id="data">')[1].split("</script")[0]


def test_an_empty_log_still_makes_a_page() -> None:
    assert embedded(render_timeline_page([]))["lanes"] == []


def test_a_small_run_is_drawn_exactly() -> None:
    events = in_order(
        step(1, 3, 1),
        [
            ev(0, "state", "train", old="idle", new="waiting"),
            ev(1, "state", "train", old="waiting", new="running"),
            ev(2, "request.start", "engine/0", request="a"),
            ev(3, "request.end", "engine/0", request="a", actions=1, finish="stop"),
            ev(3.5, "served", "engine/0", version=1, trained=1),
            ev(4, "checkpoint", "flow", trained=1),
        ],
    )
    data = make_timeline_data(events, title="t")
    stage, engine = data["lanes"]
    assert stage["spans"] == [0, 1, STATES.index("waiting"), 1, 4, STATES.index("running")]
    assert (engine["points"], engine["peak"]) == ([2, 1, 3, 0], 1)
    assert data["steps"] == [1, 3, 1]
    assert data["versions"] == [1, 0, 0, 3, 1, 0, 3.5, 1, 1]
    assert data["markers"] == [[4, "checkpoint", "flow", "after step 1"]]


def test_many_engines_share_heat_lanes() -> None:
    data = make_timeline_data(toy_run(engines=100, steps=6, batch=40), title="t")
    heat = [lane for lane in data["lanes"] if lane["kind"] == "heat"]
    assert 0 < len(heat) <= MOST_ENGINE_LANES
    assert heat[0]["name"] == "engine/0 … 3"
    assert 0 < heat[0]["busy"] <= 1


def test_a_long_run_makes_a_page_of_bounded_size() -> None:
    short, long = (
        sum(_drawn(lane) for lane in thin_lanes(make_run_record(toy_run(steps=n)).lanes, 2000)) for n in (20, 80)
    )
    assert long <= 2 * short
    assert long < 40_000


def _drawn(lane: dict) -> int:
    return len(lane.get("spans", lane.get("points", lane.get("heat", lane.get("mix", ())))))


def test_bins_keep_the_shares_of_states() -> None:
    spans = [(float(t), t + 0.25, "running") for t in range(100)]
    spans += [(t + 0.25, t + 1.0, "waiting") for t in range(100)]
    lane = make_state_lane("train", sorted(spans), TimelineLanes(start_s=0.0, end_s=100.0), 10)
    assert len(lane["mix"]) == 10
    for row in lane["mix"]:
        assert row[STATES.index("running")] == 25
        assert row[STATES.index("waiting")] == 75


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 50))
def test_bins_keep_the_area_under_an_occupancy(rows: list[tuple[float, int]], bins: int) -> None:
    points, now = [], 0.0
    for gap, count in rows:
        points.append((now, count))
        now += gap
    lanes = TimelineLanes(start_s=0.0, end_s=now)
    ends = [t for t, _ in points[1:]] + [now]
    area = sum(count * (end - t) for (t, count), end in zip(points, ends, strict=True))
    assert sum(compute_binned_mean(points, lanes, bins)) * now / bins == pytest.approx(area, abs=1e-6)


def test_a_binned_area_says_so() -> None:
    points = [(float(t), t % 2) for t in range(100)]
    lane = make_area_lane("engine", "engine/0", points, TimelineLanes(start_s=0.0, end_s=100.0), 10)
    assert lane["binned"]
    assert lane["points"][1::2] == [0.5] * 10
