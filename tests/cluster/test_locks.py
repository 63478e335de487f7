"""Locks over devices: one owner, first come first served, a deadline that names the holder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headway.cluster.base import DevicePools, ResourceLock
from headway.errors import ConfigError, LockTimeout
from headway.monitor.wait_graph import WaitGraph
from headway.sim.virtual_clock import run_on_virtual_clock


def make_lock(waits: WaitGraph | None = None) -> ResourceLock:
    clock = asyncio.get_running_loop().time
    return ResourceLock("devices of train", waits=waits or WaitGraph(clock), clock=clock)


def make_pools(**devices: tuple[int, ...]) -> DevicePools:
    return DevicePools(devices, waits=WaitGraph(lambda: 0.0), clock=lambda: 0.0)


async def use(
    lock: ResourceLock, owner: str, *, at_s: float = 0, for_s: float = 1, timeout_s: float = 100, log: Callable = print
) -> None:
    await asyncio.sleep(at_s)
    async with lock.hold(owner, timeout_s):
        log((owner, asyncio.get_running_loop().time()))
        await asyncio.sleep(for_s)


def test_the_lock_goes_to_whoever_asked_first() -> None:
    async def main() -> list[tuple[str, float]]:
        lock, log = make_lock(), []
        async with asyncio.TaskGroup() as tasks:
            for owner, at_s in (("late", 3), ("first", 0), ("second", 1), ("third", 2)):
                tasks.create_task(use(lock, owner, at_s=at_s, for_s=10, log=log.append))
        assert lock.owner == ""
        return log

    assert run_on_virtual_clock(main()) == [("first", 0), ("second", 10), ("third", 20), ("late", 30)]


def test_a_lock_that_is_not_to_be_had_in_time_names_its_holder_and_since_when() -> None:
    async def main() -> str:
        lock = make_lock()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use(lock, "train", at_s=1, for_s=50))
            with pytest.raises(LockTimeout) as caught:
                await use(lock, "ref_logp", at_s=6, timeout_s=20)
        return str(caught.value)

    assert run_on_virtual_clock(main()) == "ref_logp waited 20 s for devices of train, held by train for 25.0 s"


def test_whoever_gave_up_waiting_is_passed_over() -> None:
    async def main() -> list[tuple[str, float]]:
        lock, log = make_lock(), []

        async def impatient() -> None:
            with pytest.raises(LockTimeout):
                await use(lock, "impatient", at_s=1, timeout_s=2, log=log.append)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use(lock, "train", for_s=10, log=log.append))
            tasks.create_task(impatient())
            cancelled = tasks.create_task(use(lock, "cancelled", at_s=2, log=log.append))
            tasks.create_task(use(lock, "patient", at_s=3, log=log.append))
            await asyncio.sleep(5)
            cancelled.cancel()
        return log

    assert run_on_virtual_clock(main()) == [("train", 0), ("patient", 10)]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_turn_given_in_the_tick_in_which_it_is_no_longer_wanted_is_passed_on(how: str) -> None:
    async def main() -> list[tuple[str, float]]:
        lock, log = make_lock(), []

        async def unlucky() -> None:
            await use(lock, "unlucky", at_s=10, timeout_s=0 if how == "timeout" else 100, log=log.append)

        task = asyncio.ensure_future(unlucky())
        await asyncio.sleep(0)
        holder = asyncio.ensure_future(use(lock, "holder", for_s=10, log=log.append))
        await asyncio.sleep(10)  # we are woken right after the holder
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task, holder])
        await use(lock, "next", timeout_s=5, log=log.append)
        return log

    assert run_on_virtual_clock(main()) == [("holder", 0), ("next", 10)]


def test_whoever_fails_while_holding_gives_the_lock_back() -> None:
    async def main() -> list[tuple[str, float]]:
        lock, log = make_lock(), []
        with pytest.raises(ValueError, match="broken"):
            async with lock.hold("broken", 10):
                raise ValueError("broken")
        await use(lock, "next", log=log.append)
        return log

    assert run_on_virtual_clock(main()) == [("next", 0)]


def test_the_others_step_aside_before_the_block_and_come_back_after_the_last_in_line() -> None:
    async def main() -> list[tuple[str, float]]:
        lock, log = make_lock(), []
        time = asyncio.get_running_loop().time

        async def aside() -> None:
            await asyncio.sleep(0.5)
            log.append(("aside", time()))

        async def back() -> None:
            log.append(("back", time()))

        lock.call_when_held(aside, when_free=back)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use(lock, "first", for_s=2, log=log.append))
            tasks.create_task(use(lock, "second", for_s=2, log=log.append))
        return log

    log = run_on_virtual_clock(main())
    assert log == [("aside", 0.5), ("first", 0.5), ("aside", 3.0), ("second", 3.0), ("back", 5.0)]


def test_waiting_for_a_lock_shows_in_the_graph() -> None:
    async def main() -> list[tuple[str, str, str]]:
        waits = WaitGraph(asyncio.get_running_loop().time)
        lock = make_lock(waits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use(lock, "train", for_s=5))
            tasks.create_task(use(lock, "critic"))
            await asyncio.sleep(1)
            return [(wait.owner, wait.what, wait.on) for wait in waits.edges()]

    assert run_on_virtual_clock(main()) == [("critic", "lock on devices of train, held for 1.0 s", "train")]


def test_roles_whose_devices_overlap_take_turns_and_others_do_not() -> None:
    pools = make_pools(train=(0, 1), ref_logp=(1,), generate=(2, 3))
    assert pools.are_shared("train", "ref_logp")
    assert not pools.are_shared("train", "generate")
    assert not pools.are_shared("train", "critic")


def test_a_role_that_overlaps_two_others_takes_turns_with_both() -> None:
    pools = make_pools(logp=(0,), critic=(1,), train=(0, 1))
    assert pools.are_shared("train", "logp")
    assert pools.are_shared("train", "critic")


def test_a_role_without_devices_of_its_own_waits_for_nobody() -> None:
    async def main() -> float:
        pools = make_pools(train=(0,))
        async with pools.hold("train", 1), pools.hold("reward", 1):
            return asyncio.get_running_loop().time()

    assert run_on_virtual_clock(main()) == 0


def test_a_role_with_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.device_mapping = \[\]: has no devices"):
        make_pools(train=())
