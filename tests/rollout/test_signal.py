"""Signal: everybody who waits now is woken, and looks again."""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import Deadlock
from headway.rollout.concurrency import Signal
from headway.sim.virtual_clock import run_on_virtual_clock


def test_notify_wakes_everybody_who_waits() -> None:
    async def main() -> int:
        signal = Signal()
        waiters = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.gather(*waiters)
        return sum(waiter.done() for waiter in waiters)

    assert run_on_virtual_clock(main()) == 3


def test_a_notification_before_the_wait_is_not_remembered() -> None:
    async def main() -> None:
        signal = Signal()
        signal.notify()
        await signal.wait()

    with pytest.raises(Deadlock):
        run_on_virtual_clock(main())


def test_until_looks_at_its_condition_first_and_after_every_wake_up() -> None:
    async def main() -> tuple[float, int]:
        loop, signal, looks, count = asyncio.get_running_loop(), Signal(), 0, 0

        def enough() -> bool:
            nonlocal looks
            looks += 1
            return count >= 3

        def add() -> None:
            nonlocal count
            count += 1
            signal.notify()

        for second in (1, 2, 3):
            loop.call_later(second, add)
        await signal.until(enough)
        await signal.until(enough)
        return loop.time(), looks

    assert run_on_virtual_clock(main()) == (3, 5)


def test_a_cancelled_waiter_does_not_keep_the_others_from_waking() -> None:
    async def main() -> bool:
        signal = Signal()
        gone, stays = asyncio.ensure_future(signal.wait()), asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)
        gone.cancel()
        signal.notify()
        await stays
        return gone.cancelled()

    assert run_on_virtual_clock(main())


def test_whoever_waits_again_after_a_wake_up_waits_for_the_next_one() -> None:
    async def main() -> list[float]:
        loop, signal, woken = asyncio.get_running_loop(), Signal(), []
        loop.call_later(1, signal.notify)
        loop.call_later(5, signal.notify)
        for _ in range(2):
            await signal.wait()
            woken.append(loop.time())
        return woken

    assert run_on_virtual_clock(main()) == [1, 5]
