from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headway.errors import Deadlock, Stalled
from headway.sim.virtual_clock import VirtualEventLoop, run_on_virtual_clock


def test_time_starts_at_zero_and_jumps() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        for seconds in (1e6, 0.25):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert run_on_virtual_clock(main()) == [0.0, 1e6, 1e6 + 0.25]


def test_timers_of_equal_time_run_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for index in range(200):
            loop.call_at(5.0 if index % 2 else 5.0 + (index % 3) * 1e-3, order.append, index)
        await asyncio.sleep(6)
        return order

    order = run_on_virtual_clock(main())
    assert order == sorted(range(200), key=lambda index: (0 if index % 2 else (index % 3) * 1e-3, index))


def test_time_stands_still_while_something_is_ready() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: list[bool] = []
        loop.call_later(1e-9, fired.append, True)
        for _ in range(100):
            await asyncio.sleep(0)
        assert loop.time() == 0.0 and not fired

    run_on_virtual_clock(main())


def test_a_timer_in_the_past_runs_at_once_and_time_never_goes_back() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(10)
        seen: list[float] = []
        loop.call_at(3.0, lambda: seen.append(loop.time()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == [10.0]

    run_on_virtual_clock(main())


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(5000):
            loop.call_later(1e9, lambda: None).cancel()
        await asyncio.sleep(1)
        assert loop.time() == 1.0

    run_on_virtual_clock(main())


def test_waiting_for_nothing_is_a_deadlock_with_a_description() -> None:
    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"(?s)t = 2 s.*train waits for rollout"):
        run_on_virtual_clock(main(), describe=lambda: "train waits for rollout")


def test_the_description_can_be_set_while_running() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        loop.describe = lambda: "set later"
        await loop.create_future()

    with pytest.raises(Deadlock, match="set later"):
        run_on_virtual_clock(main())


def test_a_deadlock_cancels_and_cleans_up() -> None:
    cleaned = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append(True)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits())
            tasks.create_task(waits())

    with pytest.raises(Deadlock):
        run_on_virtual_clock(main())
    assert cleaned == [True, True]


def test_leftover_tasks_and_generators_are_closed() -> None:
    closed, kept = [], []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append("generator")

    async def leftover() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            closed.append("task")

    async def main() -> int:
        task = asyncio.create_task(leftover())
        iterator = numbers()
        kept.append(iterator)
        await anext(iterator)
        await asyncio.sleep(1)
        return int(not task.done())

    assert run_on_virtual_clock(main()) == 1
    assert sorted(closed) == ["generator", "task"]


def test_a_livelock_hits_the_limits() -> None:
    async def spins() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(0)

    async def ticks() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(1)

    with pytest.raises(Stalled, match="1000 events"):
        run_on_virtual_clock(spins(), max_events=1000)
    with pytest.raises(Stalled, match=r"50\.0 s"):
        run_on_virtual_clock(ticks(), max_time_s=50.0)


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run_on_virtual_clock(main())


def test_threads_are_refused() -> None:
    async def executor() -> None:
        await asyncio.to_thread(print)

    async def threadsafe() -> None:
        asyncio.get_running_loop().call_soon_threadsafe(print)

    for main in (executor, threadsafe):
        with pytest.raises(NotImplementedError, match="virtual clock"):
            run_on_virtual_clock(main())


def test_the_same_program_runs_the_same_way() -> None:
    async def main() -> list[tuple[float, str]]:
        loop, log = asyncio.get_running_loop(), []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=3)

        async def produce(name: str, pause_s: float) -> None:
            for number in range(20):
                await asyncio.sleep(pause_s)
                await queue.put(number)
                log.append((loop.time(), f"{name} put {number}"))

        async def consume(name: str) -> None:
            for _ in range(20):
                number = await queue.get()
                await asyncio.sleep(0.3)
                log.append((loop.time(), f"{name} got {number}"))

        async with asyncio.TaskGroup() as tasks:
            for index in range(3):
                tasks.create_task(produce(f"p{index}", 0.1 * (index + 1)))
                tasks.create_task(consume(f"c{index}"))
        return log

    assert run_on_virtual_clock(main()) == run_on_virtual_clock(main())


def test_timeouts_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_on_virtual_clock(main()) == 30.0


def test_runs_do_not_disturb_each_other_or_the_real_loop() -> None:
    async def main() -> int:
        return 1

    assert (
        run_on_virtual_clock(main()) + run_on_virtual_clock(main()) + asyncio.run(main()) + run_on_virtual_clock(main())
        == 4
    )
