"""The loop inside a worker process; see `workers`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_SLACK_S = 2.0
"""After the limit of the caller, who kills on time where he is still there."""


def main(memory_mb: int) -> None:
    """Answer calls until the input closes."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    _limit_memory(memory_mb)
    sys.setrecursionlimit(3000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        size = int.from_bytes(sys.stdin.buffer.read(8), "big")
        if not size:
            return
        question = json.loads(sys.stdin.buffer.read(size))
        reply = json.dumps(_answer(question, answers)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, len(reply).to_bytes(8, "big") + reply)


def _answer(question: dict[str, Any], answers: int) -> dict[str, Any]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    try:
        function = _function(question["call"])
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"] + _SLACK_S)
        _write(answers, b"s")
        return {"result": function(*question["args"])}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


@cache
def _function(path: str) -> Callable[..., Any]:
    """What is called; its module's `prepare`, where it has one, is not on the call's time."""
    name, _, function = path.partition(":")
    module = importlib.import_module(name)
    getattr(module, "prepare", lambda: None)()
    found: Callable[..., Any] = getattr(module, function)
    return found


def _limit_memory(memory_mb: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    except (ImportError, ValueError, OSError):
        return  # not on this system; the time limit still holds


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
