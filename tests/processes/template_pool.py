"""Children that start fast: importing a model's libraries takes seconds, so tests fork a process that has done it.

Each child is a process of its own with its own session and socket, as those of `ChildProcess.start`; it only skips the
imports. The template runs no torch operation itself, and forks from its only thread.
"""

from __future__ import annotations

import array
import asyncio
import gc
import importlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from headway.processes import child_main
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess

_WORD = struct.Struct("<ci")
_MODULES = ("tests.contracts.remote_targets", "tests.engines.factory", "tests.trainers.factory")


class Pool:
    """Give `start` to whoever starts children; run everything on the pool's loop."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported before children are forked, beside the usual ones."""
        self._modules = modules
        self._runner = asyncio.Runner()
        self._template: Template | None = None

    def run(self, scenario: Coroutine[Any, Any, None], timeout_s: float = 300.0) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(timeout_s):
                await scenario

        if self._template is None:
            self._template = Template(*self._modules)
        self._runner.run(bounded())

    async def start(self, spec: ChildSpec, timeout_s: float = 120.0) -> ChildProcess:
        assert self._template is not None
        return await ChildProcess.start(spec, timeout_s, spawn=self._template.spawn)

    def close(self) -> None:
        """End its processes. It may be used again: tests of a module may reach a worker after the others have ended."""
        self._runner.close()
        self._runner = asyncio.Runner()
        if self._template is not None:
            self._template.close()
            self._template = None


class Template:
    """A process that has imported everything, and forks on request."""

    def __init__(self, *modules: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.processes.template_pool", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._turn = threading.Lock()
        assert ours.recv(1) == b"r"

    def spawn(self, spec: ChildSpec, theirs: socket.socket, output: int) -> Forked:
        return Forked(self._ask(b"f", 0, [theirs.fileno(), output]), self)

    def wait(self, pid: int) -> int:
        return self._ask(b"w", pid, [])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, kind: bytes, number: int, descriptors: list[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._turn:
            self._socket.sendmsg([_WORD.pack(kind, number)], rights)
            answer: int = _WORD.unpack(self._socket.recv(_WORD.size, socket.MSG_WAITALL))[1]
        return answer


class Forked:
    """One of its children: a `Process`."""

    def __init__(self, pid: int, template: Template) -> None:
        self.pid = pid
        self._template = template

    def wait(self) -> int:
        return self._template.wait(self.pid)


def serve(end: socket.socket, modules: Sequence[str]) -> NoReturn:
    """The template's main loop: fork, and reap."""
    for name in (*_MODULES, *modules):
        importlib.import_module(name)
    gc.freeze()  # what was imported is not looked through again by every child, nor copied for it
    template = os.getpid()
    end.sendall(b"r")
    while True:
        word, descriptors, _, _ = socket.recv_fds(end, _WORD.size, 2)
        if not word:
            os._exit(0)
        kind, number = _WORD.unpack(word)
        if kind == b"w":
            end.sendall(_WORD.pack(b"w", os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
            continue
        pid = os.fork()
        if not pid:
            end.close()
            become(descriptors[0], descriptors[1], template)
        for one in descriptors:
            os.close(one)
        end.sendall(_WORD.pack(b"f", pid))


def become(descriptor: int, output: int, parent: int) -> NoReturn:
    """In the fork: the same as a child that was started."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    child_main.main(descriptor, parent)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
