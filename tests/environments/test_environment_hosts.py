"""Where environments are played: here on threads, or in worker processes. Both behave the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from headway.environments import worker_host
from headway.environments.environment_output import MAX_PRINTED_CHARACTERS, StandardStreamFilter
from headway.environments.environment_registry import make_environment
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import Reply
from headway.environments.worker_host import WorkerEnvironmentHost
from headway.errors import EnvironmentFailed

WORLDS = "tests.environments.sample_environments"
Host = LocalEnvironmentHost | WorkerEnvironmentHost
KINDS = ("here", "workers")


def host(kind: str, name: str, places: int = 2, **options: Any) -> Host:
    path = f"{WORLDS}:{name}"
    if kind == "here":
        return LocalEnvironmentHost(path, lambda: make_environment(path, **options), max_episodes=places)
    return WorkerEnvironmentHost(path, options, workers=places)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(timed())


async def entered(place: Host) -> Any:
    slot = place.make_slot()
    await slot.enter()
    return slot


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_is_played_and_an_environment_that_says_so_serves_again(kind: str) -> None:
    async def scenario() -> None:
        place = host(kind, "Guess", most=5)
        for episode in (1, 2):
            slot = await entered(place)
            traits = await slot.open()
            assert (traits.instructions, traits.max_steps, traits.stop) == ("Guess a digit.", 4, ("\n",))
            assert (await slot.reset(9, {})).text == f"Episode {episode}: a digit up to 5?"
            assert await slot.step("x") == Reply("A digit!", valid=False)
            assert await slot.step("3") == Reply("Right.", reward=1.0, done=True, success=True)
            await slot.leave()
        slot = await entered(place)
        await slot.open()
        await slot.reset(9, {})
        await slot.leave()  # in the middle, as when a group is full
        slot = await entered(place)
        await slot.open()
        assert (await slot.reset(9, {})).text.startswith("Episode 4:")
        await slot.leave()
        await place.close()

    run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_coroutines_are_played_too(kind: str) -> None:
    async def scenario() -> None:
        place = host(kind, "Async")
        slot = await entered(place)
        await slot.open()
        assert (await slot.reset(3, {"a": 1})).text == "seed 3 ['a']"
        assert await slot.step("end") == Reply("end", reward=0.5, done=True, success=True)
        await slot.leave()
        await place.close()

    run(scenario)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "where", "complaint"),
    [
        ("raises", "reset", "a bad day"),
        ("raises", "step", "a bad day"),
        ("nonsense", "reset", "reset returned {'observation': 3}, not a text or a Reply"),
        ("nonsense", "step", "step returned {'observation': 3}, not a Reply"),
        ("infinite", "step", "gave the reward inf, which is no finite number"),
        ("unspeakable", "step", "said 2000000 characters"),
        ("exits", "step", "SystemExit: enough"),
    ],
)
def test_a_bad_environment_fails_with_a_reason_and_the_next_one_plays(
    kind: str, what: str, where: str, complaint: str
) -> None:
    async def scenario() -> None:
        place = host(kind, "Bad", places=1, what=what, where=where)
        for _ in range(2):
            slot = await entered(place)
            await slot.open()
            with pytest.raises((EnvironmentFailed, ValueError)) as raised:
                await slot.reset(0, {})
                await slot.step("go")
            assert complaint in str(raised.value)
            await slot.leave()
        await place.close()

    run(scenario)


def test_a_call_that_never_returns_is_stopped_where_it_is_python() -> None:
    async def scenario() -> None:
        place = host("here", "Bad", places=1, what="loops")
        before = threading.active_count()
        await _given_up(place)
        _until(lambda: threading.active_count() <= before)  # its thread has ended
        slot = await entered(place)  # and its place is free
        await slot.leave()
        await place.close()

    run(scenario)


def test_a_call_that_hangs_here_is_given_up_and_said_to_be_still_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = host("here", "Bad", places=1, what="hangs")
        with pytest.raises(EnvironmentFailed, match="still has its thread; play it in worker processes"):
            await _given_up(place)
        slot = await entered(place)
        await slot.leave()
        await place.close()

    run(scenario)


def test_a_worker_in_which_a_call_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = _below(os.getpid())
        place = host("workers", "Bad", places=1, what="hangs", note=str(tmp_path / "hangs"))
        assert isinstance(place, WorkerEnvironmentHost)
        await _given_up(place)
        assert _below(os.getpid()) == before, "nothing of it is left"
        slot = await entered(place)
        await slot.open()
        assert (await slot.reset(0, {})).text == "Go."
        await slot.leave()
        await place.close()
        assert _below(os.getpid()) == before

    run(scenario)


async def _given_up(place: Host) -> None:
    """As the scheduler does when an answer takes too long, or nobody wants it any more."""
    slot = await entered(place)
    await slot.open()
    await slot.reset(0, {})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await slot.step("go")
    await slot.leave()


def test_a_worker_that_dies_says_how_and_what_it_said_last() -> None:
    async def scenario() -> None:
        place = host("workers", "Bad", places=1, what="dies")
        slot = await entered(place)
        await slot.open()
        await slot.reset(0, {})
        with pytest.raises(EnvironmentFailed, match=r"worker process .* exit code 3: last words"):
            await slot.step("go")
        await slot.leave()
        await place.close()

    run(scenario)


def test_an_episode_beside_one_that_blocks_its_worker_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "_RELEASE_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        place = WorkerEnvironmentHost(f"{WORLDS}:Blocking", {}, workers=1, episodes_per_worker=2)
        blocked, beside = await entered(place), await entered(place)
        for slot in (blocked, beside):
            await slot.open()
            await slot.reset(0, {})
        waiting = asyncio.create_task(beside.step("wait"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await blocked.step("block")
        await blocked.leave()
        with pytest.raises(EnvironmentFailed, match="because it did not release an episode within"):
            await waiting
        await beside.leave()
        await place.close()

    run(scenario)


def test_what_an_environment_starts_ends_with_its_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = host("workers", "Bad", places=1, what="leaks", note=str(tmp_path / "pid"))
        slot = await entered(place)
        await slot.open()
        await slot.reset(0, {})
        assert (await slot.step("go")).text == "leaked"
        leaked = int((tmp_path / "pid").read_text())
        assert _is_there(leaked)
        await slot.leave()
        await place.close()
        assert not _is_there(leaked)

    run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_printing_gigabytes_is_not_heard_and_ends_the_episode(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = StringIO()
    monkeypatch.setattr(sys, "stdout", heard)

    async def scenario() -> None:
        muffler = StandardStreamFilter()
        place = host(kind, "Bad", places=1, what="prints")
        slot = await entered(place)
        await slot.open()
        await slot.reset(0, {})
        with pytest.raises(EnvironmentFailed, match=f"printed more than {MAX_PRINTED_CHARACTERS >> 20} MB"):
            await slot.step("go")
        await slot.leave()
        print("heard")
        await place.close()
        muffler.close()

    run(scenario)
    assert heard.getvalue() == "heard\n" and sys.stdout is heard


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_its_places_are_played_at_once(kind: str) -> None:
    async def scenario() -> None:
        place = host(kind, "Guess", places=2)
        first, second = await entered(place), await entered(place)
        third = asyncio.ensure_future(entered(place))
        await asyncio.sleep(0)
        assert not third.done()
        await first.leave()
        slot = await third
        await slot.leave()
        await second.leave()
        await place.close()

    run(scenario)


def test_a_worker_with_several_episodes_keeps_the_others_when_one_is_given_up() -> None:
    async def scenario() -> None:
        place = WorkerEnvironmentHost(f"{WORLDS}:Bad", {"what": "loops"}, workers=1, episodes_per_worker=2)
        staying = await entered(place)
        await staying.open()
        await _given_up(place)
        assert (await staying.reset(0, {})).text == "Go."
        await staying.leave()
        await place.close()

    run(scenario)


def test_workers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed without a chance to clean up, in the middle of a call that hangs."""
    note = tmp_path / "hangs"
    script = f"""
import asyncio
from headway.environments.worker_host import WorkerEnvironmentHost
async def main():
    host = WorkerEnvironmentHost("{WORLDS}:Bad", {{"what": "hangs", "note": {str(note)!r}}}, workers=1)
    slot = host.make_slot()
    await slot.enter(); await slot.open(); await slot.reset(0, {{}}); await slot.step("go")
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    _until(note.exists)
    below = _below(process.pid)
    assert len(below) == 2
    process.kill()
    process.wait()
    _until(lambda: not any(map(_is_there, below)))


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _below(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(entry.read_text().rpartition(")")[2].split()[1]), []).append(int(entry.parent.name))
        except OSError:
            continue
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def test_an_environment_is_closed_once_after_whatever_it_was_doing() -> None:
    closed: list[str] = []

    class Slow:
        def __init__(self, name: str) -> None:
            self.name = name

        def reset(self, seed: int, data: object) -> str:
            return "Go."

        def step(self, action: str) -> Reply:
            while action == "loop":
                pass
            if action == "fail":
                raise ValueError
            return Reply(done=action == "end")

        def close(self) -> None:
            closed.append(self.name)

    async def scenario() -> None:
        for action in ("end", "go", "fail", "loop"):
            place = LocalEnvironmentHost("slow", lambda name=action: Slow(name))  # type: ignore[misc]
            slot = await entered(place)
            await slot.open()
            await slot.reset(0, {})
            with suppress(ValueError, TimeoutError):
                async with asyncio.timeout(0.05):
                    await slot.step(action)
            await slot.leave()
            await place.close()

    run(scenario)
    assert closed == ["end", "go", "fail", "loop"]
