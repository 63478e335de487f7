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
from headway.rollout.hub import InferenceHub
from headway.rollout.replica import Lane
from headway.serving.answers import Answer, Answers, Made, answer_of
from headway.serving.chat import Dialect
from headway.serving.refusals import Refused, too_long
from headway.serving.requests import Ask, ChatAsk, TextAsk


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice, for streams."""

    index: int
    tokens: Sequence[int]
    logps: Sequence[float]


Listener = Callable[[Piece], None]


class Answering(Protocol):
    """Who answers a request: the hub at once, or an episode when its turn comes."""

    async def answer(self, ask: ChatAsk | TextAsk, name: str, listener: Listener) -> Answers:
        """All choices. `listener` hears every piece as it is made. Raises `Refused`; cancelling gives up."""
        ...


class DirectAnswers:
    """In front of a hub. `context_tokens`: most tokens of a prompt and its answer together."""

    def __init__(self, hub: InferenceHub, dialect: Dialect, *, context_tokens: int) -> None:
        self._hub, self._dialect, self._room = hub, dialect, context_tokens
        self._seeded: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def answer(self, ask: ChatAsk | TextAsk, name: str, listener: Listener) -> Answers:
        prompt = prompt_of(self._dialect, ask)
        if len(prompt) >= self._room:
            raise too_long(len(prompt), self._room, "messages" if isinstance(ask, ChatAsk) else "prompt")
        tasks: list[asyncio.Task[Answer]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._choice(ask, prompt, name, index, listener), name=f"{name}/{index}")
                    for index in range(ask.choices)
                ]
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            if isinstance(first, BackendError):
                raise Refused(str(first), status=500, kind="server_error") from first
            raise first from None
        return Answers(prompt=prompt, choices=tuple(task.result() for task in tasks))

    async def _choice(self, ask: Ask, prompt: list[int], name: str, index: int, listener: Listener) -> Answer:
        progress = Progress()

        def heard(tokens: Sequence[int]) -> None:
            listener(Piece(index, tokens, progress.logps[len(progress.logps) - len(tokens) :]))

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
                finish = await self._hub.generate(request, progress, lane=Lane.VALIDATE)
            finally:
                self._hub.end_session(name)
        made = Made(tokens=progress.actions, logps=progress.logps, finish=finish)
        return answer_of(self._dialect, ask, made, f"{name}{index}")

    @asynccontextmanager
    async def _named(self, ask: Ask, prompt: list[int], index: int) -> AsyncIterator[str]:
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


def prompt_of(dialect: Dialect, ask: ChatAsk | TextAsk) -> list[int]:
    """The tokens that a request conditions on, with nothing known of it. Raises `Refused`."""
    if isinstance(ask, ChatAsk):
        return dialect.prompt(ask.messages, ask.tools, ask.template)
    if isinstance(ask.prompt, str):
        return dialect.encoded(ask.prompt, whole=True)
    if strange := [token for token in ask.prompt if token >= dialect.tokens]:
        raise Refused(f"prompt: there is no token {strange[0]}; the last one is {dialect.tokens - 1}", param="prompt")
    return list(ask.prompt)
