"""The child's side of a remote engine: answers its parent's calls with an `Engine` of its own process.

What requests make is collected over one turn of the event loop and told in one note, whatever their number. A note is
always sent before the answer that follows from it: when `generate`, `abort`, `pause` or `flip` has returned there, all
that was made before is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from headway.engines.base import Engine, Progress, Request
from headway.errors import BackendError, EngineCrashed, EngineError, TransferError
from headway.processes.base import ChildSpec, RestartablePeer, StartPeer
from headway.types import FinishReason, VersionRun
from headway.weights.base import Bucket, Manifest, PayloadRef


class _Told(Progress):
    """Tells what is added to it."""

    __slots__ = ("_add", "_number")

    def __init__(self, number: int, add: Callable[[int, Sequence[Any], Sequence[float], int], None]) -> None:
        super().__init__()
        self._number = number
        self._add = add

    def extend(self, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        super().extend(actions, logps, version)
        self._add(self._number, actions, logps, version)


class EngineHost:
    """Made by the child around what the target returned."""

    def __init__(self, engine: Engine, tell: Callable[[Any], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._counts: list[int] = []
        """Request, version and number of actions of each stretch, one after the other."""
        self._actions: list[Any] = []
        self._logps: list[float] = []

    async def generate(
        self,
        number: int,
        request: Request,
        actions: Sequence[Any],
        logps: Sequence[float],
        runs: tuple[VersionRun, ...],
    ) -> FinishReason:
        progress = _Told(number, self._add)
        progress.actions, progress.logps, progress.runs = actions, logps, runs
        try:
            return await self._engine.generate(request, progress)
        finally:
            self._flush()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)
        self._flush()

    async def pause(self) -> None:
        await self._engine.pause()
        self._flush()

    async def resume(self) -> None:
        await self._engine.resume()

    async def begin(self, manifest: Manifest) -> None:
        await self._engine.receiver.begin(manifest)

    async def load(self, bucket: Bucket) -> None:
        await self._engine.receiver.load(bucket)

    async def flip(self) -> int:
        await self._engine.receiver.flip()
        self._flush()
        return self._engine.receiver.version

    async def close(self) -> None:
        await self._engine.close()
        self._flush()

    def _add(self, number: int, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        if not self._counts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._counts += (number, version, len(actions))
        self._actions += actions
        self._logps += logps

    def _flush(self) -> None:
        if self._counts:
            self._tell((self._counts, self._actions, self._logps))
            self._counts, self._actions, self._logps = [], [], []


HOST_TARGET = "headway.engines.remote_engine:EngineHost"


class RemoteEngine:
    """`spec.target` makes the `Engine` in the child; `slots` is how many requests that one works on together."""

    def __init__(self, spec: ChildSpec, slots: int, start: StartPeer, *, close_s: float = 5.0) -> None:
        self.name = spec.name
        self.slots = slots
        self.receiver = RemoteReceiver(self)
        self._child = RestartablePeer(
            replace(spec, host=HOST_TARGET),
            start,
            crashed=EngineCrashed,
            on_note=self._told,
            on_down=self._lost,
            close_s=close_s,
        )
        self._closed = False
        self._numbers = count()
        self._streams: dict[int, Progress] = {}

    async def start(self) -> None:
        """Have the child ready. Raises `ConfigError` when it refuses what it was given, else `EngineCrashed`."""
        await self._child.start()

    @property
    def alive(self) -> bool:
        """Whether there is a child, and it can answer."""
        return self._child.alive

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        number = next(self._numbers)
        self._streams[number] = progress
        held = (progress.actions, progress.logps, progress.runs)
        try:
            finish: FinishReason = await self.ask("generate", number, request, *held, otherwise=EngineError)
            return finish
        finally:
            del self._streams[number]

    async def abort(self, request_id: str) -> None:
        if self._child.alive:
            await self.ask("abort", request_id, otherwise=EngineError)

    async def pause(self) -> None:
        await self.ask("pause", otherwise=EngineError)

    async def resume(self) -> None:
        if self._child.alive:
            await self.ask("resume", otherwise=EngineError)

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        await self._child.restart()

    async def close(self) -> None:
        self._closed = True
        await self._child.close()

    async def ask(self, method: str, *args: Any, otherwise: type[BackendError]) -> Any:
        """Call the child. Errors that are not ours become `otherwise`."""
        incarnation = self._child.incarnation
        try:
            return await self._child.call(method, *args, failure=otherwise)
        except EngineCrashed:
            if incarnation == self._child.incarnation:  # the child lives, its engine does not
                self._lost()
            raise

    def _lost(self) -> None:
        self.receiver.version = -1

    def _told(self, note: tuple[Sequence[int], Sequence[Any], Sequence[float]]) -> None:
        """Stretches of actions: request, version and length of each, then all of them one after the other."""
        counts, actions, logps = note
        at = 0
        for place in range(0, len(counts), 3):
            number, version, length = counts[place : place + 3]
            progress = self._streams.get(number)
            if progress is not None:
                self._enter(progress, actions[at : at + length], logps[at : at + length], version)
            at += length

    def _enter(self, progress: Progress, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        """What a listener of one request raises costs the others nothing."""
        try:
            progress.extend(actions, logps, version)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"{self.name}: a listener failed", "exception": error}
            )


class RemoteReceiver:
    """A `WeightReceiver` that forwards; `version` is what the child serves."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.version = -1
        self.name = engine.name
        """Of the engine: under which it is known where weights are broadcast."""
        self._engine = engine

    @property
    def alive(self) -> bool:
        """Whether there is a child that could take weights in."""
        return self._engine.alive

    async def begin(self, manifest: Manifest) -> None:
        await self._engine.ask("begin", manifest, otherwise=TransferError)

    async def load(self, bucket: Bucket) -> None:
        if not isinstance(bucket.payload, PayloadRef):
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} cannot be seen by its engine")
        await self._engine.ask("load", bucket, otherwise=TransferError)

    async def flip(self) -> None:
        self.version = await self._engine.ask("flip", otherwise=TransferError)
