"""The wait-for graph: who waits for what since when, who waits in a ring, and how it reads."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from headway.monitor.wait_graph import WaitEdge, WaitGraph


def make_waits(*edges: tuple[str, str], now_s: float = 0.0) -> WaitGraph:
    """A graph in which each owner waits for another since the start."""
    waits = WaitGraph(lambda: now_s)
    waits.add_reporter(lambda: [WaitEdge(owner, "something", on, 0.0) for owner, on in edges])
    return waits


def test_a_wait_is_there_for_the_length_of_its_block() -> None:
    waits = WaitGraph(lambda: 3.0)
    with waits.waiting("train", "a full batch", "reward"):
        assert waits.edges() == [WaitEdge("train", "a full batch", "reward", 3.0)]
    assert waits.edges() == []


def test_a_wait_that_ends_with_an_error_is_gone_too() -> None:
    waits = WaitGraph(lambda: 0.0)
    with pytest.raises(ValueError, match="broken"), waits.waiting("train", "a full batch", "reward"):
        raise ValueError("broken")
    assert waits.edges() == []


def test_edges_are_ordered_by_how_long_they_have_lasted() -> None:
    times = iter((1.0, 0.0, 1.0))
    waits = WaitGraph(lambda: next(times))
    with ExitStack() as stack:
        for owner in ("late", "early", "also"):
            stack.enter_context(waits.waiting(owner, "it", "x"))
        assert [wait.owner for wait in waits.edges()] == ["early", "also", "late"]


def test_reporters_are_asked_each_time_the_graph_is_looked_at() -> None:
    asked, waits = [], WaitGraph(lambda: 0.0)

    def report() -> list[WaitEdge]:
        asked.append(1)
        return [WaitEdge("hub", "restart", "engine/0", 0.0)]

    waits.add_reporter(report)
    assert waits.edges() == waits.edges() == [WaitEdge("hub", "restart", "engine/0", 0.0)]
    assert len(asked) == 2


def test_the_text_says_who_waits_for_whom_for_what_and_for_how_long() -> None:
    waits = make_waits(("train", "reward"), now_s=12.34)
    assert waits.describe() == "  train waits for reward: something (for 12.3 s)"


def test_an_empty_graph_says_so() -> None:
    assert WaitGraph(lambda: 0.0).describe() == "  nobody waits"


def test_a_ring_is_found_and_printed() -> None:
    waits = make_waits(("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))
    assert waits.find_cycle() == ["a", "b", "c", "a"]
    assert waits.describe().endswith("  ring: a → b → c → a")


def test_a_chain_is_no_ring() -> None:
    assert make_waits(("a", "b"), ("b", "c"), ("d", "b")).find_cycle() == []


def test_whoever_waits_for_itself_is_a_ring() -> None:
    assert make_waits(("a", "a")).find_cycle() == ["a", "a"]


def test_a_ring_behind_a_tail_is_named_without_the_tail() -> None:
    assert make_waits(("tail", "a"), ("a", "b"), ("b", "a")).find_cycle() == ["a", "b", "a"]


def test_a_ring_is_found_also_through_the_second_of_two_waits() -> None:
    waits = make_waits(("a", "b"), ("a", "c"), ("b", "d"), ("d", "nobody"), ("c", "a"))
    assert waits.find_cycle() == ["a", "c", "a"]
