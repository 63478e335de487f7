"""Requests whose streams are interrupted at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from headway.engines.base import Progress, Request
from headway.engines.streaming_engine import StreamChunk, StreamedRequest, StreamingEngine
from headway.types import FinishReason, SamplingParams

CONTEXT, END = 20, 7


class Receiver:
    """What an engine asks of its receiver while nothing is updated."""

    version = 3

    def reset(self, *, gone: bool) -> None: ...


class SlowlyClosedStreams(StreamingEngine):
    """Answers with `tokens` in one chunk. A stream that has ended is closed only when it is interrupted."""

    receiver = Receiver()  # type: ignore[assignment]

    def __init__(self, tokens: list[int]) -> None:
        super().__init__("engine/0", context_tokens=CONTEXT, end_tokens=[END], decode=None)
        self.tokens, self.closing, self.opened = tokens, asyncio.Event(), 0

    async def _stream(self, streamed: StreamedRequest) -> FinishReason:
        await self._open.wait()
        self.opened += 1
        self._enter_stream(streamed, str(self.opened))
        return await self._record_chunks(streamed, self._read_chunks(), self.receiver.version, "")

    async def _read_chunks(self) -> AsyncGenerator[StreamChunk, None]:
        try:
            yield StreamChunk(tokens=self.tokens, logps=[0.0] * len(self.tokens), finish=FinishReason.STOP)
        finally:
            self.closing.set()
            await asyncio.Event().wait()

    async def _hold(self) -> None:
        self._open.clear()
        for streamed in list(self._streams):
            streamed.interrupt()
        await self._wait_until_idle()

    async def _release(self) -> None:
        self._open.set()

    async def _close_backend(self) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def restart(self) -> None: ...


@pytest.mark.parametrize(
    ("tokens", "limit", "finish"),
    [
        ([1, 2, END], 10, FinishReason.STOP),
        ([1, 2, 3, 4], 4, FinishReason.LENGTH),
        ([1] * (CONTEXT - 2), 100, FinishReason.LENGTH),
    ],
    ids=["end token", "limit of the request", "limit of the context"],
)
def test_an_answer_that_is_complete_is_not_continued_after_a_pause(
    tokens: list[int], limit: int, finish: FinishReason
) -> None:
    async def scenario() -> None:
        engine, progress = SlowlyClosedStreams(tokens), Progress()
        request = Request(request_id="a", session="a", prompt=[1, 2], params=SamplingParams(max_new_tokens=limit))
        answer = asyncio.create_task(engine.generate(request, progress))
        await engine.closing.wait()
        await engine.pause()
        await engine.resume()
        assert await asyncio.wait_for(answer, 60) is finish
        assert list(progress.actions) == tokens and engine.opened == 1
        assert [(run.version, run.count) for run in progress.runs] == [(3, len(tokens))]

    asyncio.run(scenario())
