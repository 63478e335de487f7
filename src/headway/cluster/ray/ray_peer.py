"""The driver's side of a Ray peer, which lives in a Ray actor.

Guarantees as those of a child process: calls start in order, notes and answers arrive in order, a cancelled call is
cancelled there, and waiting calls fail at once when the actor ends, with the last lines of its output where the driver
can read them. Ray does not tell an exit code. The actor belongs to the driver and ends with it, however that ended.
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
from headway.processes.peer_messages import CallingPeer, decode_error, deliver_frame, split_frames
from headway.processes.process_output import ProcessOutput

_END_S = 5.0
_REASON = re.compile(r"The actor (?:is dead|died) because (.*)")
_ADVICE = re.compile(
    r" (?:Some common causes|To troubleshoot|Please check|The actor never ran|The task may or may not)"
)


class RayPeer(CallingPeer):
    """A `Peer` in an actor. Made by `start`."""

    def __init__(self, spec: ChildSpec, actor: Any, waits_for: str) -> None:
        super().__init__(spec, ProcessOutput(spec.log), self._send)
        self.node = ""
        """Name of the machine on which `pid` is."""
        self._actor, self._waits_for = actor, waits_for
        self._outbox, self._numbers, self._shipping = Outbox(), count(), False
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: ChildSpec, make_actor: Callable[[], Any], timeout_s: float, *, here: bool = True, waits_for: str = ""
    ) -> RayPeer:
        """Start a peer and return when its target has returned. Raises what the target raised, or `PeerLost`.

        `here`: it works in the directory of this process and finds modules where this one does, as far as its node has
        them. `waits_for` names the resources that it needs, for the error if it does not get them.
        """
        check_arguments(spec)
        try:
            actor = make_actor()
        except (RayError, RuntimeError, ValueError) as error:
            raise PeerLost(f"{spec.name} cannot be placed: {error}") from error
        peer = cls(spec, actor, waits_for)
        await peer._bring_up(lambda: peer._start(here), timeout_s)
        return peer

    @property
    def alive(self) -> bool:
        return not (self._closing or self._ended.done())

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
        await self._wait_for_end()

    def kill(self) -> None:
        if not self._ended.done():
            with suppress(RayError, ValueError, RuntimeError):  # the actor, or all of Ray, is gone already
                ray.kill(self._actor, no_restart=True)
            if self._listening is None:
                self._end_with("was never up")

    async def _start(self, here: bool) -> None:
        setup = encode(_make_setup(self.spec, self._output, here=here))
        self._listening = asyncio.create_task(self._listen(), name=f"listen/{self.spec.name}")
        try:
            answer = await self._actor.prepare.remote(setup)
        except RayError as error:
            raise PeerLost(await asyncio.shield(self._ended)) from error
        kind, value = decode(answer)
        if kind == "fail":
            raise decode_error(value)
        self.pid, self.node, self.host = value["pid"], value["node"], value["host"]
        await self.call("start", make_start_message(self.spec))

    def _describe_start(self) -> str:
        return "started" if self.pid else f"placed: it waits for {self._waits_for}"

    async def _wait_for_end(self) -> None:
        """Wait a limited time: Ray may take long to confirm the end on a node that is lost."""
        await asyncio.wait([self._ended], timeout=_END_S)
        if not self._ended.done():
            if self._listening is not None:
                self._listening.cancel()
            self._end_with("was killed, and Ray has not confirmed it")

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
        """Deliver what the actor sends, until its stream ends, which it does only with the actor."""
        how = "ended"
        try:
            async for item in self._actor.serve.options(num_returns="streaming").remote():
                self._deliver(await item)
                del item  # it keeps the objects that it refers to
        except RayError as error:
            self.kill()  # it may live on where nobody can hear it
            how = _describe_end(error)
        except Exception as error:  # nothing that it sends can be decoded any more
            self.kill()
            how = f"was not understood, and killed: {type(error).__name__}: {error}"
        self._end_with(how)

    def _deliver(self, parcel: Parcel) -> None:
        data, refs = parcel
        for frame in split_frames(data):
            if not deliver_frame(frame, self._take_message, refs):
                self.kill()

    def _end_with(self, how: str) -> None:
        self._finish(f"actor, process {self.pid} on {self.node}" if self.pid else "actor", how)


def _make_setup(spec: ChildSpec, output: ProcessOutput, *, here: bool) -> dict[str, Any]:
    path = f"/proc/{os.getpid()}/fd/{output.fileno()}" if spec.log is None else str(spec.log.resolve())
    return {
        "env": {**make_child_environment(spec), "PYTHONUNBUFFERED": "1"},
        "directory": str(Path.cwd()) if here else "",
        "paths": [path or str(Path.cwd()) for path in sys.path] if here else [],
        "output": path,
        "inode": os.fstat(output.fileno()).st_ino,
        "required": spec.log is not None,
    }


def _describe_end(error: RayError) -> str:
    """Return the one sentence of Ray's long message that says why the actor is gone."""
    text = " ".join(str(error).split())
    found = _REASON.search(text)
    return f"ended: {_ADVICE.split(found[1] if found else text)[0].rstrip('. ')}"
