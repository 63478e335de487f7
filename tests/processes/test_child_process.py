"""Children answer, fail, are cancelled, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.codec import JsonValue
from headway.errors import ConfigError, ConfigErrors, TrainerError, TransferError
from headway.processes.base import ChildSpec, Peer, PeerFailed, PeerLost
from headway.processes.child_process import ChildProcess, WatchedProgram, spawn_isolated
from headway.weights.shared_memory import SharedSegment, remove_stale_segments

from ..contracts.cluster_contract import ClusterContract
from .targets import Stranger


def spec(target: str = "service", **options: Any) -> ChildSpec:
    return ChildSpec(name="child/0", target=f"tests.processes.targets:{target}", **options)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120.0):
            await scenario

    asyncio.run(bounded())


def running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while running(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class TestProcesses(ClusterContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        run(scenario)

    async def start(self, spec: ChildSpec) -> Peer:
        return await ChildProcess.start(spec)

    async def start_within(self, spec: ChildSpec, timeout_s: float) -> Peer:
        return await ChildProcess.start(spec, timeout_s)

    def end(self, peer: Peer) -> None:
        assert isinstance(peer, ChildProcess)
        os.kill(peer.pid, signal.SIGKILL)


def test_a_child_is_a_fresh_interpreter_with_its_own_threads_environment_and_session() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec(args={"a": [1, {"b": None}]}, threads=3, env={"COLOUR": "blue"}))
        found = await child.call("spec")
        assert found["args"] == {"a": (1, {"b": None})}
        assert found["environment"] == {
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "3",
            "OPENBLAS_NUM_THREADS": "3",
            "COLOUR": "blue",
        }
        assert found["session"] and not found["torch"] and found["main"] == "headway.processes.child_main"
        await child.close()
        assert not running(child.pid)

    run(scenario())


def test_errors_travel_by_name_and_the_child_goes_on() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        with pytest.raises(TrainerError, match="step 3 failed"):
            await child.call("fail", "ours")
        with pytest.raises(TrainerError, match="special"):
            await child.call("fail", "own subclass")
        with pytest.raises(PeerFailed, match="ZeroDivisionError: by nothing"):
            await child.call("fail", "theirs")
        with pytest.raises(ConfigError) as refused:
            await child.call("fail", "configuration")
        assert (refused.value.key, refused.value.value, refused.value.hint) == ("a.b", Path("x"), "be modest")
        with pytest.raises(ConfigErrors) as several:
            await child.call("fail", "configurations")
        assert [one.key for one in several.value.problems] == ["a", ""]
        for method, problem in (("unsendable", "object has no form"), ("nothing", "nothing"), ("_host", "_host")):
            with pytest.raises(PeerFailed, match=problem):
                await child.call(method)
        with pytest.raises(PeerFailed, match=r"cannot be asked.*has no form"):
            await child.call("echo", object())
        assert await child.call("echo", 1) == 1
        await child.close()

    run(scenario())


def test_whoever_waits_for_what_the_other_side_cannot_read_is_told() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        with pytest.raises(PeerFailed, match=r"answer of child/0 cannot be read: TypeError.*'Stranger'"):
            await child.call("stranger")
        other, stranger = await ChildProcess.start(spec()), Stranger.known()
        try:
            with pytest.raises(PeerFailed, match="'Stranger'"):
                await other.call("echo", stranger)
        finally:
            Stranger.forgotten()
        for one in (child, other):
            assert await one.call("echo", 1) == 1, "it lives"
            await one.close()
        child = await ChildProcess.start(spec(host="tests.processes.targets:Telling"))
        with pytest.raises(PeerLost):  # a note that is missing would be missed by nobody
            await child.call("stranger")

    run(scenario())


def test_a_child_that_ends_by_itself_says_how_and_what_it_last_wrote() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        waiting = asyncio.create_task(child.call("wait", "a"))
        with pytest.raises(PeerLost, match=r"child/0 .* exit code 3\n  \| last words"):
            await child.call("die", 3)
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost, match="exit code 3"):
            await child.call("echo", 1)
        assert not child.alive
        await child.close()

    run(scenario())


def test_a_killed_child_is_noticed_at_once_and_named_by_its_signal() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        waiting = asyncio.create_task(child.call("wait", "a"))
        await child.call("echo", 0)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="was killed by SIGKILL"):
            async with asyncio.timeout(20.0):
                await waiting
        await child.close()

    run(scenario())


def test_its_own_children_end_with_it() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        grandchild = await child.call("grandchild")
        os.kill(child.pid, signal.SIGKILL)
        await child.close()
        assert gone_within(grandchild)

    run(scenario())


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = tmp_path / "logs" / "child.log"
        for _ in range(2):
            child = await ChildProcess.start(spec(log=log))
            await child.close()
        assert log.read_text(encoding="utf-8").count("closed in order") == 2

    run(scenario())


def children() -> set[int]:
    """Of this process, those that have ended and wait for somebody to hear of it included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def test_a_target_that_fails_or_hangs_leaves_no_process() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="no such model"):
            await ChildProcess.start(spec("broken", args={"model": "x"}))
        with pytest.raises(ConfigError, match="has no nothing"):
            await ChildProcess.start(spec("nothing"))
        with pytest.raises(ConfigError, match="No module named 'nowhere'"):
            await ChildProcess.start(ChildSpec(name="child/0", target="nowhere:at_all"))
        with pytest.raises(PeerLost, match="not ready after"):
            await ChildProcess.start(spec("silent"), timeout_s=0.5)

    before = children()  # other tests share templates that are children too
    run(scenario())
    assert children() <= before


def test_what_cannot_start_is_refused_before_it_does() -> None:
    with pytest.raises(ConfigError, match="names no function"):
        ChildSpec(name="child/0", target="module")
    with pytest.raises(ConfigError, match="at least one"):
        ChildSpec(name="child/0", target="module:function", threads=0)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="not JSON"):
            await ChildProcess.start(spec(args={"a": object()}))

    run(scenario())


PARENT = """
import asyncio, sys
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess

async def main():
    spec = ChildSpec(name="child/0", target="tests.processes.targets:service")
    children = [await ChildProcess.start(spec) for _ in range(2)]
    blocked = asyncio.create_task(children[1].call("block"))
    await children[0].call("echo", 0)
    name = await children[0].call("hold", 1000)
    print(*(child.pid for child in children), name, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_and_no_memory_outlives_its_parent(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *pids, name = parent.stdout.readline().split()
    children = [int(pid) for pid in pids]
    assert len(children) == 2 and all(map(running, children))
    SharedSegment.attach(name).close()
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    assert all(gone_within(child) for child in children)
    with pytest.raises(TransferError):
        SharedSegment.attach(name)
    remove_stale_segments()
    places = ("/dev/shm", tempfile.gettempdir())
    assert not [path for place in places for path in Path(place).glob(f"headway-{children[0]}-*")]


def test_without_the_kernels_help_the_socket_alone_ends_a_child() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec())
        asyncio.create_task(child.call("block")).add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.05)
        child._closing = True  # it is not killed when its socket is closed
        child._protocol.close()
        assert await asyncio.to_thread(gone_within, child.pid)
        await child.close()

    run(scenario())


def test_a_contained_child_takes_processes_with_it_that_have_left_its_session() -> None:
    async def scenario() -> None:
        for end in ("kill", "close"):
            child = await ChildProcess.start(spec(contained=True))
            escaped = await child.call("escaped")
            assert running(escaped)
            child.kill() if end == "kill" else await child.close()
            assert await asyncio.to_thread(gone_within, escaped)
            await child.close()

    run(scenario())


def test_a_contained_child_that_is_killed_is_named_by_its_signal() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec(contained=True))
        with pytest.raises(PeerLost, match="was killed by SIGTERM"):
            await child.call("signal", int(signal.SIGTERM))
        await child.close()

    run(scenario())


def test_a_child_that_writes_more_than_its_limit_is_killed() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(spec(output_limit=1 << 20))
        with pytest.raises(PeerLost, match="printed more than 1 MB"):
            await child.call("chatter")
        await child.close()

    run(scenario())


def test_an_isolated_child_has_our_modules_and_no_variable_that_names_them() -> None:
    async def scenario() -> None:
        child = await ChildProcess.start(
            spec(args={"x": JsonValue([1, [2]])}, threads=None), spawn=spawn_isolated(("-s", "-P"))
        )
        assert await child.call("first_argument") == "list"
        assert await child.call("variable", "PYTHONPATH") == os.environ.get("PYTHONPATH", "")
        await child.close()

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_watched_program_and_all_that_it_has_started_end_when_they_are_told_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        note = tmp_path / "pid"
        script = f"setsid sleep 1000 & echo $! > {note}; trap '' TERM; sleep 1000"
        program = await WatchedProgram.start(["sh", "-c", script], env={}, output=subprocess.DEVNULL, grace_s=0.1)
        while not (note.exists() and note.read_text().strip()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not program.ending
        program.end()
        assert await program.wait() == -signal.SIGKILL
        assert await asyncio.to_thread(gone_within, int(note.read_text()))

    run(scenario())


LEAVES_PROCESSES = """
import os, subprocess, time
from headway.processes.parent_watchdog import adopt_orphans, kill_children, measure_contained

adopt_orphans()
inner = os.fork()
if not inner:
    for leave in ("sleep 600", "sleep 600 & sleep 600", "sleep 600 & exit", "exit"):
        subprocess.Popen(["sh", "-c", f"({leave}) & exit"]).wait()
    time.sleep(600)
deadline = time.monotonic() + 60
while True:
    used, count = measure_contained(inner)
    if count == 4 and used > 1 << 20 or time.monotonic() > deadline:
        break
    time.sleep(0.01)
print(count, used > 1 << 20, len(kill_children()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_that_have_left_a_contained_child_are_counted_and_ended_ones_forgotten() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_PROCESSES], capture_output=True, text=True, check=False)
    assert done.stdout.split()[:2] == ["4", "True"] and int(done.stdout.split()[2]) >= 4, (done.stdout, done.stderr)
