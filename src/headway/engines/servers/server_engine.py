"""A replica that is a server behind HTTP, as the hub sees it.

A request is one stream after another: whoever pauses or flips ends the streams that run, and each request goes on from
its own tokens afterwards, in a stream of its own. So a stream never lives under two versions, and every token carries
the one that made it; its KV is computed again with the weights that go on.

Guarantees: actions are entered in order and kept whatever happens to the server; nothing is entered after `generate`
has returned or raised. Weights are loaded while nothing runs, and the server is asked afterwards which it serves; an
update that fails or is cancelled half-way is `EngineCrashed` for everybody: what a server has then is nobody's version.
A server that was restarted behind our back is found out by its label before a token of it is taken. A request that
fails on a server which still answers is `EngineError` for itself only.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from headway.engines.base import Progress, Request, check_request
from headway.engines.servers.directory_receiver import DirectoryReceiver
from headway.engines.servers.http_client import HttpClient, ServerLostError, ServerRefusedError
from headway.engines.servers.server_dialect import ServerDialect, ServerRequest, check_logprobs, wait_until_ready
from headway.engines.servers.server_process import ServerHandle
from headway.engines.servers.settings import ServerSettings
from headway.engines.stop_strings import StopStringSearch
from headway.engines.streaming_engine import StreamedRequest
from headway.errors import ConfigError, EngineCrashed, EngineError
from headway.types import FinishReason

_NOTICED_S = 1.0
"""A server of ours that does not answer may have ended: whoever waits this long knows."""


class ServerEngine:
    """`root`: where versions are written; the server must read the same path. `ends`: tokens that end an answer.

    `decode` is needed for stop strings only, `beside` is the model's directory, `read` opens payloads of buckets.
    """

    def __init__(
        self,
        name: str,
        server: ServerHandle,
        dialect: ServerDialect,
        settings: ServerSettings | None = None,
        *,
        root: Path,
        ends: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        beside: Path | None = None,
        read: Callable[[Any], Any] = memoryview,
    ) -> None:
        self.name = name
        self._root = root.absolute()
        self.receiver = DirectoryReceiver(self._root, self._switch, beside=beside, read=read)
        self._server, self._dialect = server, dialect
        self._settings = settings or ServerSettings()
        self._ends, self._decode = sorted(set(ends)), decode
        self._link = HttpClient(server.url)
        self._life = secrets.token_hex(4)
        self._label = ""
        """Of the version that is served, on the server."""
        self._serving = -1
        self._numbers = count()
        self._tickets: dict[str, StreamedRequest] = {}
        self._streams: set[StreamedRequest] = set()
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        """No stream is left."""
        self._changing = asyncio.Lock()
        self._paused = False
        self._ready = False
        self._down: EngineCrashed | None = None
        self._closed = False
        self._open.set()
        server.on_end = lambda how: self._die(EngineCrashed(how))

    @property
    def slots(self) -> int:
        return self._settings.slots

    async def start(self) -> None:
        """Have the server ready. Raises `ConfigError` where it cannot be used, else `EngineCrashed`."""
        async with self._changing:
            await self._up(self._settings.first_s)

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        ticket = self._accepted(request, progress)
        stops = StopStringSearch(request.params.stop, self._decode)
        finish = self._over_already(ticket, stops)
        if finish is not None:
            return finish
        self._tickets[request.request_id] = ticket
        try:
            while finish is None:
                finish = await self._stretch(ticket, stops)
            return finish
        finally:
            del self._tickets[request.request_id]
            ticket.over.set()

    async def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is None or self._down is not None or self._closed:
            return
        ticket.aborted = True
        if ticket.fed:
            with suppress(ServerLostError, ServerRefusedError, TimeoutError):
                await self._dialect.abort(self._link, ticket.key, self._settings.call_s)
                async with asyncio.timeout(self._settings.drain_s):
                    await ticket.over.wait()
        if not ticket.over.is_set():
            ticket.interrupt()
            await ticket.over.wait()

    async def pause(self) -> None:
        async with self._changing, self._or_down("pausing"):
            await self._up()
            if not self._paused:
                await self._hold()
                self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            if not self._paused or self._down is not None or self._closed:
                return
            async with self._or_down("resuming"):
                await self._release()
                self._paused = False

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        self._die(EngineCrashed(f"{self.name} is restarted"))
        async with self._changing:
            self._down, self._ready, self._paused = None, False, False
            self._life = secrets.token_hex(4)
            self.receiver.reset(gone=False)
            try:
                async with self._or_down("starting"):
                    await self._up()
            except ConfigError as error:
                raise EngineCrashed(f"{self.name} does not come up: {error}") from error
            self._open.set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for ticket in list(self._tickets.values()):
            ticket.aborted = True
            ticket.interrupt()
            await ticket.over.wait()
        self.receiver.reset(gone=True)
        await self._link.close()
        await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    # Requests.

    def _accepted(self, request: Request, progress: Progress) -> StreamedRequest:
        """Or why not."""
        self._check_up()
        where = f"{self.name}: {request.request_id}"
        check_request(
            request,
            where,
            version=self.receiver.version,
            running=request.request_id in self._tickets,
            decodes=self._decode is not None,
        )
        length, room = len(request.prompt) + len(progress.actions), self._settings.context_tokens
        if length >= room:
            raise EngineError(f"{where}: {length} tokens leave no room in a context of {room}")
        return StreamedRequest(request, progress)

    def _over_already(self, ticket: StreamedRequest, stops: StopStringSearch) -> FinishReason | None:
        """A request that comes back with all that it wanted."""
        actions = ticket.progress.actions
        if len(actions) and (actions[-1] in self._ends or stops.completed(actions)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(actions) >= ticket.request.params.max_new_tokens else None

    async def _stretch(self, ticket: StreamedRequest, stops: StopStringSearch) -> FinishReason | None:
        """One stream. `None`: a pause or a flip has ended it, and it goes on afterwards."""
        failure: EngineError | None = None
        finish: FinishReason | None = FinishReason.ABORTED
        try:
            async with asyncio.timeout(None) as ticket.scope:
                while not self._open.is_set():  # it may be closed again before we are woken
                    await self._open.wait()
                self._streams.add(ticket)
                self._idle.clear()
                finish = await self._stream(ticket, stops)
        except TimeoutError:
            pass  # interrupted
        except (ServerRefusedError, ServerLostError) as error:
            failure = error
        finally:
            ticket.scope, ticket.key, ticket.fed = None, "", False
            self._streams.discard(ticket)
            if not self._streams:
                self._idle.set()
        if ticket.error is not None:
            raise ticket.error
        if failure is None and finish is not FinishReason.ABORTED:
            return finish
        if ticket.aborted:
            return FinishReason.ABORTED
        if not self._open.is_set():
            return None
        raise await self._judged(ticket, failure or ServerLostError("the server has aborted a request of ours"))

    async def _stream(self, ticket: StreamedRequest, stops: StopStringSearch) -> FinishReason:
        version, label, progress = self._serving, self._label, ticket.progress
        prompt = [*ticket.request.prompt, *progress.actions]
        wanted = ticket.request.params.max_new_tokens - len(progress.actions)
        ticket.key = f"headway-{self._life}-{next(self._numbers):08d}"
        asked = ServerRequest(
            key=ticket.key,
            prompt=prompt,
            count=min(wanted, self._settings.context_tokens - len(prompt)),
            params=ticket.request.params,
            ends=self._ends,
            label=label,
        )
        resumed, seen = len(progress.actions) > 0, 0
        self._check_label(label, await self._dialect.label(self._link, self._settings.call_s))
        stream = self._link.events(self._dialect.path, self._dialect.body(asked), silence_s=self._settings.silence_s)
        async with aclosing(stream) as events:
            async for event in events:
                told = self._dialect.read(event, seen)
                self._check_label(label, told.label)
                kept = stops.cut(progress.actions, told.tokens) if resumed else len(told.tokens)
                progress.extend(told.tokens[:kept], told.logps[:kept], version)
                seen, ticket.fed = seen + len(told.tokens), ticket.fed or bool(told.tokens)
                if kept < len(told.tokens) or (resumed and kept and stops.completed(progress.actions)):
                    return FinishReason.STOP  # begun before the stream was, so the server could not see it
                if told.finish is not None:
                    return told.finish
        raise ServerLostError(f"{self._link.url}: the stream ended in the middle of an answer")

    def _check_label(self, wanted: str, found: str | None) -> None:
        if found is not None and found != wanted:
            crash = EngineCrashed(f"{self.name}: the server has weights {found!r} and not {wanted!r} that we gave it")
            self._die(crash)
            raise crash

    async def _judged(self, ticket: StreamedRequest, failure: EngineError) -> EngineError | EngineCrashed:
        """Whether one request failed, or the server is gone."""
        if isinstance(failure, ServerRefusedError) and not failure.theirs:
            return EngineError(f"{self.name}: {ticket.request.request_id}: {failure}")
        trouble: EngineError | None = failure if isinstance(failure, ServerLostError) and failure.silent else None
        label = self._label
        try:
            await self._link.get("/health", timeout_s=self._settings.call_s)
            found = await self._dialect.label(self._link, self._settings.call_s)
            if found != label and self._label == label and self._open.is_set():  # no flip has come between
                trouble = ServerLostError(f"it has weights {found!r} and not {label!r} that we gave it")
        except (ServerRefusedError, ServerLostError) as error:
            trouble = error
            await self._server.ending(_NOTICED_S)
        if ticket.error is not None:
            return ticket.error
        if trouble is None:
            return EngineError(f"{self.name}: {ticket.request.request_id}: {failure}")
        crash = EngineCrashed(f"{self.name}: {failure}; {trouble}")
        self._die(crash)
        return crash

    # The server as a whole.

    async def _up(self, within_s: float | None = None) -> None:
        """Started and answering; at once where it is."""
        self._check_up()
        if self._ready:
            return
        await self._link.close()
        await self._server.start()
        self._link = HttpClient(self._server.url)
        await wait_until_ready(self.name, self._link, self._server, within_s or self._settings.start_s)
        try:
            await self._dialect.greet(self._link, self._settings.call_s)
            await self._hold()
            await self._release()
        except (ServerRefusedError, ServerLostError) as error:
            raise EngineCrashed(f"{self.name}: {error} (a server needs {self._dialect.hint})") from error
        await check_logprobs(self.name, self._link, self._dialect, self._settings.silence_s)
        self._ready = True

    async def _switch(self, version: int, directory: Path) -> None:
        """Serve what is in `directory`. Whatever goes wrong half-way leaves nothing that is served."""
        async with self._changing, self._or_down(f"version {version}"):
            await self._up()
            label = f"headway-{self._life}-{version}"
            if not self._paused:
                await self._hold()
            await self._dialect.load(self._link, directory, label, self._settings.load_s)
            found = await self._dialect.label(self._link, self._settings.call_s)
            if found != label:
                raise ServerLostError(f"the server says that it has {found!r} after it was given {label!r}")
            self._serving, self._label = version, label
            if not self._paused:
                await self._release()

    @asynccontextmanager
    async def _or_down(self, what: str) -> AsyncIterator[None]:
        """What does not get through, cancelled or failed, takes the replica down."""
        try:
            yield
        except (ServerRefusedError, ServerLostError) as error:
            ended = await self._server.ending(_NOTICED_S)
            crash = EngineCrashed(ended or f"{self.name}: {what}: {error}")
            self._die(crash)
            raise crash from error
        except BaseException as error:
            self._die(EngineCrashed(f"{self.name}: {what} was not finished: {error or type(error).__name__}"))
            raise

    async def _hold(self) -> None:
        """End all streams, with the tokens they have, and let none begin."""
        self._open.clear()
        await self._dialect.stop(self._link, self._settings.call_s)
        for ticket in list(self._streams):
            if not ticket.fed:
                ticket.interrupt()  # it may be waiting in the server's queue: there is nothing to lose
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._drained()
        except TimeoutError:
            for ticket in list(self._streams):
                ticket.interrupt()
            await self._drained()
        await self._dialect.hold(self._link, self._settings.call_s)

    async def _drained(self) -> None:
        while self._streams:
            await self._idle.wait()

    async def _release(self) -> None:
        await self._dialect.go_on(self._link, self._settings.call_s)
        self._open.set()

    def _die(self, crash: EngineCrashed) -> None:
        """Lose everything but what has been told."""
        if self._down is None:
            self._down = crash
        self._serving, self._label = -1, ""
        self.receiver.reset(gone=True)
        for ticket in list(self._tickets.values()):
            ticket.error = ticket.error or crash
            ticket.interrupt()

    def _check_up(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        if self._down is not None:
            raise EngineCrashed(str(self._down)) from self._down
