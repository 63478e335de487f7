"""Environments of users that go wrong in every way: the episode is lost with a reason, and the next one is played."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import numpy
import pytest

from headway.environments.environment_registry import make_environment
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import Reply, check_reply
from headway.environments.worker_host import WorkerEnvironmentHost
from headway.errors import EnvironmentFailed
from headway.processes.loop_thread import LoopThread
from tests.misbehaviour import WRONG_RESULTS

WORLDS = {"function": "tests.misbehaviour:MisbehavingWorld", "coroutine": "tests.misbehaviour:MisbehavingAsyncWorld"}
HARMLESS = ("fork", "chdir")
COMPLAINTS = {
    "raise": "raised ValueError: a bad day",
    "nan": "gave the reward nan, which is no finite number",
    "none": "returned None, not a",
    "sleep": " in do_sleep at .*misbehaviour.py:\\d+",
    "spin": " in do_spin at .*misbehaviour.py:\\d+",
    "exit": "its worker process .* ended with exit code 3: last words",
    "system_exit": "SystemExit: 1",
    "keyboard_interrupt": "KeyboardInterrupt",
    "segfault": "its worker process .* was killed by SIGSEGV in do_segfault at .*misbehaviour.py:\\d+",
    "memory": "its worker process .* was killed because it used more than 300 MB of memory",
    "orphans": "its worker process .* was killed because it used more than 300 MB of memory",
    "print": "its worker process .* was killed because it printed more than 16 MB",
    "close_files": "its worker process .* ended",
    "kill_group": "its worker process .* was killed",
}


async def play(
    host: WorkerEnvironmentHost | LocalEnvironmentHost, what: str, where: str, timeout_s: float = 20.0
) -> str:
    """Play an episode as a run does; return what went wrong, or nothing."""
    slot = host.make_slot()
    await slot.enter()
    try:
        await slot.open()
        async with asyncio.timeout(1.0 if what in ("sleep", "spin") else 40.0):
            await slot.reset(0, {"what": what, "where": where})
            if where == "step" or what == "good":
                await slot.step("go")
    except TimeoutError:
        return f"no answer{await slot.locate()}"
    except Exception as error:
        return str(error)
    finally:
        await slot.leave()
    return ""


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_whatever_an_environment_does_costs_its_episode(kind: str, where: str) -> None:
    async def scenario() -> None:
        host = WorkerEnvironmentHost(WORLDS[kind], {}, workers=1, episodes_per_worker=2, memory_mb=300)
        for what, complaint in COMPLAINTS.items():
            said = await play(host, what, where)
            assert re.search(complaint, said) and "\n" not in said, f"{what}: {said}"
        said = await play(host, "str", where)
        assert ("step returned '1.0', not a Reply" in said) if where == "step" else not said, "reset may return a text"
        for what in (*HARMLESS, "good") if where == "step" else ("good",):
            assert await play(host, what, where) == ""
        await host.close()

    asyncio.run(scenario())


WRONG_FIELDS = {
    "wrong": "returned .*, not a",
    "text": "text must be a str|said 1000001 characters",
    "reward": "gave the reward .*, which is no finite number",
    "done": "gave done = .*, which is neither true nor false",
    "valid": "gave valid = 'no', which is neither true nor false",
    "success": "gave success = 'no', which is neither true nor false",
    "info": "info a mapping",
}
"""How the message begins with which a result of a wrong type ends the episode, by the first word of its name."""


@pytest.mark.parametrize("place", ["in a worker", "in this process"])
def test_a_result_of_any_wrong_type_ends_the_episode_with_its_reason(place: str) -> None:
    async def scenario() -> None:
        host: WorkerEnvironmentHost | LocalEnvironmentHost
        if place == "in a worker":
            host = WorkerEnvironmentHost(WORLDS["function"], {}, workers=1, episodes_per_worker=2)
        else:
            host = LocalEnvironmentHost("function", lambda: make_environment(WORLDS["function"]))
        for where in ("reset", "step"):
            for what in WRONG_RESULTS:
                said = await play(host, what, where)
                assert re.search(WRONG_FIELDS[what.partition("_")[0]], said), f"{where}: {what}: {said}"
                assert f"{where} " in said and "\n" not in said and len(said) < 500, f"{what}: {said}"
        assert "step returned '1.0', not a Reply" in await play(host, "str", "step")
        assert await play(host, "str", "reset") == "", "a text is what a policy sees first"
        assert await play(host, "good", "step") == ""
        await host.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [numpy.bool_(True), numpy.int64(1), 1])
def test_truth_values_of_numpy_are_truth_values(value: Any) -> None:
    reply = check_reply(Reply("a", numpy.float32(1.0), value, value, value), started=True)
    assert (reply.reward, reply.done, reply.valid, reply.success) == (1.0, True, True, True)


def test_a_crash_is_followed_by_workers_with_fewer_episodes() -> None:
    async def open_slots(host: WorkerEnvironmentHost, count: int) -> list[Any]:
        slots = [host.make_slot() for _ in range(count)]
        for slot in slots:
            await slot.enter()
            await slot.open()
            await slot.reset(0, {"what": "exit", "where": "step"})
        return slots

    async def scenario() -> None:
        host = WorkerEnvironmentHost(WORLDS["coroutine"], {}, workers=1, episodes_per_worker=8)
        for workers in (1, 3):
            slots = await open_slots(host, 5)
            assert len({id(slot._worker) for slot in slots}) == workers
            with pytest.raises(EnvironmentFailed, match="ended with exit code 3: last words"):
                await slots[0].step("go")
            for slot in slots:
                await slot.leave()
        await host.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_an_environment_that_runs_here_cannot_stop_the_run_either(kind: str) -> None:
    async def scenario() -> None:
        thread = LoopThread("test")
        host = LocalEnvironmentHost(kind, lambda: make_environment(WORLDS[kind]), loop_thread=thread)
        assert await play(host, "raise", "step") == "a bad day"
        for what in ("nan", "none", "system_exit", "keyboard_interrupt"):
            assert re.search(COMPLAINTS[what], await play(host, what, "step")), what
        assert await play(host, "good", "step") == ""
        await host.close()

    asyncio.run(scenario())


def test_a_worker_that_was_killed_from_outside_is_replaced() -> None:
    async def scenario() -> None:
        host = WorkerEnvironmentHost(WORLDS["function"], {}, workers=1)
        slot: Any = host.make_slot()
        await slot.enter()
        await slot.open()
        os.killpg(slot._worker._child.result().pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="was killed by SIGKILL"):
            await slot.reset(0, {"what": "good", "where": "step"})
        await slot.leave()
        assert await play(host, "good", "step") == ""
        await host.close()

    asyncio.run(scenario())
