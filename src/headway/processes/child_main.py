"""The main program of a child: `python -m headway.processes.child_main <socket> <parent>`.

It imports its target, serves what that returns until the socket is closed, and ends. A thread that does nothing else
watches the socket, so that it ends also while a long computation holds the event loop; on Linux the kernel ends it
with its parent in any case.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from headway.errors import ConfigError, HeadwayError
from headway.processes.peer_messages import MessageProtocol, encode_error

_PR_SET_PDEATHSIG = 1

SendNote = Callable[[Any], None]
"""Sends a note to the parent. From the event loop's thread only."""


class CallServer:
    """Answers calls with the methods of a host, each in a task of its own, begun in the order of the calls."""

    def __init__(self, group: asyncio.TaskGroup, send: Callable[[Any], None]) -> None:
        self._host: Any = None
        self._group = group
        self._send = send
        """Raises `TypeError` or `ValueError` for what cannot travel."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def message(self, message: Any) -> None:
        """A call, that one is no longer wanted, or that one could not be read."""
        if message[0] == "unread":
            _, _, number, why = message
            self._send(("fail", number, {"error": "", "message": f"cannot be read here: {why}"}))
            return
        kind, number, *rest = message
        if kind == "cancel":
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()
            return
        method, args = rest
        task = self._tasks[number] = self._group.create_task(self._answer(number, method, args), name=method)
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = await (self._start(*args) if method == "start" else self._called(method, args))
            answer = ("done", number, value)
        except asyncio.CancelledError:
            answer = ("fail", number, {"error": "", "message": f"{method} was cancelled"})
        except Exception as error:
            if not isinstance(error, HeadwayError):
                traceback.print_exc()
            answer = ("fail", number, encode_error(error))
        try:
            self._send(answer)
        except (TypeError, ValueError) as error:
            traceback.print_exc()
            self._send(("fail", number, encode_error(error)))

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return await getattr(self._host, method)(*args)

    async def _start(self, spec: dict[str, Any]) -> None:
        target = _named(spec["target"])
        _set_torch_threads(spec["threads"])
        made = target(spec["args"])
        if inspect.isawaitable(made):
            made = await made
        _set_torch_threads(spec["threads"])  # it may have come with the target's own imports
        host = _named(spec["host"]) if spec["host"] else lambda made, tell: made
        self._host = host(made, lambda note: self._send(("note", note)))
        gc.collect()
        gc.freeze()  # modules and models are not garbage: a full collection would look at all of them


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(str(error), key="target", value=name, hint="module:function") from error
    if not hasattr(found, attribute):
        raise ConfigError(f"{module} has no {attribute}", key="target", value=name, hint="module:function")
    return getattr(found, attribute)


def _set_torch_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _leave() -> NoReturn:
    """Now, whatever other threads do."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _watch(end: socket.socket) -> None:
    """Until the other side is gone. Reads nothing: that is the event loop's."""
    poll = select.poll()
    poll.register(end, 0)  # hanging up is always reported
    poll.poll()
    _leave()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _leave()


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve on the socket `descriptor` until `parent` is gone."""
    faulthandler.enable()
    _die_with(parent)
    end = socket.socket(fileno=descriptor)
    threading.Thread(target=_watch, args=(end,), name="parent", daemon=True).start()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            wire = MessageProtocol(lambda message: server.message(message), _leave)
            server = CallServer(group, wire.send)
            await loop.create_connection(lambda: wire, sock=end)
            await loop.create_future()  # until the socket is closed

    try:
        asyncio.run(serve())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
