"""A replica that is a vLLM in this process, as its host sees it.

Requests enter through a gate, and whoever flips or pauses holds it. A pause keeps everything where it is, KV included.
A flip ends the streams that run, with all tokens they have, and each request goes on afterwards from its own tokens in
a stream of its own: no stream lives under two versions, so every token carries the one that made it, and its KV is
computed again with the weights that go on. What vLLM itself says about the weights of a stream is compared.

Guarantees: actions are entered in order; nothing is entered after `generate` has returned or raised. Weights are loaded
while nothing runs. A pause or a flip that fails or is cancelled half-way takes the replica down, and `on_down` is told:
what vLLM has then is nobody's version. Does not come back by itself: its process is started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any

from headway.engines.base import Progress, Request, check_request
from headway.engines.stop_strings import StopStringSearch
from headway.engines.streaming_engine import StreamedRequest
from headway.engines.vllm.shared_buffer_receiver import SharedBuffer, SharedBufferReceiver
from headway.engines.vllm.vllm_core import CoreChunk, CoreLostError, CoreRequest, CoreStream, VllmCore
from headway.errors import EngineCrashed, EngineError
from headway.types import FinishReason
from headway.weights.base import Manifest


class InProcessEngine:
    """`ends`: tokens that end an answer. `decode` is needed for stop strings only. The rest: see `SharedBufferReceiver`."""

    def __init__(
        self,
        name: str,
        core: VllmCore,
        *,
        slots: int,
        context_tokens: int,
        room: Callable[[int], SharedBuffer],
        check: Callable[[Manifest], None] = lambda manifest: None,
        read: Callable[[Any], Any] = memoryview,
        ends: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        on_down: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.name = name
        self.slots = slots
        self._core, self._context_tokens = core, context_tokens
        self.receiver = SharedBufferReceiver(self._switch, room=room, check=check, read=read)
        self._ends, self._decode, self._on_down = sorted(set(ends)), decode, on_down
        self._numbers = count()
        self._tickets: dict[str, StreamedRequest] = {}
        self._streams: set[StreamedRequest] = set()
        self._idle = asyncio.Event()
        """No stream is left."""
        self._gate = asyncio.Lock()
        self._flipping = False
        """Streams that end now go on afterwards."""
        self._serving = -1
        self._paused = False
        self._down: EngineCrashed | None = None
        self._closed = False
        core.on_end = lambda how: self._die(EngineCrashed(f"{name}: {how}"))

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
        if ticket.key:
            await self._core.abort(ticket.key)
        else:
            ticket.interrupt()
        await ticket.over.wait()

    async def pause(self) -> None:
        async with self._gate, self._or_down("pausing"):
            self._check_up()
            if not self._paused:
                await self._core.hold()
                self._paused = True

    async def resume(self) -> None:
        async with self._gate:
            if not self._paused or self._down is not None or self._closed:
                return
            async with self._or_down("resuming"):
                await self._core.go_on()
                self._paused = False

    async def start(self) -> None:
        """Do nothing: vLLM is up when this object is made."""

    async def restart(self) -> None:
        raise EngineCrashed(f"{self.name}: a vLLM comes back with its process, not in it")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for ticket in list(self._tickets.values()):
            ticket.aborted = True
            ticket.interrupt()
            await ticket.over.wait()
        self.receiver.reset(gone=True)
        await self._core.close()

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
        length, room = len(request.prompt) + len(progress.actions), self._context_tokens
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
        """One stream. `None`: a flip has ended it, and it goes on under the version that comes."""
        finish = FinishReason.ABORTED
        try:
            async with asyncio.timeout(None) as ticket.scope:
                async with self._gate:
                    pieces, version = await self._entered(ticket), self._serving
                finish = await self._read(ticket, pieces, stops, version)
        except TimeoutError:
            pass  # interrupted
        except CoreLostError as error:
            self._die(EngineCrashed(f"{self.name}: {error}"))
        finally:
            ticket.scope, ticket.key = None, ""
            self._streams.discard(ticket)
            if not self._streams:
                self._idle.set()
        if ticket.error is not None:
            raise ticket.error
        if finish is not FinishReason.ABORTED or ticket.aborted:
            return finish
        if self._flipping:
            return None
        raise EngineError(f"{self.name}: {ticket.request.request_id}: vLLM has aborted it by itself")

    async def _entered(self, ticket: StreamedRequest) -> CoreStream:
        """Begun, by what is served now. The gate is ours."""
        self._check_up()
        prompt = [*ticket.request.prompt, *ticket.progress.actions]
        wanted = ticket.request.params.max_new_tokens - len(ticket.progress.actions)
        asked = CoreRequest(
            key=f"headway-{next(self._numbers)}",
            prompt=prompt,
            count=min(wanted, self._context_tokens - len(prompt)),
            params=ticket.request.params,
            ends=self._ends,
        )
        pieces = await self._core.add(asked)
        ticket.key = asked.key
        self._streams.add(ticket)
        self._idle.clear()
        return pieces

    async def _read(
        self, ticket: StreamedRequest, pieces: CoreStream, stops: StopStringSearch, version: int
    ) -> FinishReason:
        progress = ticket.progress
        resumed = len(progress.actions) > 0
        async with aclosing(pieces):
            async for piece in pieces:
                self._check_labels(piece, version)
                kept = stops.cut(progress.actions, piece.tokens) if resumed else len(piece.tokens)
                progress.extend(piece.tokens[:kept], piece.logps[:kept], version)
                if kept < len(piece.tokens) or (resumed and kept and stops.completed(progress.actions)):
                    return FinishReason.STOP  # begun before the stream was, so that vLLM could not see it
                if piece.finish is not None:
                    return piece.finish
        raise CoreLostError("the stream ended in the middle of an answer")

    def _check_labels(self, piece: CoreChunk, version: int) -> None:
        strange = [label for label in piece.labels if label != str(version)]
        if strange:
            raise CoreLostError(f"tokens of version {version} were made by weights {', '.join(strange)}")

    # The replica as a whole.

    async def _switch(self, manifest: Manifest, segment: str) -> None:
        """Serve what is in `segment`. Whatever goes wrong half-way leaves nothing that is served."""
        async with self._gate, self._or_down(f"version {manifest.version}"):
            self._check_up()
            self._flipping = True
            await self._core.stop()
            while self._streams:
                await self._idle.wait()
            self._flipping = False
            await self._core.load(manifest, segment, str(manifest.version))
            self._serving = manifest.version
            if not self._paused:
                await self._core.go_on()

    @asynccontextmanager
    async def _or_down(self, what: str) -> AsyncIterator[None]:
        """What does not get through, cancelled or failed, takes the replica down."""
        try:
            yield
        except EngineCrashed:
            raise
        except CoreLostError as error:
            crash = EngineCrashed(f"{self.name}: {what}: {error}")
            self._die(crash)
            raise crash from error
        except BaseException as error:
            self._die(EngineCrashed(f"{self.name}: {what} was not finished: {error or type(error).__name__}"))
            raise

    def _die(self, crash: EngineCrashed) -> None:
        """Lose everything but what has been told."""
        if self._closed or self._down is not None:
            return
        self._down, self._serving = crash, -1
        self.receiver.reset(gone=True)
        for ticket in list(self._tickets.values()):
            ticket.error = crash
            ticket.interrupt()
        self._on_down(str(crash))

    def _check_up(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        if self._down is not None:
            raise EngineCrashed(str(self._down)) from self._down
