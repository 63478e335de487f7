"""Code that blocks an event loop is named while it does, and afterwards."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import pytest

from headway.processes.loop_watchdog import LoopWatchdog


def block_the_loop(until: list[bool]) -> None:
    _wait_until(lambda: until[0])


def test_code_that_blocks_the_loop_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[str] = []

    async def scenario() -> None:
        released = [False]
        with LoopWatchdog(reports.append, limit_s=0.1) as watchdog:
            waiting = asyncio.get_running_loop().run_in_executor(None, _release_when_blocked, watchdog, released)
            block_the_loop(released)
            await waiting
            await asyncio.to_thread(_wait_until, lambda: bool(reports))
            assert not watchdog.is_blocked

    asyncio.run(asyncio.wait_for(scenario(), 30))
    place = r" in _wait_until at .*test_loop_watchdog.py:\d+"
    assert re.search(f"the run stands still: its event loop is blocked{place}", capfd.readouterr().err)
    (report,) = reports
    assert re.fullmatch(rf"the event loop was blocked for \d+ s{place}", report)


def _release_when_blocked(watchdog: LoopWatchdog, released: list[bool]) -> None:
    _wait_until(lambda: watchdog.is_blocked)
    released[0] = True


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
