"""A replica that is a server behind HTTP, as the hub sees it.

Versions reach the server as a directory, or with `memory` as a buffer on its GPU that it opens by a handle. Every phase
of an update has a deadline, and an update that fails says which replica did not come through which phase.

Guarantees beyond those of `StreamingEngine`: weights are loaded while nothing runs, and the server is asked afterwards
which weights it serves. A server that its owner restarted is recognized by its label before a token of it is taken. A
request that fails on a server which still answers is `EngineError` for itself only.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path

from headway.engines.base import DecodeTokens
from headway.engines.servers.directory_receiver import DirectoryReceiver, check_tensor_names
from headway.engines.servers.http_client import HttpClient, ServerRefused, name_phase
from headway.engines.servers.server_dialect import ServerDialect, check_logprobs, wait_until_ready
from headway.engines.servers.server_process import ServerHandle, ServerSettings
from headway.engines.streaming_engine import (
    BackendLost,
    StreamChunk,
    StreamedRequest,
    StreamError,
    StreamingEngine,
    StreamRequest,
)
from headway.errors import ConfigError, EngineCrashed, EngineError
from headway.types import FinishReason
from headway.weights.base import Manifest, OpenPayload
from headway.weights.device_memory import ShareableMemory
from headway.weights.shared_version import SharedVersionReceiver, VersionBuffer

_NOTICE_END_S = 1.0
"""A launched server that does not answer may have ended: after this time its end is known."""


class ServerEngine(StreamingEngine):
    """Versions are written below `root`, which the server reads under the same path, or lie in `memory` of its GPU.

    `model_directory` holds the other files of a checkpoint, `open_payload` opens payloads of buckets. A server that
    `sleeps` was started so that it can free its memory.
    """

    receiver: DirectoryReceiver | SharedVersionReceiver

    def __init__(
        self,
        name: str,
        server: ServerHandle,
        dialect: ServerDialect,
        settings: ServerSettings | None = None,
        *,
        root: Path,
        end_tokens: Iterable[int] = (),
        decode: DecodeTokens | None = None,
        model_directory: Path | None = None,
        open_payload: OpenPayload = memoryview,
        memory: ShareableMemory | None = None,
    ) -> None:
        self._settings = settings or ServerSettings()
        super().__init__(name, context_tokens=self._settings.context_tokens, end_tokens=end_tokens, decode=decode)
        self._root = root.absolute()
        if memory is None:
            self.receiver = DirectoryReceiver(
                self._root, self._switch_to_directory, model_directory=model_directory, open_payload=open_payload
            )
        else:

            def check(manifest: Manifest) -> None:
                if model_directory is not None:
                    check_tensor_names(manifest, model_directory)

            self.receiver = SharedVersionReceiver(
                self._switch_to_buffer, memory=memory, check=check, open_payload=open_payload
            )
        self.slots = self._settings.slots
        self._server, self._dialect = server, dialect
        self._client = HttpClient(server.url)
        self._incarnation = secrets.token_hex(4)
        """Part of labels and keys: tells what this life of the server was given from what others were."""
        self._numbers = count()
        self._ready = self._asleep = False

    async def start(self) -> None:
        """Start the server at the beginning of a run, and wait until it answers."""
        async with self._gate:
            await self._ensure_ready(self._settings.first_s)

    async def abort(self, request_id: str) -> None:
        streamed = self._requests.get(request_id)
        if streamed is None or self._crash is not None or self._closed:
            return
        streamed.aborted = True
        if streamed.started:
            with suppress(StreamError, TimeoutError):
                await self._dialect.abort(self._client, streamed.key, self._settings.call_s)
                async with asyncio.timeout(self._settings.drain_s):
                    await streamed.over.wait()
        if not streamed.over.is_set():
            streamed.interrupt()
            await streamed.over.wait()

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        self._go_down(EngineCrashed(f"{self.name} is restarted"))
        async with self._gate:
            self._crash, self._ready, self._paused, self._asleep = None, False, False, False
            self._incarnation = secrets.token_hex(4)
            self.receiver.reset(gone=False)
            try:
                async with self._crash_unless_done("starting"):
                    await self._ensure_ready()
            except ConfigError as error:
                raise EngineCrashed(f"{self.name} does not come up: {error}") from error
            self._open.set()

    async def _stream(self, streamed: StreamedRequest) -> FinishReason:
        while not self._open.is_set():  # it may be closed again before this task is woken
            await self._open.wait()
        self._enter_stream(streamed, f"headway-{self._incarnation}-{next(self._numbers):08d}")
        request = self._make_stream_request(streamed, streamed.key)
        version = self._served_version
        return await self._record_chunks(streamed, self._read_chunks(request), version, request.label)

    async def _read_chunks(self, request: StreamRequest) -> AsyncGenerator[StreamChunk, None]:
        self._check_labels(request.label, [await self._dialect.read_label(self._client, self._settings.call_s)])
        body, seen = self._dialect.make_body(request), 0
        events = self._client.stream(self._dialect.path, body, silence_s=self._settings.silence_s)
        async with aclosing(events):
            async for event in events:
                chunk = self._dialect.parse_event(event, seen)
                seen += len(chunk.tokens)
                yield chunk

    async def _explain_failure(self, streamed: StreamedRequest, failure: StreamError) -> Exception:
        if isinstance(failure, ServerRefused) and failure.status < 500:
            return EngineError(f"{self.name}: {streamed.request.request_id}: {failure}")
        problem: StreamError | None = failure if isinstance(failure, BackendLost) and failure.silent else None
        label = self._label
        try:
            await self._client.get("/health", timeout_s=self._settings.call_s)
            found = await self._dialect.read_label(self._client, self._settings.call_s)
            if found != label and self._label == label and self._open.is_set():  # no update has come between
                problem = BackendLost(f"it has weights {found!r} and not {label!r}")
        except StreamError as error:
            problem = error
            await self._server.wait_for_end(_NOTICE_END_S)
        if streamed.error is not None:
            return streamed.error
        if problem is None:
            return EngineError(f"{self.name}: {streamed.request.request_id}: {failure}")
        crash = EngineCrashed(f"{self.name}: {failure}; {problem}")
        self._go_down(crash)
        return crash

    async def _ensure_ready(self, timeout_s: float | None = None) -> None:
        """Start the server unless it runs, and check that it can be used."""
        self._check_up()
        if self._ready:
            return
        await self._client.close()
        await self._server.start(lambda how: self._go_down(EngineCrashed(how)))
        if self._closed:  # `close` came in between, before there was a server to end
            await self._server.close()
        self._check_up()
        self._client = HttpClient(self._server.url)
        await wait_until_ready(self.name, self._client, self._server, timeout_s or self._settings.start_s)
        try:
            await self._dialect.connect(self._client, self._settings.call_s)
            await self._hold()
            await self._release()
        except StreamError as error:
            raise EngineCrashed(f"{self.name}: {error} (a server needs {self._dialect.hint})") from error
        await check_logprobs(self.name, self._client, self._dialect, self._settings.silence_s)
        self._ready = True

    async def _switch_to_directory(self, version: int, directory: Path) -> None:
        limit = self._settings.load_s
        await self._switch(version, lambda label: self._dialect.load(self._client, directory, label, limit))

    async def _switch_to_buffer(self, manifest: Manifest, buffer: VersionBuffer) -> None:
        limit = self._settings.load_s
        await self._switch(
            manifest.version, lambda label: self._dialect.load_shared(self._client, manifest, buffer, label, limit)
        )

    async def _switch(self, version: int, load: Callable[[str], Awaitable[None]]) -> None:
        """Serve what `load` brings. A failure half-way leaves nothing that is served."""
        async with self._gate, self._crash_unless_done(f"version {version}"):
            await self._ensure_ready()
            label = f"headway-{self._incarnation}-{version}"
            if self._asleep:
                with name_phase("waking up"):
                    await self._dialect.wake(self._client, self._settings.load_s)
            if not self._paused or self._asleep:
                await self._hold()
            await load(label)
            with name_phase("label"):
                found = await self._dialect.read_label(self._client, self._settings.call_s)
            if found != label:
                raise BackendLost(f"the server says that it has {found!r} after it was given {label!r}")
            self._served_version, self._label, self._asleep = version, label, False
            if not self._paused:
                await self._release()

    async def sleep(self) -> None:
        """Let the server free the memory of its GPU. The next version wakes it up. Implements `SleepingEngine`."""
        async with self._gate, self._crash_unless_done("going to sleep"):
            if self._asleep or not self._ready or not self._settings.sleeps:
                return
            await self._hold()
            with name_phase("sleep"):
                await self._dialect.sleep(self._client, self._settings.load_s)
            self._asleep, self._served_version, self._label = True, -1, ""
            self.receiver.reset(gone=False)

    async def _explain_loss(self, what: str, error: StreamError) -> str:
        return await self._server.wait_for_end(_NOTICE_END_S) or await super()._explain_loss(what, error)

    async def _hold(self) -> None:
        """End all streams, with the tokens they have, and let none begin."""
        self._open.clear()
        with name_phase("pause"):
            await self._dialect.end_requests(self._client, self._settings.call_s)
        for streamed in list(self._streams):
            if not streamed.started:
                streamed.interrupt()  # it may be waiting in the server's queue: there is nothing to lose
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._wait_until_idle()
        except TimeoutError:
            for streamed in list(self._streams):
                streamed.interrupt()
            await self._wait_until_idle()
        with name_phase("pause"):
            await self._dialect.hold(self._client, self._settings.call_s)

    async def _release(self) -> None:
        with name_phase("resume"):
            await self._dialect.release(self._client, self._settings.call_s)
        self._open.set()

    async def _close_backend(self) -> None:
        await self._client.close()
        await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
