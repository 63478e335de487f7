"""The index of replicas by load, and the line of requests without a slot."""

from __future__ import annotations

import asyncio

from benchmarks.instant_engine import InstantEngine

from headway.rollout.replica import QueuedRequest, Replica, ReplicaLoadIndex, RequestLane, RequestQueue
from headway.sim.virtual_clock import run_on_virtual_clock


def make_replica(number: int, *, load: int = 0, slots: int = 4) -> Replica:
    replica = Replica(InstantEngine(f"engine/{number}", slots=slots), number)
    add_load(replica, load)
    return replica


def add_load(replica: Replica, count: int = 1) -> None:
    for _ in range(count):
        replica.inflight[f"{replica.name}/{replica.load}"] = RequestLane.TRAIN


def make_index(*loads: int) -> tuple[ReplicaLoadIndex, list[Replica]]:
    index, replicas = ReplicaLoadIndex(), [make_replica(number, load=load) for number, load in enumerate(loads)]
    for replica in replicas:
        index.put(replica)
    return index, replicas


def test_the_least_loaded_replica_is_found() -> None:
    index, replicas = make_index(2, 1, 3)
    assert index.least(lambda replica: True) is replicas[1]


def test_among_equals_the_one_that_has_been_so_for_longest_is_first() -> None:
    index, replicas = make_index(0, 0)
    add_load(replicas[0])
    index.put(replicas[0])
    replicas[0].inflight.clear()
    index.put(replicas[0])
    assert index.least(lambda replica: True) is replicas[1]


def test_a_replica_that_does_not_fit_is_passed_over() -> None:
    index, replicas = make_index(0, 2)
    assert index.least(lambda replica: replica is not replicas[0]) is replicas[1]
    assert index.least(lambda replica: False) is None


def test_a_full_replica_is_not_in_the_index_until_it_has_room_again() -> None:
    index, (replica,) = make_index(4)
    assert replica not in index
    replica.inflight.popitem()
    index.put(replica)
    assert replica in index


def test_discarding_twice_does_no_harm() -> None:
    index, (replica,) = make_index(0)
    index.discard(replica)
    index.discard(replica)
    assert index.least(lambda _: True) is None


def test_older_groups_go_first_then_first_come_and_the_cancelled_are_skipped() -> None:
    async def main() -> list[str]:
        line, slots = RequestQueue(), {}
        for number, (name, priority) in enumerate({"a": 5, "b": 2, "c": 2, "d": 1}.items()):
            slots[name] = asyncio.get_running_loop().create_future()
            line.push(QueuedRequest(priority, number, RequestLane.TRAIN, name, slots[name], 0.0))
        slots["d"].cancel()
        assert len(line) == 3
        popped = [line.pop() for _ in range(4)]
        return [queued.request_id if queued else "" for queued in popped]

    assert run_on_virtual_clock(main()) == ["b", "c", "a", ""]


def test_a_replica_serves_what_its_engine_serves() -> None:
    replica = make_replica(0)
    assert replica.version == -1
    replica.engine.receiver.version = 4
    assert replica.version == 4
