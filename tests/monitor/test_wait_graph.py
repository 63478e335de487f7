"""The wait-for graph: who waits for what since when, who waits in a ring, and how it reads."""

from __future__ import annotations

import asyncio

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
    waits = WaitGraph(lambda: 3.0)
    begun = {"late": 1.0, "early": 0.0, "also": 1.0}
    waits.add_reporter(lambda: [WaitEdge(owner, "it", "x", since_s) for owner, since_s in begun.items()])
    assert [wait.owner for wait in waits.edges()] == ["early", "also", "late"]


def test_the_innermost_wait_hides_those_around_it_until_it_ends() -> None:
    waits = WaitGraph(lambda: 0.0)
    with waits.waiting("train", "step 3", "train.process"):
        with waits.waiting("train", "step 3", "trainer"):
            assert [wait.on for wait in waits.edges()] == ["trainer"]
        assert [wait.on for wait in waits.edges()] == ["train.process"]


def test_a_wait_in_a_task_hides_the_one_that_the_task_was_started_in() -> None:
    async def main() -> None:
        waits = WaitGraph(lambda: 0.0)

        async def load(replica: str) -> None:
            with waits.waiting("param_update", "a bucket", replica):
                await asyncio.sleep(0)

        with waits.waiting("param_update", "version 3", "param_update.process"):
            async with asyncio.TaskGroup() as tasks:
                for replica in ("engine/0", "engine/1"):
                    tasks.create_task(load(replica))
                await asyncio.sleep(0)
                assert {wait.on for wait in waits.edges()} == {"engine/0", "engine/1"}
            assert [wait.on for wait in waits.edges()] == ["param_update.process"]

    asyncio.run(main())


def test_words_that_change_are_read_when_the_graph_is_looked_at() -> None:
    waits, holder = WaitGraph(lambda: 0.0), ["logp"]
    with waits.waiting("train", lambda: f"lock held by {holder[0]}", lambda: holder[0]):
        holder[0] = "critic"
        assert waits.edges() == [WaitEdge("train", "lock held by critic", "critic", 0.0)]


def test_a_reporter_is_asked_only_inside_its_block() -> None:
    waits, edge = WaitGraph(lambda: 0.0), WaitEdge("a", "b", "c", 0.0)
    with waits.reporting(lambda: [edge]):
        assert waits.edges() == [edge]
    assert waits.edges() == []


def test_culprits_are_waited_for_and_wait_for_nobody() -> None:
    waits = make_waits(("train", "reward"), ("reward", "math"), ("generate", "engine/0"), ("rollout", "generate"))
    assert {edge.on for edge in waits.find_culprits()} == {"math", "engine/0"}


def test_a_ring_whose_member_waits_for_somebody_at_work_is_no_deadlock() -> None:
    waits = make_waits(("a", "b"), ("b", "c"), ("c", "a"), ("b", "math"))
    assert waits.find_cycle() == []
    assert waits.describe().startswith("  culprit: b waits for math: something")


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
    told = "train waits for reward: something (for 12.3 s)"
    assert waits.describe() == f"  culprit: {told}\n  {told}"


def test_an_empty_graph_says_so() -> None:
    assert WaitGraph(lambda: 0.0).describe() == "  nobody waits"


def test_a_ring_is_found_and_printed() -> None:
    waits = make_waits(("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))
    assert waits.find_cycle() == ["a", "b", "c", "a"]
    assert waits.describe().startswith("  ring: a → b → c → a\n")


def test_a_chain_is_no_ring() -> None:
    assert make_waits(("a", "b"), ("b", "c"), ("d", "b")).find_cycle() == []


def test_whoever_waits_for_itself_is_a_ring() -> None:
    assert make_waits(("a", "a")).find_cycle() == ["a", "a"]


def test_a_ring_behind_a_tail_is_named_without_the_tail() -> None:
    assert make_waits(("tail", "a"), ("a", "b"), ("b", "a")).find_cycle() == ["a", "b", "a"]


def test_a_ring_is_found_also_through_the_second_of_two_waits() -> None:
    waits = make_waits(("a", "b"), ("a", "c"), ("b", "d"), ("d", "d"), ("c", "a"))
    assert waits.find_cycle() == ["d", "d"]
