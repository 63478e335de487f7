"""Worker processes for computations that must not run in this one: they hold the interpreter, or cannot be stopped.

A worker takes one call after another. A call that takes longer than its limit, or more memory, fails with
`RewardError`, and its worker is killed and replaced; the error is a `RewardLimitReached` if the call computed all the
time, or used up the memory, so that the machine is not to blame. Arguments and results are JSON. Workers end with this
process, and at the latest when the alarm goes off that they set before each call.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from headway.codec import JsonValue
from headway.errors import RewardError
from headway.processes.base import ChildSpec, PeerLost
from headway.processes.child_process import ChildProcess, spawn_isolated

_START_S = 30.0
"""How long a worker may take to start, and to import what it calls first."""
_OUT_OF_MEMORY = "out of memory"
_SLACK_S = 2.0
"""How much later than the caller's limit the alarm goes off: a caller that is still there kills on time."""


class RewardLimitReached(RewardError):
    """A call used up its processor time or its memory."""


class RewardWorkerPool:
    """A pool of at most `limit` processes, which are started when they are needed."""

    def __init__(self, limit: int, *, memory_mb: int = 2048) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[_Worker] = []
        self._memory_mb = memory_mb
        weakref.finalize(self, _end_all, self._idle)

    async def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """Call `module:function` in a worker. The limit counts from when the worker has imported the function."""
        async with self._slots:
            worker = self._take_idle() or await _Worker.start(self._memory_mb)
            result = await worker.call(function, args, timeout_s)
            self._idle.append(worker)
        if "error" in result:
            if result["error"] == _OUT_OF_MEMORY:
                raise RewardLimitReached(f"{function}: {_OUT_OF_MEMORY}")
            raise RewardError(f"{function}: {result['error']}")
        return result["value"]

    def _take_idle(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.can_answer():
                return worker
            worker.end()
        return None


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


class _Worker:
    """One process, used by one call at a time."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._fresh = True

    @classmethod
    async def start(cls, memory_mb: int) -> _Worker:
        spec = ChildSpec(
            name="reward worker",
            target=f"{__name__}:limit_process",
            host=f"{__name__}:RewardCalculator",
            args={"memory_mb": memory_mb},
            threads=None,
            log=Path(os.devnull),
        )
        try:
            # The modules are ours: no variable of the environment decides what a worker imports.
            return cls(await ChildProcess.start(spec, _START_S, spawn=spawn_isolated(("-I",))))
        except PeerLost as error:
            raise RewardError(str(error)) from error

    def can_answer(self) -> bool:
        """Whether it lives, and belongs to the event loop that runs now."""
        return self._child.alive and self._loop is asyncio.get_running_loop()

    def end(self) -> None:
        self._child.kill()

    async def call(self, function: str, args: Sequence[Any], timeout_s: float) -> Mapping[str, Any]:
        start_s, self._fresh = _START_S if self._fresh else 0.0, False
        used_s = _read_cpu_s(self._child.pid)
        try:
            async with asyncio.timeout(timeout_s + start_s) as limit:

                def restart_clock(note: Any) -> None:
                    nonlocal used_s
                    used_s = _read_cpu_s(self._child.pid)
                    with suppress(RuntimeError):  # the limit is over
                        limit.reschedule(self._loop.time() + timeout_s)

                self._child.subscribe(on_note=restart_clock)
                result: Mapping[str, Any] = await self._child.call("compute", function, JsonValue(args), timeout_s)
                return result
        except TimeoutError:
            used_s = _read_cpu_s(self._child.pid) - used_s
            self.end()
            reason = RewardLimitReached if used_s > timeout_s / 2 else RewardError
            raise reason(f"{function}: no verdict after {timeout_s} s") from None
        except PeerLost as error:
            raise RewardError(f"{function}: at its limit of time or memory: {error}") from None
        except BaseException:
            self.end()
            raise


def _read_cpu_s(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended, or on a system without `/proc`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def limit_process(args: Mapping[str, Any]) -> None:
    """Limit what this process may use. Runs in the worker, before the first call."""
    sys.setrecursionlimit(3000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    memory = args["memory_mb"] << 20
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ImportError, ValueError, OSError):
        return  # not on this system; the time limit still holds


class RewardCalculator:
    """Answers calls in a worker, one at a time."""

    def __init__(self, served: None, send_note: Callable[[Any], None]) -> None:
        self._send_note = send_note

    async def compute(self, function: str, args: Sequence[Any], timeout_s: float) -> JsonValue:
        """Call the function. A note says that its imports are done: from then on it is the call's time."""
        try:
            call = _import_function(function)
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _SLACK_S)
            self._send_note("started")
            return JsonValue({"value": call(*args)})
        except MemoryError:
            return JsonValue({"error": _OUT_OF_MEMORY})
        except Exception as error:
            return JsonValue({"error": f"{type(error).__name__}: {error}"[:500]})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@cache
def _import_function(path: str) -> Callable[..., Any]:
    """Import what is called, and run its module's `prepare_<function>` if there is one."""
    name, _, function = path.partition(":")
    module = importlib.import_module(name)
    getattr(module, f"prepare_{function}", lambda: None)()
    found: Callable[..., Any] = getattr(module, function)
    return found
