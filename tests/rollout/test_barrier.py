"""The turn barrier: everybody present waits for everybody present, and members come and go."""

from __future__ import annotations

import asyncio

from headway.rollout.concurrency import TurnBarrier
from headway.sim.virtual_clock import run_on_virtual_clock


async def take_turns(barrier: TurnBarrier, pauses: list[float], passed: list[float]) -> None:
    barrier.enter()
    try:
        for pause in pauses:
            await asyncio.sleep(pause)
            await barrier.arrive()
            passed.append(asyncio.get_running_loop().time())
    finally:
        barrier.leave()


def turns_of(*members: list[float]) -> list[list[float]]:
    """When each member passed each round."""

    async def main() -> list[list[float]]:
        barrier, passed = TurnBarrier(), [[] for _ in members]
        async with asyncio.TaskGroup() as tasks:
            for pauses, times in zip(members, passed, strict=True):
                tasks.create_task(take_turns(barrier, pauses, times))
        return passed

    return run_on_virtual_clock(main())


def test_the_slowest_member_sets_the_pace_of_every_round() -> None:
    assert turns_of([1, 1], [3, 1], [2, 5]) == [[3, 8], [3, 8], [3, 8]]


def test_a_member_alone_waits_for_nobody() -> None:
    assert turns_of([1, 2]) == [[1, 3]]


def test_a_member_that_leaves_is_not_waited_for() -> None:
    assert turns_of([1, 1, 1], [4]) == [[4, 5, 6], [4]]


def test_a_member_that_leaves_without_arriving_opens_the_round() -> None:
    async def main() -> float:
        barrier = TurnBarrier()
        barrier.enter()
        barrier.enter()
        asyncio.get_running_loop().call_later(7, barrier.leave)
        await barrier.arrive()
        return asyncio.get_running_loop().time()

    assert run_on_virtual_clock(main()) == 7


def test_a_member_cancelled_while_it_waits_does_not_count_as_arrived() -> None:
    async def main() -> float:
        barrier, times = TurnBarrier(), []
        async with asyncio.TaskGroup() as tasks:
            cancelled = tasks.create_task(take_turns(barrier, [1], []))
            tasks.create_task(take_turns(barrier, [6], []))
            tasks.create_task(take_turns(barrier, [2], times))
            await asyncio.sleep(3)
            cancelled.cancel()
        return times[0]

    assert run_on_virtual_clock(main()) == 6
