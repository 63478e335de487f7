"""The actor's side of a Ray peer: answers calls with one part of a run.

Only our own frames of bytes cross, never code; beside them travel references to stored objects, which Ray counts. Calls
start in the order in which they were sent, whatever order they arrive in. Answers and notes leave in one stream. The
actor ends with the driver that made it, as Ray ends all actors of a job.
"""

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
from headway.processes.peer_messages import deliver_frame, encode_error, encode_frame, split_frames

Parcel = tuple[bytes, list[Any]]
"""Frames one after the other, and the object references in them."""
_NOTE_DELAY_S = 0.005


class Outbox:
    """Collects messages into parcels. Used from the event loop's thread.

    Every parcel costs about a millisecond on both sides, whatever is in it. So notes, which no caller waits for, are
    held back a moment: an answer that follows takes them along.
    """

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        """Set when there is a message that should leave now."""
        self._frames: list[bytes] = []
        self._refs: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: Any) -> None:
        """Add a message. Raises `TypeError` or `ValueError` if it cannot be encoded."""
        self._frames.append(encode_frame(message, self._refs))
        if message[0] != "note":
            self.filled.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NOTE_DELAY_S, self.filled.set)

    def take(self) -> Parcel:
        """Return all messages until now as one parcel."""
        parcel = b"".join(self._frames), self._refs
        self._frames, self._refs = [], []
        self.filled.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return parcel


class ActorServer:
    """The class of the actor. Ray makes it without arguments; then come `prepare`, `serve`, and `put` at any time."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._server: CallServer | None = None
        self._parcels: dict[int, Parcel] = {}
        self._next = 0

    async def prepare(self, setup: bytes) -> bytes:
        """Set this process up as a peer. Answers with what it is, or with the error."""
        try:
            return encode(("done", _prepare_process(decode(setup))))
        except HeadwayError as error:
            return encode(("fail", encode_error(error)))

    async def serve(self) -> AsyncIterator[Parcel]:
        """Yield answers and notes until the actor ends."""
        async with asyncio.TaskGroup() as group:
            self._server = CallServer(group, self._outbox.send)
            self._deliver_parcels()
            while True:
                await self._outbox.filled.wait()
                parcel = self._outbox.take()
                yield parcel
                parcel[1].clear()  # it has left: references in it must not keep objects in the store

    async def put(self, number: int, data: bytes, refs: list[Any]) -> None:
        """Receive the `number`th parcel from the driver."""
        self._parcels[number] = (data, refs)
        self._deliver_parcels()

    def _deliver_parcels(self) -> None:
        while self._server is not None and self._next in self._parcels:
            data, refs = self._parcels.pop(self._next)
            self._next += 1
            for frame in split_frames(data):
                if not deliver_frame(frame, self._server.take_message, refs):
                    os._exit(1)  # nothing would tell what is missing


def _prepare_process(setup: Mapping[str, Any]) -> dict[str, Any]:
    os.environ.update(setup["env"])
    if setup["directory"] and Path(setup["directory"]).is_dir():
        os.chdir(setup["directory"])
    sys.path += [path for path in setup["paths"] if path not in sys.path and Path(path).exists()]
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # stored weights are only read
    _redirect_output(setup["output"], setup["inode"], required=setup["required"])
    return {"pid": os.getpid(), "node": os.uname().nodename, "host": ray.util.get_node_ip_address()}


def _redirect_output(output: str, inode: int, *, required: bool) -> None:
    """Write into the file that the driver reads, if this node sees the same file, which its inode tells."""
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
    if required:
        raise ConfigError(
            f"a node of the cluster ({os.uname().nodename}) does not see the directory of the run",
            key="output_dir",
            value=str(Path(output).parent.parent),
            hint="a directory on a file system that all nodes have under the same path",
        )
