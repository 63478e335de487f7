"""The main program of a child: `python -m headway.processes.child_main SOCKET PARENT [contained=MB]`.

It imports its target, serves what that returns until the socket is closed, and ends. A thread that does nothing else
watches the socket, so that the child ends also while a long computation holds the event loop. On Linux the kernel ends
it with its parent in any case.

A contained child is two processes. The outer one runs no code of the target: it waits until the socket is closed, the
inner one ends or too much memory is used, kills every process that is left below it, and ends.
"""

import asyncio
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
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import ConfigError, HeadwayError
from headway.processes.parent_watchdog import (
    MEMORY_LIMIT_CODE,
    MOST_PROCESSES,
    PROCESS_LIMIT_CODE,
    SIGNAL_BASE,
    adopt_orphans,
    die_with_parent,
    kill_children,
    measure_contained,
)
from headway.processes.peer_messages import MessageProtocol, encode_error

_LIMIT_CHECK_MS = 200


class CallServer:
    """Answers calls with the methods of a host, each in a task of its own, started in the order of the calls."""

    def __init__(self, group: asyncio.TaskGroup, send: Callable[[Any], None]) -> None:
        self._host: Any = None
        self._group = group
        self._send = send
        """Raises `TypeError` or `ValueError` for a message that cannot be encoded."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take_message(self, message: Any) -> None:
        """Start a call, cancel one, or answer one that could not be decoded."""
        if message[0] == "unread":
            _, _, number, reason = message
            self._send(("fail", number, {"error": "", "message": f"cannot be read here: {reason}"}))
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
            value = await (self._start(*args) if method == "start" else self._call(method, args))
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

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return await getattr(self._host, method)(*args)

    async def _start(self, spec: dict[str, Any]) -> None:
        target = _import_object(spec["target"])
        _set_torch_threads(spec["threads"])
        served = target(spec["args"])
        if inspect.isawaitable(served):
            served = await served
        _set_torch_threads(spec["threads"])  # torch may have come with the target's own imports
        host = _import_object(spec["host"]) if spec["host"] else lambda served, send_note: served
        self._host = host(served, lambda note: self._send(("note", note)))
        gc.collect()
        gc.freeze()  # modules and models are not garbage: a full collection would look at all of them


def _import_object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(str(error), key="target", value=name, hint="module:function") from error
    if not hasattr(found, attribute):
        raise ConfigError(f"{module} has no {attribute}", key="target", value=name, hint="module:function")
    return getattr(found, attribute)


def _set_torch_threads(threads: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _exit_now() -> NoReturn:
    """End this process, whatever other threads do."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _watch_parent(end: socket.socket) -> None:
    """Exit when the other side is gone. Reads nothing: that is the event loop's work."""
    poll = select.poll()
    poll.register(end, 0)  # hanging up is always reported
    poll.poll()
    _exit_now()


def _contain(descriptor: int, memory_mb: int) -> None:
    """Fork. Returns in the inner process; the outer one waits for the end of either side, and leaves nothing behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks the inner process where it is
    adopt_orphans()
    outer = os.getpid()
    inner = os.fork()
    if inner == 0:
        if not die_with_parent(outer):
            os._exit(1)
        _volunteer_for_oom_killer()
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.register(os.pidfd_open(inner), select.POLLIN)
    over_limit = 0
    while not over_limit and not poll.poll(_LIMIT_CHECK_MS):
        used, count = measure_contained(inner)
        over_limit = MEMORY_LIMIT_CODE if 0 < memory_mb << 20 < used else over_limit
        over_limit = PROCESS_LIMIT_CODE if count > MOST_PROCESSES else over_limit
    code = kill_children().get(inner, 0)
    os._exit(over_limit or (code if code >= 0 else SIGNAL_BASE - code))


def _volunteer_for_oom_killer() -> None:
    """Let the kernel kill this process rather than the run, should the machine have no memory left."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main(descriptor: int | str, parent: int | str, *options: str) -> NoReturn:
    """Serve on the socket `descriptor` until `parent` is gone."""
    faulthandler.enable()
    if not die_with_parent(int(parent)):
        _exit_now()
    if not options:  # code of users is contained, and may be ended by any signal
        # A batch system sends it to every process of a job. Only the controller answers, and its children end with it.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    for option in options if sys.platform == "linux" else ():
        _contain(int(descriptor), int(option.removeprefix("contained=")))
    end = socket.socket(fileno=int(descriptor))
    os.register_at_fork(after_in_child=end.close)  # what the target forks answers no calls
    threading.Thread(target=_watch_parent, args=(end,), name="parent", daemon=True).start()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            protocol = MessageProtocol(lambda message: server.take_message(message), _exit_now)
            server = CallServer(group, protocol.send)
            await loop.create_connection(lambda: protocol, sock=end)
            await loop.create_future()  # until the socket is closed

    try:
        asyncio.run(serve())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
