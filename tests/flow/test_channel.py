"""Channels: typed, bounded, in order, with an end, and a wait that says who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.errors import ChannelClosed, Deadlock
from headway.flow.channel import Channel
from headway.monitor.wait_graph import WaitGraph
from headway.sim.virtual_clock import run_on_virtual_clock


def make_channel(capacity: int = 2, waits: WaitGraph | None = None) -> Channel[int]:
    waits = waits or WaitGraph(lambda: asyncio.get_running_loop().time())
    return Channel("left → right", int, capacity, producer="left", consumer="right", waits=waits)


async def fill(channel: Channel[int], count: int, seen: list[Any]) -> None:
    for number in range(count):
        await channel.send(number)
        seen.append((asyncio.get_running_loop().time(), number))


def test_items_come_out_in_the_order_they_went_in() -> None:
    async def main() -> list[int]:
        channel = make_channel()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fill(channel, 5, []))
            return [await channel.receive() for _ in range(5)]

    assert run_on_virtual_clock(main()) == [0, 1, 2, 3, 4]


def test_a_full_channel_holds_its_producer_until_there_is_room() -> None:
    async def main() -> list[tuple[float, int]]:
        channel, sent = make_channel(), []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fill(channel, 4, sent))
            for _ in range(4):
                await asyncio.sleep(10)
                await channel.receive()
        return sent

    assert run_on_virtual_clock(main()) == [(0, 0), (0, 1), (10, 2), (20, 3)]


def test_put_refuses_what_has_no_room() -> None:
    async def main() -> None:
        channel = make_channel(1)
        assert channel.has_room
        channel.put(1)
        assert not channel.has_room
        with pytest.raises(asyncio.QueueFull, match="left → right is full at 1"):
            channel.put(2)

    run_on_virtual_clock(main())


def test_an_item_of_another_type_is_refused_at_the_door() -> None:
    async def main() -> None:
        channel: Channel[Any] = make_channel()
        with pytest.raises(TypeError, match="carries int, not str"):
            await channel.send("one")
        with pytest.raises(TypeError, match="carries int, not str"):
            channel.put("one")
        assert len(channel) == 0

    run_on_virtual_clock(main())


def test_a_channel_without_room_for_anything_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="capacity 0"):
        make_channel(0)


def test_after_close_receivers_get_what_is_left_and_then_the_end() -> None:
    async def main() -> None:
        channel = make_channel()
        channel.put(7)
        channel.close()
        channel.close()
        assert await channel.receive() == 7
        with pytest.raises(ChannelClosed, match="left → right"):
            await channel.receive()
        with pytest.raises(ChannelClosed):
            channel.put(8)

    run_on_virtual_clock(main())


def test_close_ends_everybody_who_waits() -> None:
    async def main() -> list[BaseException | None]:
        empty, full = make_channel(), make_channel(1)
        full.put(0)
        waiting = [asyncio.ensure_future(empty.receive()) for _ in range(2)]
        sending = [asyncio.ensure_future(full.send(number)) for number in range(2)]
        await asyncio.sleep(1)
        empty.close()
        full.close()
        await asyncio.wait([*waiting, *sending])
        return [task.exception() for task in (*waiting, *sending)]

    assert [type(error) for error in run_on_virtual_clock(main())] == [ChannelClosed] * 4


def test_a_receiver_cancelled_in_the_tick_of_its_wake_up_passes_it_on() -> None:
    async def main() -> int:
        channel = make_channel()
        first, second = asyncio.ensure_future(channel.receive()), asyncio.ensure_future(channel.receive())
        await asyncio.sleep(1)
        channel.put(5)  # wakes the first
        first.cancel()
        return await second

    assert run_on_virtual_clock(main()) == 5


def test_a_sender_cancelled_in_the_tick_of_its_wake_up_passes_it_on() -> None:
    async def main() -> list[int]:
        channel = make_channel(1)
        channel.put(0)
        first, second = asyncio.ensure_future(channel.send(1)), asyncio.ensure_future(channel.send(2))
        await asyncio.sleep(1)
        taken = [await channel.receive()]
        first.cancel()
        await second
        return [*taken, await channel.receive()]

    assert run_on_virtual_clock(main()) == [0, 2]


def test_drain_takes_everything_and_lets_senders_in() -> None:
    async def main() -> tuple[list[int], list[int]]:
        channel = make_channel(2)
        sender = asyncio.ensure_future(fill(channel, 4, []))
        await asyncio.sleep(1)
        first = channel.drain()
        await sender
        return first, channel.drain()

    assert run_on_virtual_clock(main()) == ([0, 1], [2, 3])


def test_waiting_shows_in_the_graph_on_both_sides() -> None:
    async def main() -> list[tuple[str, str, str]]:
        waits = WaitGraph(asyncio.get_running_loop().time)
        empty, full = make_channel(waits=waits), make_channel(1, waits=waits)
        full.put(0)
        tasks = [asyncio.ensure_future(empty.receive()), asyncio.ensure_future(full.send(1))]
        await asyncio.sleep(1)
        edges = [(wait.owner, wait.what, wait.on) for wait in waits.edges()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert waits.edges() == []
        return edges

    assert run_on_virtual_clock(main()) == [
        ("left", "room in left → right (full at 1)", "right"),
        ("right", "an item in left → right", "left"),
    ]


def test_two_stages_that_wait_for_each_other_are_a_deadlock_at_once_and_a_ring_in_the_graph() -> None:
    waits = WaitGraph(lambda: 0.0)

    async def main() -> None:
        there = Channel("a → b", int, 1, producer="a", consumer="b", waits=waits)
        back = Channel("b → a", int, 1, producer="b", consumer="a", waits=waits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(there.receive())
            tasks.create_task(back.receive())

    with pytest.raises(Deadlock, match="ring: a → b → a"):
        run_on_virtual_clock(main(), describe=waits.describe)
