"""A replica that is a server behind HTTP, as the hub sees it.

Guarantees beyond those of `StreamingEngine`: weights are loaded while nothing runs, and the server is asked afterwards
which weights it serves. A server that its owner restarted is recognized by its label before a token of it is taken. A
request that fails on a server which still answers is `EngineError` for itself only.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path

from headway.engines.base import DecodeTokens
from headway.engines.servers.directory_receiver import DirectoryReceiver
from headway.engines.servers.http_client import HttpClient, ServerRefused
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
from headway.weights.base import OpenPayload

_NOTICE_END_S = 1.0
"""A launched server that does not answer may have ended: after this time its end is known."""


class ServerEngine(StreamingEngine):
    """Versions are written below `root`; the server must read the same path.

    `model_directory` holds the other files of a checkpoint, `open_payload` opens payloads of buckets.
    """

    receiver: DirectoryReceiver

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
    ) -> None:
        self._settings = settings or ServerSettings()
        super().__init__(name, context_tokens=self._settings.context_tokens, end_tokens=end_tokens, decode=decode)
        self._root = root.absolute()
        self.receiver = DirectoryReceiver(
            self._root, self._switch, model_directory=model_directory, open_payload=open_payload
        )
        self.slots = self._settings.slots
        self._server, self._dialect = server, dialect
        self._client = HttpClient(server.url)
        self._incarnation = secrets.token_hex(4)
        """Part of labels and keys: tells what this life of the server was given from what others were."""
        self._numbers = count()
        self._ready = False

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
            self._crash, self._ready, self._paused = None, False, False
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

    async def _switch(self, version: int, directory: Path) -> None:
        """Serve what is in `directory`. A failure half-way leaves nothing that is served."""
        async with self._gate, self._crash_unless_done(f"version {version}"):
            await self._ensure_ready()
            label = f"headway-{self._incarnation}-{version}"
            if not self._paused:
                await self._hold()
            await self._dialect.load(self._client, directory, label, self._settings.load_s)
            found = await self._dialect.read_label(self._client, self._settings.call_s)
            if found != label:
                raise BackendLost(f"the server says that it has {found!r} after it was given {label!r}")
            self._served_version, self._label = version, label
            if not self._paused:
                await self._release()

    async def _explain_loss(self, what: str, error: StreamError) -> str:
        return await self._server.wait_for_end(_NOTICE_END_S) or await super()._explain_loss(what, error)

    async def _hold(self) -> None:
        """End all streams, with the tokens they have, and let none begin."""
        self._open.clear()
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
        await self._dialect.hold(self._client, self._settings.call_s)

    async def _release(self) -> None:
        await self._dialect.release(self._client, self._settings.call_s)
        self._open.set()

    async def _close_backend(self) -> None:
        await self._client.close()
        await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
