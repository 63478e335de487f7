"""Worker processes for computing that must not run here: it holds the interpreter, or cannot be stopped.

A worker takes one call after another. One that takes longer than its limit, or more memory, is killed and replaced;
the call fails with `RewardError`. Arguments and results are JSON. Workers end with us: when their input closes, and
at the latest when the alarm that they set before each call goes off.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from typing import Any

from headway.errors import RewardError
from headway.rewards.thread_limiter import ThreadLimiter

_START_S = 30.0
"""Added to the first limit of a worker: it imports what it calls."""


class RewardWorkerPool:
    """At most `limit` processes, started when they are needed."""

    def __init__(self, limit: int, *, memory_mb: int = 2048) -> None:
        self._threads = ThreadLimiter(limit, "reward worker")
        self._idle: list[_Worker] = []
        self._memory_mb = memory_mb
        weakref.finalize(self, _end_all, self._idle)

    async def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """`module:function` of ours with `args`, in a worker. The limit counts from when a worker takes it."""
        return await self._threads.run(self._call, function, args, timeout_s)

    def _call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        worker = self._idle.pop() if self._idle else _Worker(self._memory_mb)
        try:
            answer = worker.ask({"call": function, "args": args, "timeout_s": timeout_s}, timeout_s)
        except BaseException:
            worker.end()
            raise
        self._idle.append(worker)
        if "error" in answer:
            raise RewardError(f"{function}: {answer['error']}")
        return answer["result"]


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


class _Worker:
    """One process; used by one thread at a time."""

    def __init__(self, memory_mb: int) -> None:
        # the modules are ours: no variable of the environment decides what a worker imports
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:] = {path!r}; from headway.rewards.reward_worker import main; main({memory_mb})"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._fresh = True

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        payload = json.dumps(question).encode()
        try:
            self._send(len(payload).to_bytes(8, "big") + payload)
            limit = time.monotonic() + timeout_s + (_START_S if self._fresh else 0.0)
            self._fresh = False
            if self._read(1, limit) == b"s":  # started: imports are done, from here on it is the call's time
                limit = time.monotonic() + timeout_s
            answer: dict[str, Any] = json.loads(self._read(int.from_bytes(self._read(8, limit), "big"), limit))
        except TimeoutError:
            raise RewardError(f"{question['call']}: no verdict after {timeout_s} s") from None
        except (BrokenPipeError, EOFError):
            code = self._process.wait(timeout=5)
            raise RewardError(f"{question['call']}: its process died ({_cause(code)})") from None
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, count: int, limit: float) -> bytes:
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        while len(data) < count:
            ready, _, _ = select.select([fd], [], [], max(limit - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            part = os.read(fd, count - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def _cause(code: int) -> str:
    return f"signal {-code}, its limit of time or memory" if code < 0 else f"exit code {code}"
