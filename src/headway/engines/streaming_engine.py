"""The base of engines that answer a request by streams of tokens from a back end: a server, or vLLM in this process.

A weight update ends the streams that run, with all tokens they have; each request then continues from its own tokens in
a new stream. So no stream lives under two versions, every token carries the version that made it, and its KV is
computed again with the weights that continue it.

Guarantees: actions are recorded in order and kept whatever happens to the back end; nothing is recorded after
`generate` has returned or raised. A pause, a resume or an update that fails or is cancelled half-way takes the replica
down, because it is then unknown which weights it has. Does not know how a stream is opened.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from headway.engines.base import (
    DecodeTokens,
    Progress,
    Request,
    ResettableReceiver,
    check_request,
    count_until_stop,
    ends_with_stop_string,
)
from headway.errors import EngineCrashed, EngineError
from headway.types import FinishReason, SamplingParams


class StreamError(EngineError):
    """A call or a stream of the back end failed."""


class BackendLost(StreamError):
    """The back end gave no whole answer: none, half of one, or none in time (`silent`)."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        self.silent = silent
        super().__init__(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """The request for one stream, as the back end gets it."""

    key: str
    """The back end's name for it. All are of one length: SGLang aborts every request that begins with a given key."""
    prompt: Sequence[int]
    max_tokens: int
    params: SamplingParams
    end_tokens: Sequence[int]
    label: str
    """Label of the weights; prefixes are shared only under the same one."""

    def sampling_arguments(self) -> dict[str, Any]:
        """Return how tokens are drawn and where a request ends, by names that vLLM and SGLang share.

        All of them are set, so that a checkpoint's own generation settings have no effect.
        """
        return {
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k if self.params.top_k > 0 else -1,
            "min_p": self.params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(self.params.stop),
            "stop_token_ids": list(self.end_tokens),
            "skip_special_tokens": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The tokens that one event of a stream adds."""

    tokens: Sequence[int] = ()
    logps: Sequence[float] = ()
    finish: FinishReason | None = None
    labels: Sequence[str] = ()
    """Labels of the weights that made tokens of this stream, where the back end says so."""


FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
"""The words that vLLM and SGLang have for the end of a request."""


class StreamedRequest:
    """One call of `generate`. It has one stream after the other, and waits in between."""

    __slots__ = ("aborted", "error", "key", "over", "progress", "request", "scope", "started")

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.key = ""
        """The back end's name for the current stream; empty: there is none."""
        self.started = False
        """The current stream has brought tokens."""
        self.aborted = False
        self.error: EngineCrashed | None = None
        self.scope: asyncio.Timeout | None = None
        self.over = asyncio.Event()

    def interrupt(self) -> None:
        """Leave the stream, or the wait for one, now."""
        if self.scope is not None:
            with suppress(RuntimeError):  # it is being left already
                self.scope.reschedule(asyncio.get_running_loop().time())


class StreamingEngine(ABC):
    """`end_tokens` end an answer; `decode` is needed for stop strings only."""

    receiver: ResettableReceiver

    def __init__(
        self, name: str, *, context_tokens: int, end_tokens: Iterable[int], decode: DecodeTokens | None
    ) -> None:
        self.name = name
        self._context_tokens, self._end_tokens, self._decode = context_tokens, sorted(set(end_tokens)), decode
        self._requests: dict[str, StreamedRequest] = {}
        self._streams: set[StreamedRequest] = set()
        """Requests whose stream may run in the back end."""
        self._idle = asyncio.Event()
        """Set when no stream is left."""
        self._open = asyncio.Event()
        """Set while streams may run. Where it is not, this engine ends streams, and they continue later."""
        self._open.set()
        self._gate = asyncio.Lock()
        """Held while the engine pauses, resumes or updates."""
        self._served_version, self._label = -1, ""
        """What the back end serves, and under which label."""
        self._paused = False
        self._crash: EngineCrashed | None = None
        self._closed = False

    # What the hub calls.

    async def start(self) -> None:
        """Have the back end ready. Raises `ConfigError` where it cannot be used, else `EngineCrashed`."""
        async with self._gate:
            await self._ensure_ready()

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        streamed = self._accept(request, progress)
        finish = self._find_finish(streamed)
        if finish is not None:
            return finish
        self._requests[request.request_id] = streamed
        try:
            while finish is None:  # a stream may be interrupted after its last token, while it is closed
                finish = await self._run_stream(streamed) or self._find_finish(streamed)
            return finish
        finally:
            del self._requests[request.request_id]
            streamed.over.set()

    async def pause(self) -> None:
        async with self._gate, self._crash_unless_done("pausing"):
            await self._ensure_ready()
            if not self._paused:
                await self._hold()
                self._paused = True

    async def resume(self) -> None:
        async with self._gate:
            if not self._paused or self._crash is not None or self._closed:
                return
            async with self._crash_unless_done("resuming"):
                await self._release()
                self._paused = False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for streamed in list(self._requests.values()):
            streamed.aborted = True
            streamed.interrupt()
            await streamed.over.wait()
        self.receiver.reset(gone=True)
        await self._close_backend()

    # What differs between back ends.

    @abstractmethod
    async def _stream(self, streamed: StreamedRequest) -> FinishReason:
        """Wait until a stream may begin, open it and read it to its end. Raises `StreamError`."""

    async def _ensure_ready(self) -> None:
        """Raise `EngineCrashed` unless the back end can be used."""
        self._check_up()

    @abstractmethod
    async def _hold(self) -> None:
        """Stop making tokens."""

    @abstractmethod
    async def _release(self) -> None:
        """Make tokens again."""

    @abstractmethod
    async def _close_backend(self) -> None:
        """Release everything."""

    async def _explain_failure(self, streamed: StreamedRequest, failure: StreamError) -> Exception:
        """Return the error to raise for a stream that failed: of this request, or of the whole replica."""
        return EngineError(f"{self.name}: {streamed.request.request_id}: {failure}")

    async def _explain_loss(self, what: str, error: StreamError) -> str:
        """Return why the replica is gone when `what` failed with `error`."""
        return f"{self.name}: {what}: {error}"

    def _accept(self, request: Request, progress: Progress) -> StreamedRequest:
        """Validate the request. Raises `EngineError` where it cannot be served, `EngineCrashed` where nothing can."""
        self._check_up()
        check_request(
            request,
            progress,
            f"{self.name}: {request.request_id}",
            version=self.receiver.version,
            running=request.request_id in self._requests,
            decodes=self._decode is not None,
            most_tokens=self._context_tokens,
        )
        return StreamedRequest(request, progress)

    def _find_finish(self, streamed: StreamedRequest) -> FinishReason | None:
        """Return how a request has ended that comes back complete; None where it is not complete."""
        actions, stops = streamed.progress.actions, streamed.request.params.stop
        if len(actions) and (actions[-1] in self._end_tokens or ends_with_stop_string(actions, stops, self._decode)):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._count_missing_tokens(streamed) <= 0 else None

    async def _run_stream(self, streamed: StreamedRequest) -> FinishReason | None:
        """Run one stream. Returns None when this engine has ended it, and the request continues in another."""
        failure: StreamError | None = None
        finish = FinishReason.ABORTED
        try:
            async with asyncio.timeout(None) as streamed.scope:
                finish = await self._stream(streamed)
        except TimeoutError:
            pass  # interrupted
        except StreamError as error:
            failure = error
        finally:
            streamed.scope, streamed.key, streamed.started = None, "", False
            self._streams.discard(streamed)
            if not self._streams:
                self._idle.set()
        if streamed.error is not None:
            raise streamed.error
        if failure is None and finish is not FinishReason.ABORTED:
            return finish
        if streamed.aborted:
            return FinishReason.ABORTED
        if not self._open.is_set():
            return None
        raise await self._explain_failure(streamed, failure or BackendLost("the back end has aborted it by itself"))

    def _make_stream_request(self, streamed: StreamedRequest, key: str) -> StreamRequest:
        """Return the request for a stream that continues prompt and actions so far."""
        return StreamRequest(
            key=key,
            prompt=[*streamed.request.prompt, *streamed.progress.actions],
            max_tokens=self._count_missing_tokens(streamed),
            params=streamed.request.params,
            end_tokens=self._end_tokens,
            label=self._label,
        )

    def _count_missing_tokens(self, streamed: StreamedRequest) -> int:
        """Return how many tokens the request may still get: up to its own limit, or that of the context."""
        request = streamed.request
        limit = min(request.params.max_new_tokens, self._context_tokens - len(request.prompt))
        return limit - len(streamed.progress.actions)

    def _enter_stream(self, streamed: StreamedRequest, key: str) -> None:
        """Count the request among those whose stream may run."""
        streamed.key = key
        self._streams.add(streamed)
        self._idle.clear()

    async def _record_chunks(
        self, streamed: StreamedRequest, chunks: AsyncGenerator[StreamChunk, None], version: int, label: str
    ) -> FinishReason:
        """Record what a stream of the weights `label` brings. Raises `BackendLost` where it breaks off."""
        progress, stops, decode = streamed.progress, streamed.request.params.stop, self._decode
        resumed = len(progress.actions) > 0
        async with aclosing(chunks):
            async for chunk in chunks:
                self._check_labels(label, chunk.labels)
                tokens = chunk.tokens
                count = count_until_stop(progress.actions, tokens, stops, decode) if resumed else len(tokens)
                progress.extend(tokens[:count], chunk.logps[:count], version)
                streamed.started = streamed.started or bool(tokens)
                if count < len(tokens) or (
                    resumed and count and ends_with_stop_string(progress.actions, stops, decode)
                ):
                    return FinishReason.STOP  # it began before the stream did, so that the back end could not see it
                if chunk.finish is not None:
                    return chunk.finish
        raise BackendLost("the stream ended in the middle of an answer")

    def _check_labels(self, expected: str, labels: Sequence[str]) -> None:
        """Take the replica down where the back end has other weights than it was given."""
        for label in labels:
            if label != expected:
                crash = EngineCrashed(f"{self.name}: it has weights {label!r} and not {expected!r}, which it was given")
                self._go_down(crash)
                raise crash

    async def _wait_until_idle(self) -> None:
        while self._streams:
            await self._idle.wait()

    @asynccontextmanager
    async def _crash_unless_done(self, what: str) -> AsyncIterator[None]:
        """Take the replica down when the body is cancelled or fails."""
        try:
            yield
        except StreamError as error:
            crash = EngineCrashed(await self._explain_loss(what, error))
            self._go_down(crash)
            raise crash from error
        except BaseException as error:
            self._go_down(EngineCrashed(f"{self.name}: {what} was not finished: {error or type(error).__name__}"))
            raise

    def _go_down(self, crash: EngineCrashed) -> bool:
        """Lose everything but what was recorded. Returns False where the engine is down or closed already."""
        if self._crash is not None or self._closed:
            return False
        self._crash, self._served_version, self._label = crash, -1, ""
        self.receiver.reset(gone=True)
        for streamed in list(self._requests.values()):
            streamed.error = crash
            streamed.interrupt()
        return True

    def _check_up(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        if self._crash is not None:
            raise EngineCrashed(str(self._crash)) from self._crash
