"""The main program of a worker process: `python -c "… main(socket)"`. See `workers`.

Two processes. The outer one runs no code of an environment: it waits until its parent closes the socket or the inner
one ends, kills every process that is left below it, and ends. Processes that an environment has started belong to it,
also those that left their group and those whose parent is gone (on Linux). The inner one plays.

Messages are JSON behind four bytes of length: `[number, method, seat, args]`, answered by `[number, result]` or
`[number, null, problem]`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from headway.environments.environment_registry import make_environment
from headway.environments.local_host import LocalEnvironmentHost, LocalEpisodeSlot
from headway.environments.orphan_processes import adopt_orphans, kill_children
from headway.errors import HeadwayError

_PR_SET_PDEATHSIG = 1
SIGNAL_EXIT_BASE = 128
"""Exit codes above it are signals, as in a shell."""
LENGTH_BYTES = 4
"""Bytes of a message's length."""


def main(descriptor: int) -> NoReturn:
    """Play until the other side of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        adopt_orphans()
        outer = os.getpid()
        inner = os.fork()
        if inner:
            _wait_and_kill_children(descriptor, inner)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != outer:
            os._exit(1)
    code = 1
    try:
        asyncio.run(_serve_episodes(socket.socket(fileno=descriptor)))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _wait_and_kill_children(descriptor: int, inner: int) -> NoReturn:
    """Wait for the end of either side, then leave nothing behind."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.register(os.pidfd_open(inner), select.POLLIN)
    poll.poll()
    code = kill_children().get(inner, 0)
    os._exit(code if code >= 0 else SIGNAL_EXIT_BASE - code)


async def _serve_episodes(end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    server = _EpisodeServer(writer)
    async with asyncio.TaskGroup() as tasks:
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                number, method, seat, args = json.loads(await reader.readexactly(size))
                tasks.create_task(server.answer(number, method, seat, args))
        os._exit(0)  # whatever is still at work


class _EpisodeServer:
    """Seats by number; the first message says of which kind they are."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._host: LocalEnvironmentHost | None = None
        self._seats: dict[int, LocalEpisodeSlot] = {}
        self._playing: dict[int, asyncio.Task[Any]] = {}

    async def answer(self, number: int, method: str, seat: int, args: list[Any]) -> None:
        try:
            reply = [number, await getattr(self, f"do_{method}")(seat, *args)]
            text = json.dumps(reply)
        except asyncio.CancelledError:
            text = json.dumps([number, None, "was given up"])
        except HeadwayError as error:
            text = json.dumps([number, None, str(error)])
        except Exception as error:
            text = json.dumps([number, None, f"{method} raised {type(error).__name__}: {error}"[:2000]])
        data = text.encode()
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    async def do_start(self, seat: int, kind: str, options: Mapping[str, Any]) -> None:
        self._host = LocalEnvironmentHost(kind, lambda: make_environment(kind, **options))

    async def do_open(self, seat: int) -> dict[str, Any]:
        assert self._host is not None
        self._seats[seat] = self._host.make_slot()
        return asdict(await self._played(seat, self._seats[seat].open()))

    async def do_reset(self, seat: int, seed: int, data: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(await self._played(seat, self._seats[seat].reset(seed, data)))

    async def do_step(self, seat: int, action: str) -> dict[str, Any]:
        return asdict(await self._played(seat, self._seats[seat].step(action)))

    async def do_leave(self, seat: int) -> None:
        playing = self._playing.pop(seat, None)
        if playing is not None and not playing.done():
            playing.cancel()
            await asyncio.wait([playing])
        left = self._seats.pop(seat, None)
        if left is not None:
            await left.leave()

    async def _played(self, seat: int, call: Any) -> Any:
        self._playing[seat] = task = asyncio.ensure_future(call)
        return await task
