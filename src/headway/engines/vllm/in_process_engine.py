"""A replica that is a vLLM in this process, as its host sees it.

Requests enter through a gate that is closed during pauses and updates. A pause keeps everything, KV included.
An update ends the streams that run, and each request continues in a new stream (`StreamingEngine`). The labels that
vLLM itself reports for a stream are compared with those of the weights it was given. Buckets of a version are gathered
in shared memory that vLLM's workers can open, and verified there: what the workers read is what was verified.

Guarantees beyond those of `StreamingEngine`: weights are loaded while nothing runs; `on_down` is called once when the
replica goes down. It does not come back by itself: its process is started again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from headway.engines.base import DecodeTokens
from headway.engines.streaming_engine import BackendLost, StreamedRequest, StreamingEngine
from headway.engines.vllm.vllm_core import AsyncLlmCore
from headway.errors import EngineCrashed
from headway.types import FinishReason
from headway.weights.base import Bucket, Manifest, OpenPayload, StagedReceiver, compute_checksum


class InProcessEngine(StreamingEngine):
    """`make_buffer`, `check` and `open_payload` are for the `SharedBufferReceiver`."""

    receiver: SharedBufferReceiver

    def __init__(
        self,
        name: str,
        core: AsyncLlmCore,
        *,
        slots: int,
        context_tokens: int,
        make_buffer: Callable[[int], SharedBuffer],
        check: Callable[[Manifest], None] = lambda manifest: None,
        open_payload: OpenPayload = memoryview,
        end_tokens: Iterable[int] = (),
        decode: DecodeTokens | None = None,
        on_down: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(name, context_tokens=context_tokens, end_tokens=end_tokens, decode=decode)
        self.slots = slots
        self._core, self._on_down = core, on_down
        self.receiver = SharedBufferReceiver(
            self._switch, make_buffer=make_buffer, check=check, open_payload=open_payload
        )
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

    async def _switch(self, manifest: Manifest, buffer_name: str) -> None:
        """Serve what is in the shared buffer. A failure half-way leaves nothing that is served."""
        async with self._gate, self._crash_unless_done(f"version {manifest.version}"):
            self._check_up()
            label = str(manifest.version)
            self._open.clear()
            await self._core.end_requests()
            await self._wait_until_idle()
            self._open.set()
            await self._core.load(manifest, buffer_name, label)
            self._served_version, self._label = manifest.version, label
            if not self._paused:
                await self._core.release()

    def _go_down(self, crash: EngineCrashed) -> bool:
        went_down = super()._go_down(crash)
        if went_down:
            self._on_down(str(crash))
        return went_down


SwitchToBuffer = Callable[[Manifest, str], Awaitable[None]]
"""Serves the version whose bytes lie in the shared buffer of this name."""


class SharedBuffer(Protocol):
    """Memory that other processes can open by its name."""

    name: str

    @property
    def buffer(self) -> memoryview:
        """All bytes of it."""

    def close(self) -> None:
        """Release it. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferedVersion:
    """A version that arrives. Implements `IncomingVersion`."""

    manifest: Manifest
    shared: SharedBuffer
    open_payload: OpenPayload

    def load(self, bucket: Bucket) -> None:
        """Copy a bucket to its place, then verify it. Raises `TransferError`."""
        data = memoryview(self.open_payload(bucket.payload)).cast("B")
        place = self.shared.buffer[self.manifest.locate_bucket(bucket.index, data.nbytes)]
        place[:] = data
        self.manifest.verify(bucket, compute_checksum(place))


class SharedBufferReceiver(StagedReceiver[BufferedVersion]):
    """`make_buffer` makes a shared buffer of a size, `open_payload` opens payloads, `check` raises `TransferError`."""

    def __init__(
        self,
        switch: SwitchToBuffer,
        *,
        make_buffer: Callable[[int], SharedBuffer],
        check: Callable[[Manifest], None] = lambda manifest: None,
        open_payload: OpenPayload = memoryview,
    ) -> None:
        super().__init__()
        self._switch, self._make_buffer, self._check, self._open_payload = switch, make_buffer, check, open_payload
        self._shared: SharedBuffer | None = None

    async def _make_stage(self, manifest: Manifest) -> BufferedVersion:
        self._check(manifest)
        self._release_buffer()
        self._shared = shared = self._make_buffer(manifest.total_bytes)
        return BufferedVersion(manifest=manifest, shared=shared, open_payload=self._open_payload)

    async def _serve(self, stage: BufferedVersion) -> None:
        await self._switch(stage.manifest, stage.shared.name)

    async def _release_previous(self) -> None:
        self._release_buffer()

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._release_buffer()

    def _release_buffer(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
