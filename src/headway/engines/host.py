"""The child's side of a remote engine: answers its parent's calls with an `Engine` of its own process.

What requests make is collected over one turn of the event loop and told in one note, whatever their number. A note is
always sent before the answer that follows from it: when `generate`, `abort`, `pause` or `flip` has returned there, all
that was made before is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headway.engines.base import Engine, Progress, Request
from headway.types import FinishReason, VersionRun
from headway.weights.base import Bucket, Manifest


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
