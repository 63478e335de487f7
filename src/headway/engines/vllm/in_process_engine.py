"""A replica that is a vLLM in this process, as its host sees it.

Requests enter through a gate, which whoever pauses or updates holds. A pause keeps everything where it is, KV included.
An update ends the streams that run, and each request continues in a new stream (`StreamingEngine`). The labels that
vLLM itself reports for a stream are compared with those of the weights it was given.

Guarantees beyond those of `StreamingEngine`: weights are loaded while nothing runs; `on_down` is called once when the
replica goes down. It does not come back by itself: its process is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from headway.engines.stop_strings import DecodeTokens
from headway.engines.streaming_engine import BackendLost, StreamedRequest, StreamingEngine
from headway.engines.vllm.shared_buffer_receiver import SharedBuffer, SharedBufferReceiver
from headway.engines.vllm.vllm_core import AsyncLlmCore
from headway.errors import EngineCrashed
from headway.types import FinishReason
from headway.weights.base import Manifest


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
        open_payload: Callable[[Any], Any] = memoryview,
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
        self._updating = False
        core.report_end_to(self._on_core_end)

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

    @property
    def _ending_streams(self) -> bool:
        return self._updating

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

    async def _ensure_ready(self) -> None:
        self._check_up()

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
            self._updating = True
            await self._core.end_requests()
            await self._wait_until_idle()
            self._updating = False
            await self._core.load(manifest, buffer_name, label)
            self._served_version, self._label = manifest.version, label
            if not self._paused:
                await self._core.release()

    def _on_core_end(self, how: str) -> None:
        self._go_down(EngineCrashed(f"{self.name}: {how}"))

    def _go_down(self, crash: EngineCrashed) -> bool:
        went_down = super()._go_down(crash)
        if went_down:
            self._on_down(str(crash))
        return went_down
