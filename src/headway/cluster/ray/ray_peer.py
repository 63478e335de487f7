"""The driver's side: a `Peer` that lives in a Ray actor.

Guarantees as those of a child process: calls are begun in order, notes and answers arrive in order, a cancelled call
is cancelled there, and whoever waits is told at once when the actor ends, with the last lines of its output where the
driver can read them. Ray does not tell an exit code. The actor is the driver's: it ends with it, however that ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from headway.cluster.ray.ray_actor import Outbox, Parcel
from headway.codec import decode, encode
from headway.processes.base import ChildSpec, PeerLost
from headway.processes.child_process import check_arguments, make_child_environment, make_start_message
from headway.processes.peer_messages import (
    PendingCalls,
    decode_error,
    deliver_frame,
    split_frames,
)
from headway.processes.process_output import ProcessOutput

_END_S = 5.0
_BECAUSE = re.compile(r"The actor (?:is dead|died) because (.*)")
_ADVICE = re.compile(
    r" (?:Some common causes|To troubleshoot|Please check|The actor never ran|The task may or may not)"
)


class RayPeer:
    """Made by `start`."""

    def __init__(self, spec: ChildSpec, actor: Any, output: ProcessOutput) -> None:
        self.spec = spec
        self.pid = 0
        """On its node."""
        self.node = self.host = ""
        self._on_note: Callable[[Any], None] = lambda note: None
        self._on_end: Callable[[str], None] = lambda how: None
        self._actor, self._output = actor, output
        self._outbox, self._numbers, self._shipping = Outbox(), count(), False
        self._calls = PendingCalls(spec.name, self._send)
        self._closing = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How it ended."""
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: ChildSpec, actor: Callable[[], Any], timeout_s: float, *, here: bool = True, waits_for: str = ""
    ) -> RayPeer:
        """Returns when the target has returned. Raises what it raised, or `PeerLost`.

        `actor` makes the actor. `here`: it works in the directory of this process and finds modules where this one
        does, as far as its node has them. `waits_for`: what it is to be given, for the error when it is not.
        """
        check_arguments(spec)
        try:
            made = actor()
        except (RayError, RuntimeError, ValueError) as error:
            raise PeerLost(f"{spec.name} cannot be placed: {error}") from error
        peer = cls(spec, made, ProcessOutput(spec.log))
        try:
            async with asyncio.timeout(timeout_s):
                await peer._prepare(here)
                await peer.call("start", make_start_message(spec))
        except TimeoutError:
            what = "started" if peer.pid else f"placed: it waits for {waits_for}"
            late = PeerLost(f"{spec.name} was not {what} after {timeout_s:g} s{peer._output.read_last_lines()}")
            await peer._end()
            raise late from None
        except BaseException:
            await peer._end()
            raise
        return peer

    @property
    def alive(self) -> bool:
        return not (self._closing or self._ended.done())

    def subscribe(
        self, *, on_note: Callable[[Any], None] | None = None, on_end: Callable[[str], None] | None = None
    ) -> None:
        self._on_note, self._on_end = on_note or self._on_note, on_end or self._on_end

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
            else:
                await asyncio.wait([self._ended], timeout=grace_s)
        finally:
            self.kill()
        await self._gone()

    def kill(self) -> None:
        if not self._ended.done():
            with suppress(RayError, ValueError, RuntimeError):  # it, or the whole of Ray, is gone already
                ray.kill(self._actor, no_restart=True)
            if self._listening is None:
                self._over("was never up")

    async def _prepare(self, here: bool) -> None:
        setup = encode(_setup(self.spec, self._output, here=here))
        self._listening = asyncio.create_task(self._listen(), name=f"listen/{self.spec.name}")
        try:
            answer = await self._actor.prepare.remote(setup)
        except RayError as error:
            raise PeerLost(await asyncio.shield(self._ended)) from error
        kind, value = decode(answer)
        if kind == "fail":
            raise decode_error(value)
        self.pid, self.node, self.host = value["pid"], value["node"], value["host"]

    async def _end(self) -> None:
        self.kill()
        await self._gone()

    async def _gone(self) -> None:
        """Killed. Ray may take long to say so of a node that is lost, and nobody needs to hear it."""
        await asyncio.wait([self._ended], timeout=_END_S)
        if not self._ended.done():
            if self._listening is not None:
                self._listening.cancel()
            self._over("was killed, and Ray has not confirmed it")

    def _send(self, message: Any) -> None:
        self._outbox.send(message)
        if not self._shipping:
            self._shipping = True
            asyncio.get_running_loop().call_soon(self._ship)

    def _ship(self) -> None:
        self._shipping = False
        data, refs = self._outbox.take()
        if not self._ended.done():
            self._actor.put.remote(next(self._numbers), data, refs)

    async def _listen(self) -> None:
        """Until the stream ends, which it does only with the actor."""
        how = "ended"
        try:
            async for item in self._actor.serve.options(num_returns="streaming").remote():
                self._arrived(await item)
                del item  # it keeps what it refers to
        except RayError as error:
            self.kill()  # it may live on where nobody can hear it
            how = _ending(error)
        except Exception as error:  # nothing that it says can be read any more
            self.kill()
            how = f"was not understood, and killed: {type(error).__name__}: {error}"
        self._over(how)

    def _arrived(self, parcel: Parcel) -> None:
        data, refs = parcel
        for frame in split_frames(data):
            if not deliver_frame(frame, self._message, refs):
                self.kill()

    def _message(self, message: Any) -> None:
        kind, *rest = message
        if kind == "note":
            self._on_note(rest[0])
        else:
            self._calls.take_answer(kind, *rest)

    def _over(self, how: str) -> None:
        where = f"actor, process {self.pid} on {self.node}" if self.pid else "actor"
        text = f"{self.spec.name} ({where}) {how}{self._output.read_last_lines()}"
        self._output.close()
        self._ended.set_result(text)
        self._on_end(text)
        self._calls.fail_all(text)


def _setup(spec: ChildSpec, output: ProcessOutput, *, here: bool) -> dict[str, Any]:
    named = f"/proc/{os.getpid()}/fd/{output.fileno()}" if spec.log is None else str(spec.log.resolve())
    return {
        "env": {**make_child_environment(spec), "PYTHONUNBUFFERED": "1"},
        "directory": str(Path.cwd()) if here else "",
        "paths": [path or str(Path.cwd()) for path in sys.path] if here else [],
        "output": named,
        "inode": os.fstat(output.fileno()).st_ino,
        "needed": spec.log is not None,
    }


def _ending(error: RayError) -> str:
    """Of Ray's pages on why an actor is gone, the sentence that says it."""
    text = " ".join(str(error).split())
    found = _BECAUSE.search(text)
    return f"ended: {_ADVICE.split(found[1] if found else text)[0].rstrip('. ')}"
