"""A core that takes the place of vLLM's: it really makes tokens one by one, of weights in shared memory.

Its model is one number: it says that number again and again, or, where it is negative, n + 1 after n.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from headway.engines.streaming_engine import BackendLost, StreamChunk, StreamRequest
from headway.engines.vllm.in_process_engine import InProcessEngine
from headway.engines.vllm.vllm_core import ChunkStream
from headway.errors import TransferError
from headway.types import FinishReason
from headway.weights.base import Manifest
from headway.weights.shared_memory import PayloadReader, SharedSegment
from headway.weights.shared_version import VersionBuffer


class Running:
    """One request: what it has made and nobody has fetched yet."""

    def __init__(self, asked: StreamRequest) -> None:
        self.asked = asked
        self.last, self.made = asked.prompt[-1], 0
        self.pieces: asyncio.Queue[StreamChunk | BackendLost] = asyncio.Queue()


class FakeCore:
    """A `Core`. A token of every request each `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._on_end: Callable[[str], None] = lambda how: None
        self.says, self.label = -1, ""
        self.wrong_label = ""
        """Told instead of the true one."""
        self.requests: dict[str, Running] = {}
        self.working, self.asleep = True, False
        self._step_s = step_s
        self._task = asyncio.create_task(self._steps(), name="fake core")

    def report_end_to(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end

    async def add(self, asked: StreamRequest) -> ChunkStream:
        await asyncio.sleep(0)
        running = self.requests[asked.key] = Running(asked)
        return self._read(running)

    async def abort(self, key: str) -> None:
        running = self.requests.pop(key, None)
        if running is not None:
            running.pieces.put_nowait(StreamChunk(finish=FinishReason.ABORTED))

    async def end_requests(self) -> None:
        self.working = False
        for key in list(self.requests):
            await self.abort(key)

    async def hold(self) -> None:
        self.working = False
        await asyncio.sleep(0)

    async def release(self) -> None:
        self.working = True

    async def load(self, manifest: Manifest, buffer: VersionBuffer, label: str) -> None:
        assert not self.requests and not self.working, "weights are changed while something runs"
        assert not self.asleep, "weights are loaded into memory that is not there"
        room = SharedSegment.attach(buffer.handle[0])
        self.says = int.from_bytes(room.buffer[: manifest.total_bytes], "little", signed=True)
        self.label = label
        room.close()

    async def sleep(self) -> None:
        assert not self.requests
        self.asleep, self.says = True, -1

    async def wake(self) -> None:
        self.asleep = False

    async def close(self) -> None:
        self._task.cancel()

    def die(self) -> None:
        """By itself."""
        self._task.cancel()
        for running in self.requests.values():
            running.pieces.put_nowait(BackendLost("it is gone"))
        self._on_end("it has ended")

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for running in list(self.requests.values()) if self.working else ():
                self._step(running)

    def _step(self, running: Running) -> None:
        asked = running.asked
        running.last = running.last + 1 if self.says < 0 else self.says
        running.made += 1
        finish = FinishReason.STOP if running.last in asked.end_tokens else None
        if running.made == asked.max_tokens:
            finish = finish or FinishReason.LENGTH
        labels = [self.wrong_label or self.label] if finish else []
        running.pieces.put_nowait(StreamChunk(tokens=[running.last], logps=[-0.5], finish=finish, labels=labels))
        if finish:
            del self.requests[asked.key]

    async def _read(self, running: Running) -> ChunkStream:
        try:
            while True:
                piece = await running.pieces.get()
                if isinstance(piece, BackendLost):
                    raise piece
                yield piece
        finally:
            self.requests.pop(running.asked.key, None)


def check(manifest: Manifest) -> None:
    """The one tensor that it knows."""
    names = [entry.name for entry in manifest.tensors]
    if names != ["said"]:
        raise TransferError(f"version {manifest.version} has {names}")


def make_engine(core: FakeCore, **options: Any) -> InProcessEngine:
    """An engine without weights."""
    chosen: dict[str, Any] = {
        "slots": 4,
        "context_tokens": 128,
        "check": check,
        "open_payload": PayloadReader().open,
        **options,
    }
    return InProcessEngine("engine/0", core, **chosen)


async def engine(args: Mapping[str, Any]) -> InProcessEngine:
    """Target of a child process, which ends with its core."""
    return make_engine(FakeCore(args["step_s"]), end_tokens=args["ends"], on_down=lambda why: os._exit(1))
