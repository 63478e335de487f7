"""A replica that is a vLLM in this process, as its host sees it.

Requests enter through a gate that is closed during pauses and updates. A pause keeps everything, KV included.
An update ends the streams that run, and each request continues in a new stream (`StreamingEngine`). The labels that
vLLM itself reports for a stream are compared with those of the weights it was given. A version lies in memory that
vLLM's workers open by its handle, and is verified there (`SharedVersionReceiver`): what the workers read is what was
verified.

Guarantees beyond those of `StreamingEngine`: weights are loaded while nothing runs; `on_down` is called once when the
replica goes down. It does not come back by itself: its process is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

from headway.engines.base import DecodeTokens
from headway.engines.streaming_engine import BackendLost, StreamedRequest, StreamingEngine
from headway.engines.vllm.vllm_core import AsyncLlmCore
from headway.errors import EngineCrashed
from headway.types import FinishReason
from headway.weights.base import Manifest, OpenPayload
from headway.weights.shared_version import SharedVersionReceiver, VersionBuffer

if TYPE_CHECKING:
    from headway.weights.device_memory import ShareableMemory


class InProcessEngine(StreamingEngine):
    """`memory`, `check` and `open_payload` are for the `SharedVersionReceiver`.

    `drain_s` limits the wait for the last tokens of streams that were ended.
    """

    receiver: SharedVersionReceiver

    def __init__(
        self,
        name: str,
        core: AsyncLlmCore,
        *,
        slots: int,
        context_tokens: int,
        memory: ShareableMemory | None = None,
        check: Callable[[Manifest], None] = lambda manifest: None,
        open_payload: OpenPayload = memoryview,
        end_tokens: Iterable[int] = (),
        decode: DecodeTokens | None = None,
        on_down: Callable[[str], None] = lambda why: None,
        drain_s: float = 30.0,
    ) -> None:
        super().__init__(name, context_tokens=context_tokens, end_tokens=end_tokens, decode=decode)
        self.slots = slots
        self._core, self._on_down = core, on_down
        self._drain_s, self._asleep = drain_s, False
        self.receiver = SharedVersionReceiver(self._switch, memory=memory, check=check, open_payload=open_payload)
        self._numbers = count()
        core.report_end_to(lambda how: self._go_down(EngineCrashed(f"{name}: {how}")))

    async def abort(self, request_id: str) -> None:
        streamed = self._requests.get(request_id)
        if streamed is None or self._crash is not None or self._closed:
            return
        streamed.aborted = True
        if streamed.key:
            await self._core.abort(streamed.key)
        else:
            streamed.interrupt()
        await streamed.over.wait()

    async def restart(self) -> None:
        raise EngineCrashed(f"{self.name}: a vLLM comes back with its process, not in it")

    async def _stream(self, streamed: StreamedRequest) -> FinishReason:
        try:
            async with self._gate:
                self._check_up()
                version = self._served_version
                request = self._make_stream_request(streamed, f"headway-{next(self._numbers)}")
                chunks = await self._core.add(request)
                self._enter_stream(streamed, request.key)
            return await self._record_chunks(streamed, chunks, version, request.label)
        except BackendLost as error:
            self._go_down(EngineCrashed(f"{self.name}: {error}"))
            raise

    async def _hold(self) -> None:
        await self._core.hold()

    async def _release(self) -> None:
        await self._core.release()

    async def _close_backend(self) -> None:
        await self._core.close()

    async def sleep(self) -> None:
        """Let vLLM free the memory of its GPU. The next version wakes it up. Implements `SleepingEngine`."""
        async with self._gate, self._crash_unless_done("going to sleep"):
            self._check_up()
            if not self._asleep:
                await self._end_streams()
                await self._core.sleep()
                self._asleep, self._served_version, self._label = True, -1, ""
                self.receiver.reset(gone=False)

    async def _switch(self, manifest: Manifest, buffer: VersionBuffer) -> None:
        """Serve what is in the buffer. A failure half-way leaves nothing that is served."""
        async with self._gate, self._crash_unless_done(f"version {manifest.version}"):
            self._check_up()
            label = str(manifest.version)
            if self._asleep:
                await self._core.wake()
            await self._end_streams()
            await self._core.load(manifest, buffer, label)
            self._served_version, self._label, self._asleep = manifest.version, label, False
            if not self._paused:
                await self._core.release()

    async def _end_streams(self) -> None:
        """End all streams, with the tokens they have. New ones wait at the gate."""
        self._open.clear()
        await self._core.end_requests()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._wait_until_idle()
        except TimeoutError:
            raise BackendLost(f"drain: {len(self._streams)} streams have not ended in {self._drain_s:g} s") from None
        self._open.set()

    def _go_down(self, crash: EngineCrashed) -> bool:
        went_down = super()._go_down(crash)
        if went_down:
            self._on_down(str(crash))
        return went_down
