"""Servers of our own: they come up, are missed when they end, and end with us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")

from headway.engines.base import Progress
from headway.engines.servers.server_process import LaunchedServer
from headway.errors import EngineCrashed
from headway.types import FinishReason

from . import factory
from .factory import FAST, Site

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def standin(port: int, **environment: str) -> tuple[list[str], Mapping[str, str]]:
    line = [sys.executable, "-m", "tests.engine_servers.fake_servers", "vllm", "--port", str(port)]
    return line, {"PYTHONPATH": os.pathsep.join(sys.path), **environment}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int, within_s: float = 10.0) -> bool:
    return gone_from(Path(f"/proc/{pid}"), within_s)


def gone_from(path: Path, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@LINUX
def test_a_server_that_is_killed_is_missed_at_once_and_comes_back_empty(tmp_path: Path) -> None:
    async def scenario() -> None:
        site, log = Site("vllm"), tmp_path / "logs" / "server.log"
        try:
            server = LaunchedServer("engine/0", standin, log=log)
            engine = site.over(server, "engine/0", FAST)
            await factory.serve(engine, 0)
            (first,) = children(server.pid)
            progress = Progress(on_chunk=lambda actions: os.kill(first, signal.SIGKILL) if 20 in actions else None)
            with pytest.raises(EngineCrashed, match="SIGKILL"):
                await engine.generate(factory.request(), progress)
            assert list(progress.actions[:17]) == list(range(4, 21))
            with pytest.raises(EngineCrashed, match="SIGKILL"):
                await engine.generate(factory.request(), Progress())
            await engine.restart()
            await factory.serve(engine, 1)
            assert await engine.generate(factory.request(), progress) is FinishReason.STOP
            assert list(progress.actions) == list(range(4, 44))
            guard, (second,) = server.pid, children(server.pid)
        finally:
            await site.close()
        assert gone(guard) and gone(first) and gone(second)
        assert log.read_text().count("fake server on") == 2

    factory.run(scenario())


def test_a_server_that_does_not_come_up_shows_its_last_lines_and_what_came_before_them() -> None:
    async def scenario() -> None:
        site = Site("vllm")
        try:
            server = LaunchedServer("engine/0", lambda port: standin(port, STANDIN_FAILS="1"))
            with pytest.raises(EngineCrashed, match=r"loading weights\n  \| RuntimeError: no kernel") as crash:
                await site.over(server, "engine/0", FAST).start()
            assert "exit code 1\n  | OSError: no such file\n  | …\n  | traceback" in str(crash.value), (
                "the cause comes first"
            )
        finally:
            await site.close()

    factory.run(scenario())


PARENT = """
import asyncio, sys, time
from headway.engines.servers.server_process import LaunchedServer

async def main():
    stubborn = "trap '' TERM; sleep 1000 & echo $! > CHILD; wait; sleep 1000".replace("CHILD", sys.argv[1])
    server = LaunchedServer("engine/0", lambda port: (["sh", "-c", stubborn], {}), grace_s=0.2)
    await server.start(print)
    print(server.pid, flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


@LINUX
def test_a_server_ends_with_us_and_all_its_children_do_however_we_end(tmp_path: Path) -> None:
    child = tmp_path / "child"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(child)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        deadline = time.monotonic() + 10.0
        while not (child.exists() and child.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        server, grandchild = children(guard)[0], int(child.read_text())
        parent.kill()
    assert gone(guard) and gone(server) and gone(grandchild)


SHARING = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=16)
print(memory.name, flush=True)
time.sleep(1000)
"""


@LINUX
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_shared_memory_of_a_server_that_ends_is_taken_away(tmp_path: Path, how: str) -> None:
    log = tmp_path / "server.log"

    async def scenario() -> None:
        server = LaunchedServer("engine/0", lambda port: ([sys.executable, "-c", SHARING], {}), log=log)
        await server.start(lambda how: None)
        while not log.read_text().endswith("\n"):  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.01)
        if how == "killed":
            os.kill(children(server.pid)[0], signal.SIGKILL)
            assert "SIGKILL" in await server.wait_for_end(10.0)
        await server.close()

    factory.run(scenario())
    assert gone_from(Path("/dev/shm") / log.read_text().split()[0])
