"""Questions that nobody trains on: each goes to the hub as it comes.

Guarantees: a request that could not be served is refused before the hub sees it; cancelling it aborts what is being
generated. With a `seed`, equal requests to equal weights get equal answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

from headway.engines.base import Progress, Request
from headway.errors import BackendError
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import RequestLane
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    TextCompletionRequest,
)
from headway.serving.completions import Completion, CompletionChoice, GeneratedTokens, make_choice
from headway.serving.request_errors import RequestRefused, context_length_exceeded


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """News of one choice, for streams."""

    index: int
    tokens: Sequence[int]
    logps: Sequence[float]


DeltaListener = Callable[[CompletionDelta], None]


class CompletionBackend(Protocol):
    """Who answers a request: the hub at once, or an episode when its turn comes."""

    async def answer(
        self, ask: ChatCompletionRequest | TextCompletionRequest, name: str, listener: DeltaListener
    ) -> Completion:
        """All choices. `listener` hears every piece as it is made. Raises `RequestRefused`; cancelling gives up."""
        ...


class DirectCompletions:
    """In front of a hub. `context_tokens`: most tokens of a prompt and its answer together."""

    def __init__(self, hub: InferenceHub, dialect: ChatTemplate, *, context_tokens: int) -> None:
        self._hub, self._dialect, self._room = hub, dialect, context_tokens
        self._seeded: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def answer(
        self, ask: ChatCompletionRequest | TextCompletionRequest, name: str, listener: DeltaListener
    ) -> Completion:
        prompt = encode_prompt(self._dialect, ask)
        if len(prompt) >= self._room:
            raise context_length_exceeded(
                len(prompt), self._room, "messages" if isinstance(ask, ChatCompletionRequest) else "prompt"
            )
        tasks: list[asyncio.Task[CompletionChoice]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._choice(ask, prompt, name, index, listener), name=f"{name}/{index}")
                    for index in range(ask.choices)
                ]
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            if isinstance(first, BackendError):
                raise RequestRefused(str(first), status=500, kind="server_error") from first
            raise first from None
        return Completion(prompt=prompt, choices=tuple(task.result() for task in tasks))

    async def _choice(
        self, ask: CompletionRequest, prompt: list[int], name: str, index: int, listener: DeltaListener
    ) -> CompletionChoice:
        progress = Progress()

        def heard(tokens: Sequence[int]) -> None:
            listener(CompletionDelta(index, tokens, progress.logps[len(progress.logps) - len(tokens) :]))

        progress.on_chunk = heard
        limit = min(ask.limit or self._room, self._room - len(prompt))
        async with self._named(ask, prompt, index) as request_id:
            request = Request(
                request_id=request_id,
                session=name,
                prompt=prompt,
                params=replace(ask.sampling, max_new_tokens=limit),
                prefix_key=0 if ask.choices > 1 else -1,
            )
            try:
                finish = await self._hub.generate(request, progress, lane=RequestLane.VALIDATE)
            finally:
                self._hub.end_session(name)
        made = GeneratedTokens(tokens=progress.actions, logps=progress.logps, finish=finish)
        return make_choice(self._dialect, ask, made, f"{name}{index}")

    @asynccontextmanager
    async def _named(self, ask: CompletionRequest, prompt: list[int], index: int) -> AsyncIterator[str]:
        """The request's id, which decides every draw. Of equal seeded requests one is made after the other."""
        if ask.seed is None:
            yield f"open/{uuid4().hex}"
            return
        said = blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
        request_id = f"seed/{ask.seed}/{index}/{said}"
        lock = self._seeded.get(request_id) or asyncio.Lock()
        self._seeded[request_id] = lock
        async with lock:
            yield request_id


def encode_prompt(dialect: ChatTemplate, ask: ChatCompletionRequest | TextCompletionRequest) -> list[int]:
    """The tokens that a request conditions on, with nothing known of it. Raises `RequestRefused`."""
    if isinstance(ask, ChatCompletionRequest):
        return dialect.prompt(ask.messages, ask.tools, ask.template)
    if isinstance(ask.prompt, str):
        return dialect.encoded(ask.prompt, whole=True)
    if strange := [token for token in ask.prompt if token >= dialect.tokens]:
        raise RequestRefused(
            f"prompt: there is no token {strange[0]}; the last one is {dialect.tokens - 1}", param="prompt"
        )
    return list(ask.prompt)
