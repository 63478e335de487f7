"""Completions without training: each request goes straight to the inference hub.

Guarantees: a request that cannot be served is refused before the hub sees it; cancelling a request aborts its
generation. With a `seed`, equal requests to equal weights get equal answers.
"""

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
from headway.serving.completion_requests import ChatCompletionRequest, TextCompletionRequest
from headway.serving.completions import Completion, CompletionChoice, GeneratedTokens, make_choice
from headway.serving.request_errors import RequestRefused, context_length_exceeded

AnyRequest = ChatCompletionRequest | TextCompletionRequest


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New tokens of one choice, for streams."""

    index: int
    tokens: Sequence[int]
    logps: Sequence[float]


DeltaListener = Callable[[CompletionDelta], None]


class CompletionBackend(Protocol):
    """Answers requests: the hub at once, or an episode when the request's turn comes."""

    async def complete(self, request: AnyRequest, name: str, listener: DeltaListener) -> Completion:
        """Return all choices; call `listener` with new tokens. Raises `RequestRefused`; cancelling aborts."""


class DirectCompletions:
    """Answers requests with a hub. A prompt and its answer have at most `context_tokens` together."""

    def __init__(self, hub: InferenceHub, template: ChatTemplate, *, context_tokens: int) -> None:
        self._hub, self._template, self._context_tokens = hub, template, context_tokens
        self._seeded_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def complete(self, request: AnyRequest, name: str, listener: DeltaListener) -> Completion:
        prompt = encode_prompt(self._template, request)
        if len(prompt) >= self._context_tokens:
            param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
            raise context_length_exceeded(len(prompt), self._context_tokens, param)
        tasks: list[asyncio.Task[CompletionChoice]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._generate(request, prompt, name, index, listener), name=f"{name}/{index}")
                    for index in range(request.num_choices)
                ]
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            if isinstance(first, BackendError):
                raise RequestRefused(str(first), status=500, kind="server_error") from first
            raise first from None
        return Completion(prompt=prompt, choices=tuple(task.result() for task in tasks))

    async def _generate(
        self, request: AnyRequest, prompt: list[int], name: str, index: int, listener: DeltaListener
    ) -> CompletionChoice:
        def report(tokens: Sequence[int]) -> None:
            listener(CompletionDelta(index, tokens, progress.logps[len(progress.logps) - len(tokens) :]))

        progress = Progress(on_chunk=report)
        left = self._context_tokens - len(prompt)
        async with self._reserve_request_id(request, prompt, index) as request_id:
            engine_request = Request(
                request_id=request_id,
                session=name,
                prompt=prompt,
                params=replace(request.sampling, max_new_tokens=min(request.max_tokens or left, left)),
                prefix_key=0 if request.num_choices > 1 else -1,
            )
            try:
                finish = await self._hub.generate(engine_request, progress, lane=RequestLane.VALIDATE)
            finally:
                self._hub.end_session(name)
        generated = GeneratedTokens(tokens=progress.actions, logps=progress.logps, finish=finish)
        return make_choice(self._template, request, generated, f"{name}{index}")

    @asynccontextmanager
    async def _reserve_request_id(self, request: AnyRequest, prompt: list[int], index: int) -> AsyncIterator[str]:
        """Yield the request id, which seeds the sampling. Equal seeded requests run one after the other."""
        if request.seed is None:
            yield f"open/{uuid4().hex}"
            return
        prompt_hash = blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
        request_id = f"seed/{request.seed}/{index}/{prompt_hash}"
        lock = self._seeded_locks.get(request_id) or asyncio.Lock()
        self._seeded_locks[request_id] = lock
        async with lock:
            yield request_id


def encode_prompt(template: ChatTemplate, request: AnyRequest) -> list[int]:
    """Encode the whole prompt of a request from scratch. Raises `RequestRefused`."""
    if isinstance(request, ChatCompletionRequest):
        return template.encode_conversation(request)
    if isinstance(request.prompt, str):
        return template.encode(request.prompt, add_special_tokens=True)
    size = template.vocabulary_size
    if unknown := [token for token in request.prompt if token >= size]:
        raise RequestRefused(f"prompt: there is no token {unknown[0]}; the last one is {size - 1}", param="prompt")
    return list(request.prompt)
