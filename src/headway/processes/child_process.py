"""Children: processes of our own that answer calls.

    child = await Child.start(ChildSpec(name="engine/0", target="package.module:function", host=…), timeout_s=60)

Guarantees: a child is a fresh interpreter that imports what its target needs and nothing of this program's main
module. It has a session of its own, so that Ctrl-C reaches only this process. It ends when this process does, however
that ended. When it ends by itself, everybody who waits for it is told at once how, with the last lines of its output,
and processes of its own that it left behind are killed. Does not restart anything, and does not know what a child is
for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from headway import errors
from headway.cluster.base import ChildSpec, PeerLost, open_output_file, read_last_lines
from headway.errors import ConfigError
from headway.processes.peer_messages import MessageProtocol, PendingCalls, encode_message

__all__ = ["ChildProcess", "ChildSpec"]

LOOPBACK = "127.0.0.1"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Read by libraries when they are loaded. On ARM, oneDNN listens to nothing else."""
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads without work sleep: whoever shares the cores may have them."""
_END_S = 5.0
"""How long a child may take to end after it was asked to, before it is killed."""


class ProcessHandle(Protocol):
    """What `subprocess.Popen` and other ways of making processes have in common."""

    pid: int

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        ...


SpawnProcess = Callable[[ChildSpec, socket.socket, IO[bytes]], ProcessHandle]
"""The child's end of the socket, and where its output goes."""


class ChildProcess:
    """A `Peer` on this machine. Made by `start`."""

    def __init__(self, spec: ChildSpec, process: ProcessHandle, output: IO[bytes]) -> None:
        self.spec = spec
        self.pid = process.pid
        self.host = LOOPBACK
        self.on_note: Callable[[Any], None] = lambda note: None
        self.on_end: Callable[[str], None] = lambda how: None
        self._process = process
        self._output = output
        self._wire = MessageProtocol(self._message, self._lost)
        self._calls = PendingCalls(spec.name, self._wire.send)
        self._connected = True
        self._closing = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How it ended; set when it was reaped."""

    @classmethod
    async def start(
        cls, spec: ChildSpec, timeout_s: float = 120.0, *, spawn: SpawnProcess | None = None
    ) -> ChildProcess:
        """Returns when the target has returned. Raises what it raised, or `PeerLost`.

        `spawn` makes the process in another way than from a fresh interpreter.
        """
        try:
            encode_message(dict(spec.args))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"not JSON: {error}", key=f"{spec.name}.args", value=dict(spec.args)) from error
        ours, theirs = socket.socketpair()
        with theirs:
            output = open_output_file(spec.log)
            process = (spawn or spawn_child)(spec, theirs, output)
        child = cls(spec, process, output)
        await asyncio.get_running_loop().create_connection(lambda: child._wire, sock=ours)
        try:
            async with asyncio.timeout(timeout_s):
                await child.call("start", make_start_message(spec))
        except TimeoutError:
            late = PeerLost(f"{spec.name} was not ready after {timeout_s:g} s{read_last_lines(child._output)}")
            await child._end()
            raise late from None
        except BaseException:
            await child._end()
            raise
        return child

    @property
    def alive(self) -> bool:
        return self._connected and not self._closing

    async def call(self, method: str, *args: Any) -> Any:
        if self._ended.done():
            raise PeerLost(self._ended.result())
        return await self._calls.call(method, *args)

    async def close(self, grace_s: float = _END_S) -> None:
        first, self._closing = not self._closing, True
        try:
            if first:
                with suppress(Exception):
                    async with asyncio.timeout(grace_s):
                        await self.call("close")
                self._wire.close()
            await asyncio.wait([self._ended], timeout=grace_s)
        finally:
            self.kill()
        await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _end(self) -> None:
        self.kill()
        await asyncio.shield(self._ended)

    def _message(self, message: Any) -> None:
        kind, *rest = message
        if kind == "note":
            self.on_note(rest[0])
            return
        self._calls.answered(kind, *rest)

    def _lost(self) -> None:
        """The socket is closed on one side: the process has ended, or is about to."""
        self._connected = False
        if not self._closing:
            self.kill()
        reaped = asyncio.get_running_loop().run_in_executor(None, _reaped, self._process)
        reaped.add_done_callback(lambda done: None if done.cancelled() else self._over(done.result()))

    def _over(self, code: int) -> None:
        how = f"{self.spec.name} (process {self.pid}) {_ending(code)}{read_last_lines(self._output)}"
        self._output.close()
        self._ended.set_result(how)
        self.on_end(how)
        self._calls.lose(how)


def spawn_child(spec: ChildSpec, theirs: socket.socket, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """By this thread: the kernel ends a child together with the thread that made it."""
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))  # noqa: PTH109
    return subprocess.Popen(
        [sys.executable, "-m", "headway.processes.child_main", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **make_child_environment(spec)},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def make_child_environment(spec: ChildSpec) -> dict[str, str]:
    """What a process that runs `spec` has in its environment before it loads any library."""
    return {**dict.fromkeys(_THREADS, str(spec.threads)), **_PASSIVE, **spec.env}


def make_start_message(spec: ChildSpec) -> Mapping[str, Any]:
    """The argument of `start`."""
    return {"target": spec.target, "host": spec.host, "args": dict(spec.args), "threads": spec.threads}


def _reaped(process: ProcessHandle) -> int:
    """Its exit code, once it has ended and its group with it. On a thread.

    The group is killed before the process is reaped: until then its number belongs to nobody else.
    """
    with suppress(ChildProcessError):  # made by somebody else for us
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


OLDEST_PYTHON = (3, 11)
"""Python that the package runs under."""


def spawn_with_interpreter(python: str) -> SpawnProcess:
    """How children are made by `python`."""

    def spawned(spec: ChildSpec, theirs: socket.socket, output: IO[bytes]) -> ProcessHandle:
        return subprocess.Popen(
            [python, "-P", "-m", "headway.processes.child_main", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": _alone().name, "PYTHONUNBUFFERED": "1", **make_child_environment(spec)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    return spawned


@cache
def _alone() -> tempfile.TemporaryDirectory[str]:
    """A directory with this package in it; removed when this process ends."""
    made = tempfile.TemporaryDirectory(prefix="headway-path-")
    package = Path(errors.__file__).parent
    (Path(made.name) / package.name).symlink_to(package, target_is_directory=True)
    return made
