"""Starts child processes that answer calls, and programs of others that end with this process.

    child = await ChildProcess.start(ChildSpec(name="engine/0", target="package.module:function", host=…), timeout_s=60)

Guarantees: a child is a fresh interpreter that imports what its target needs and nothing of this program's main
module. It has a session of its own, so that Ctrl-C reaches only this process. It ends when this process does, however
that ended. When it ends by itself, every waiting call fails at once with how it ended and the last lines of its output,
and processes that it left behind are killed. Nothing is restarted here; `RestartablePeer` does that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from headway import errors
from headway.codec import encode
from headway.errors import ConfigError
from headway.processes import parent_watchdog
from headway.processes.base import ChildSpec
from headway.processes.parent_watchdog import MEMORY_LIMIT_CODE, MOST_PROCESSES, PROCESS_LIMIT_CODE, SIGNAL_BASE
from headway.processes.peer_messages import CallingPeer, MessageProtocol
from headway.processes.process_output import ProcessOutput
from headway.processes.worker_guard import FILES_CLOSED_CODE

LOOPBACK = "127.0.0.1"
OLDEST_PYTHON = (3, 11)
"""The oldest Python that the package runs under."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Read by libraries when they are loaded. On ARM, oneDNN reads nothing else."""
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Lets threads without work sleep, so that other processes can use the cores."""
_END_S = 5.0
"""How long a child may take to end after it was asked to, before it is killed."""
_MAIN = "headway.processes.child_main"
LIVE_PROCESSES: set[int] = set()
"""Processes that this module has started and that have not ended. Whoever started them ends them."""


class ProcessHandle(Protocol):
    """A process: a `subprocess.Popen`, or one that was made in another way."""

    pid: int

    def wait(self) -> int:
        """Return the exit code, or minus the signal that ended the process."""


SpawnProcess = Callable[[ChildSpec, socket.socket, int], ProcessHandle]
"""Makes the process of a child, given the child's end of the socket and the descriptor that it writes its output to."""


class ChildProcess(CallingPeer):
    """A `Peer` in a process on this machine. Made by `start`."""

    def __init__(self, spec: ChildSpec) -> None:
        self._protocol = MessageProtocol(self._take_message, self._lose_connection)
        output = ProcessOutput(spec.log, limit=spec.output_limit, on_limit=self.kill)
        super().__init__(spec, output, self._protocol.send, LOOPBACK)
        self._process: ProcessHandle | None = None
        self._connected = True

    @classmethod
    async def start(
        cls, spec: ChildSpec, timeout_s: float = 120.0, *, spawn: SpawnProcess | None = None
    ) -> ChildProcess:
        """Start a child and return when its target has returned. Raises what the target raised, or `PeerLost`.

        `spawn` makes the process in another way than from a fresh interpreter with the modules of this one.
        """
        check_arguments(spec)
        child = cls(spec)
        await child._launch(spawn or spawn_child)
        await child._bring_up(lambda: child.call("start", make_start_message(spec)), timeout_s)
        return child

    async def _launch(self, spawn: SpawnProcess) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(self.spec, theirs, self._output.fileno())
        self.pid = self._process.pid
        LIVE_PROCESSES.add(self.pid)
        await asyncio.get_running_loop().create_connection(lambda: self._protocol, sock=ours)
        await self._output.listen()

    @property
    def alive(self) -> bool:
        return self._connected and not self._closing

    async def close(self, grace_s: float = _END_S) -> None:
        first, self._closing = not self._closing, True
        try:
            if first:
                with suppress(Exception):
                    async with asyncio.timeout(grace_s):
                        await self.call("close")
                self._protocol.close()
            await asyncio.wait([self._ended], timeout=grace_s)
        finally:
            self.kill()
        await self._wait_for_end()

    async def dump_stacks(self, within_s: float = 0.5) -> str:
        """Let the child write where its threads are, also while it holds the interpreter, and return the text.

        The child has called `write_stacks_on_request`; a child that has not is ended by this.
        """
        if self._ended.done():
            return ""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGUSR1)
        return await self._output.read_next(within_s)

    def kill(self) -> None:
        if self._ended.done():
            return
        if not self.spec.contained:
            self._kill_group()
        elif self._connected:
            self._protocol.abort()  # its outer process kills everything below itself
            asyncio.get_running_loop().call_later(_END_S, self._kill_group)

    def _kill_group(self) -> None:
        if not self._ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _wait_for_end(self) -> None:
        await asyncio.shield(self._ended)

    def _lose_connection(self) -> None:
        """The socket is closed on one side: the process has ended, or is about to."""
        if not self._closing:
            self.kill()
        self._connected = False
        assert self._process is not None
        reaped = asyncio.get_running_loop().run_in_executor(None, _reap, self._process)
        reaped.add_done_callback(lambda done: None if done.cancelled() else self._end_with(done.result()))

    def _end_with(self, code: int) -> None:
        LIVE_PROCESSES.discard(self.pid)
        if self.spec.contained and code > SIGNAL_BASE:
            code = SIGNAL_BASE - code
        how = describe_exit(code)
        if self._output.over_limit:
            how = f"was killed because it printed more than {self.spec.output_limit >> 20} MB"
        elif self.spec.contained and code == FILES_CLOSED_CODE:
            how = "ended because its files were closed"
        elif self.spec.memory_mb and code == MEMORY_LIMIT_CODE:
            how = f"was killed because it used more than {self.spec.memory_mb:,} MB of memory"
        elif self.spec.contained and code == PROCESS_LIMIT_CODE:
            how = f"was killed because it left more than {MOST_PROCESSES:,} processes at work"
        self._finish(f"process {self.pid}", how)


def count_usable_cores() -> int:
    """Return the number of cores that this process and its children may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_arguments(spec: ChildSpec) -> None:
    """Raise `ConfigError` if the arguments of a child cannot be sent to it."""
    try:
        encode(dict(spec.args))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"not JSON: {error}", key=f"{spec.name}.args", value=dict(spec.args)) from error


def make_child_environment(spec: ChildSpec) -> dict[str, str]:
    """Return the variables that a process of `spec` needs before it loads any library."""
    threads = {} if spec.threads is None else {**dict.fromkeys(_THREADS, str(spec.threads)), **_PASSIVE}
    return {**threads, **spec.env}


def make_start_message(spec: ChildSpec) -> Mapping[str, Any]:
    """Return the argument of the child's first call, `start`."""
    return {"target": spec.target, "host": spec.host, "args": dict(spec.args), "threads": spec.threads}


def choose_memory_limit_mb() -> int:
    """Return half of the memory that this machine, or the control group of this process, has; 0 if that is unknown."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=0) >> 21


def describe_exit(code: int) -> str:
    """Say in words how a process ended, from its exit code or minus the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def spawn_child(spec: ChildSpec, theirs: socket.socket, output: int) -> ProcessHandle:
    """Start a fresh interpreter with the modules of this one, by this thread.

    The kernel kills a child together with the thread that made it.
    """
    paths = os.pathsep.join(dict.fromkeys(_list_module_paths()))
    return _spawn(["-m", _MAIN], spec, theirs, output, {"PYTHONPATH": paths})


def spawn_isolated(flags: Sequence[str]) -> SpawnProcess:
    """Return a way to start children whose environment has no variable that leads Python to our modules.

    So programs that the child starts are not disturbed. `flags` are options of the interpreter.
    """

    def spawn(spec: ChildSpec, theirs: socket.socket, output: int) -> ProcessHandle:
        code = f"import sys; sys.path[:] = {_list_module_paths()!r}; from {_MAIN} import main; main(*sys.argv[1:])"
        return _spawn([*flags, "-c", code], spec, theirs, output, {})

    return spawn


def spawn_with_interpreter(python: str) -> SpawnProcess:
    """Return a way to start children under another interpreter, whose libraries are others than ours.

    Such a child finds this package and nothing else of ours: the package may lie among libraries which that interpreter
    has in other versions. So its path has a directory with a link to the package. The interpreter must be at least
    `OLDEST_PYTHON`, and have PyYAML where the child reads configurations.
    """

    def spawn(spec: ChildSpec, theirs: socket.socket, output: int) -> ProcessHandle:
        return _spawn(
            ["-P", "-m", _MAIN], spec, theirs, output, {"PYTHONPATH": make_package_directory().name}, python=python
        )

    return spawn


def _spawn(
    arguments: list[str],
    spec: ChildSpec,
    theirs: socket.socket,
    output: int,
    env: Mapping[str, str],
    python: str = sys.executable,
) -> ProcessHandle:
    options = [f"contained={spec.memory_mb}"] if spec.contained else []
    return subprocess.Popen(
        [python, *arguments, str(theirs.fileno()), str(os.getpid()), *options],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **env, "PYTHONUNBUFFERED": "1", **make_child_environment(spec)},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def _list_module_paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]  # noqa: PTH109


@cache
def make_package_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory with nothing but this package in it. It is removed when this process ends."""
    made = tempfile.TemporaryDirectory(prefix="headway-path-")
    package = Path(errors.__file__).parent
    (Path(made.name) / package.name).symlink_to(package, target_is_directory=True)
    return made


def _reap(process: ProcessHandle) -> int:
    """Wait for the end of a process and of its group, and return its exit code. Runs on a thread.

    The group is killed before the process is reaped: until then no other process can have its number.
    """
    with suppress(ChildProcessError):  # another process has made it for us
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


class WatchedProgram:
    """A program that is not Headway's, which ends with this process, however that ended. Made by `start`.

    A watchdog stands between the two: see `parent_watchdog`.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self.pid = process.pid
        """Process of the watchdog."""
        self.stdout = process.stdout
        self._process, self._lifeline = process, lifeline

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], output: int, grace_s: float = 0.0
    ) -> WatchedProgram:
        """Start a command. It may take `grace_s` to end when it is told to. Raises `OSError`.

        `output` is a descriptor that it writes to, or `subprocess.PIPE`; `env` is added to our environment.
        """
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(*parent_watchdog.COMMAND, "run", str(theirs), str(grace_s), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **env},
                pass_fds=[theirs],
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours)

    @property
    def ending(self) -> bool:
        """Whether it was told to end."""
        return self._lifeline < 0

    def end(self) -> None:
        """Tell the program to end, and everything that it has started. Idempotent."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    async def wait(self) -> int:
        """Wait for the end. Returns the exit code, or minus the signal that ended the program."""
        code = await self._process.wait()
        return code if code <= SIGNAL_BASE else SIGNAL_BASE - code
