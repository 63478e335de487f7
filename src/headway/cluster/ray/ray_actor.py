"""Messages that wait to be carried to the other side, in order, as many at once as there are.

Every parcel costs about a millisecond of both sides, whatever is in it. So notes, which nobody waits for, are held back
a moment: an answer that follows takes them along.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from headway.codec import decode, encode
from headway.errors import ConfigError, HeadwayError
from headway.processes.child_main import CallServer
from headway.processes.peer_messages import (
    deliver_frame,
    encode_error,
    encode_frame,
    split_frames,
)

Parcel = tuple[bytes, list[Any]]
"""Frames one after the other, and the references in them."""
_PATIENCE_S = 0.005


class Outbox:
    """Filled from the event loop's thread."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        """There is something that should leave now."""
        self._frames: list[bytes] = []
        self._refs: list[Any] = []
        self._later: asyncio.TimerHandle | None = None

    def send(self, message: Any) -> None:
        """Raises `TypeError` or `ValueError` for what cannot travel."""
        self._frames.append(encode_frame(message, self._refs))
        if message[0] != "note":
            self.filled.set()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_PATIENCE_S, self.filled.set)

    def take(self) -> Parcel:
        """Everything until now."""
        parcel = b"".join(self._frames), self._refs
        self._frames, self._refs = [], []
        self.filled.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        return parcel


class ActorServer:
    """Made by Ray, without arguments; `prepare`, then `serve`, and `put` at any time."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._server: CallServer | None = None
        self._arrived: dict[int, Parcel] = {}
        self._next = 0

    async def prepare(self, setup: bytes) -> bytes:
        """Make this process one of ours. Answers with what it is, or with why it cannot be."""
        try:
            return encode(("done", _prepared(_read(setup))))
        except HeadwayError as error:
            return encode(("fail", encode_error(error)))

    async def serve(self) -> AsyncIterator[Parcel]:
        """Answers and notes, until the actor ends."""
        async with asyncio.TaskGroup() as group:
            self._server = CallServer(group, self._outbox.send)
            self._take()
            while True:
                await self._outbox.filled.wait()
                parcel = self._outbox.take()
                yield parcel
                parcel[1].clear()  # it has left; whoever still has the parcel keeps nothing in the store

    async def put(self, number: int, data: bytes, refs: list[Any]) -> None:
        """The `number`th parcel from the driver."""
        self._arrived[number] = (data, refs)
        self._take()

    def _take(self) -> None:
        while self._server is not None and self._next in self._arrived:
            data, refs = self._arrived.pop(self._next)
            self._next += 1
            for frame in split_frames(data):
                if not deliver_frame(frame, self._server.take_message, refs):
                    os._exit(1)  # nobody would know what is missing


def _read(frame: bytes) -> Mapping[str, Any]:
    found: Mapping[str, Any] = decode(frame)
    return found


def _prepared(setup: Mapping[str, Any]) -> dict[str, Any]:
    os.environ.update(setup["env"])
    if setup["directory"] and Path(setup["directory"]).is_dir():
        os.chdir(setup["directory"])
    sys.path += [path for path in setup["paths"] if path not in sys.path and Path(path).exists()]
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # stored weights are only read
    _redirect(setup["output"], setup["inode"], needed=setup["needed"])
    return {"pid": os.getpid(), "node": os.uname().nodename, "host": ray.util.get_node_ip_address()}


def _redirect(output: str, inode: int, *, needed: bool) -> None:
    """Write where the driver can read it: into the same file, which is known by its number."""
    with suppress(OSError):
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        same = os.fstat(descriptor).st_ino == inode
        if same:
            sys.stdout.flush()
            sys.stderr.flush()
            for standard in (1, 2):
                os.dup2(descriptor, standard)
        os.close(descriptor)
        if same:
            return
    if needed:
        raise ConfigError(
            f"a node of the cluster ({os.uname().nodename}) does not see the directory of the run",
            key="output_dir",
            value=str(Path(output).parent.parent),
            hint="a directory on a file system that all nodes have under the same path",
        )
