"""within: a deadline for calls that wait, and no timer at all for those that do not."""

from __future__ import annotations

import asyncio

import pytest

from headway.deadlines import pause_deadline, run_with_deadline, run_with_pausable_deadline
from headway.sim.virtual_clock import VirtualEventLoop, run_on_virtual_clock


async def answer_after(seconds: float, answer: str = "done") -> str:
    if seconds:
        await asyncio.sleep(seconds)
    return answer


def test_a_call_in_time_gives_its_result() -> None:
    assert run_on_virtual_clock(run_with_deadline(5, answer_after(4.9))) == "done"


def test_a_call_that_never_waits_arms_no_timer() -> None:
    async def main() -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        before = loop._timer_count
        return await run_with_deadline(5, answer_after(0)), loop._timer_count - before

    assert run_on_virtual_clock(main()) == ("done", 0)


def test_a_call_past_its_deadline_is_cancelled_at_it() -> None:
    async def main() -> tuple[float, list[str]]:
        told: list[str] = []

        async def slow() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                told.append("cleaned up")

        with pytest.raises(TimeoutError):
            await run_with_deadline(5, slow())
        return asyncio.get_running_loop().time(), told

    assert run_on_virtual_clock(main()) == (5, ["cleaned up"])


@pytest.mark.parametrize("seconds", [0, 1])
def test_an_error_of_the_call_comes_out_as_it_is(seconds: float) -> None:
    async def broken() -> None:
        await answer_after(seconds)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_on_virtual_clock(run_with_deadline(5, broken()))


def test_the_time_of_all_waits_of_a_call_counts() -> None:
    async def steps() -> None:
        for _ in range(10):
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        run_on_virtual_clock(run_with_deadline(9.5, steps()))
    run_on_virtual_clock(run_with_deadline(10.5, steps()))


def test_cancelling_from_outside_is_no_timeout() -> None:
    async def main() -> bool:
        task = asyncio.ensure_future(run_with_deadline(100, answer_after(50)))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_on_virtual_clock(main())


def test_a_call_may_catch_an_error_thrown_into_it_and_go_on() -> None:
    async def stubborn() -> str:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(10)
        except TimeoutError:
            await asyncio.sleep(1)
        return "went on"

    assert run_on_virtual_clock(run_with_deadline(5, stubborn())) == "went on"


def test_time_in_a_queue_does_not_count() -> None:
    async def wait_and_work(work_s: float) -> str:
        with pause_deadline():
            await asyncio.sleep(50)
        await asyncio.sleep(work_s)
        return "done"

    assert run_on_virtual_clock(run_with_pausable_deadline(5, wait_and_work(4.9))) == "done"
    with pytest.raises(TimeoutError):
        run_on_virtual_clock(run_with_pausable_deadline(5, wait_and_work(5.1)))
    with pytest.raises(TimeoutError):
        run_on_virtual_clock(run_with_deadline(5, wait_and_work(0)))
