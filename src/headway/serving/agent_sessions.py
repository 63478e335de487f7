"""The calls of one foreign agent: where they wait, how they are answered, what they earned.

A session is the meeting point of two sides. HTTP handlers put calls in and wait for their answers; an episode takes
them out one by one, in the order they came, and answers each with what the policy made. Calls of one session that
come at the same time therefore wait for each other.

Guarantees: every call gets an answer or a refusal, at the latest when the session is closed; a call whose client has
gone is passed over; a client that lost the answer and asks the very same again gets the very same, without another
turn. Does not know episodes, engines or HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from math import isfinite
from secrets import token_hex, token_urlsafe
from typing import Any

from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest, TextCompletionRequest
from headway.serving.completions import Completion, CompletionChoice
from headway.serving.conversation_history import ConversationHistory, TurnContext
from headway.serving.direct_completions import CompletionDelta, DeltaListener
from headway.serving.request_errors import RequestRefused, session_over

MAX_PENDING_REQUESTS = 64
"""Calls of one session that may wait for an answer."""


class PendingRequest:
    """A request that waits for its answer."""

    __slots__ = ("answers", "ask", "name")

    def __init__(self, ask: ChatCompletionRequest | TextCompletionRequest, name: str) -> None:
        self.ask, self.name = ask, name
        self.answers: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more."""
        return self.answers.done()

    def refuse(self, why: RequestRefused) -> None:
        if not self.answers.done():
            self.answers.set_exception(why)
            self.answers.exception()  # looked at: whoever waits will see it again


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded:
    """Nothing more will come."""

    error: BaseException | None = None
    """What the agent died of."""


class AgentSession:
    """One episode's side of the endpoint."""

    def __init__(self, dialect: ChatTemplate) -> None:
        self.session_id, self.key = token_hex(8), token_urlsafe(24)
        self.reported = False
        """Whether a reward has been reported at all."""
        self.info: dict[str, Any] = {}
        self._news: asyncio.Queue[PendingRequest | AgentEnded] = asyncio.Queue()
        self._waiting: dict[PendingRequest, None] = {}
        self._earned = 0.0
        self._closed = False
        self._undelivered: tuple[ChatCompletionRequest | TextCompletionRequest, Completion] | None = None
        self.history = ConversationHistory(dialect)

    # -- the agent's side

    async def answer(
        self, ask: ChatCompletionRequest | TextCompletionRequest, name: str, listener: DeltaListener
    ) -> Completion:
        """Wait for the episode to answer. Raises `RequestRefused`; cancelling leaves the call behind."""
        if self._closed:
            raise session_over(self.session_id)
        if ask.choices != 1:
            raise RequestRefused("n must be 1 in a session: an episode goes one way", param="n")
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            raise RequestRefused(
                f"{MAX_PENDING_REQUESTS} calls of this session wait already",
                status=429,
                kind="rate_limit_error",
                headers={"Retry-After": "1"},
            )
        call = PendingRequest(ask, name)
        self._waiting[call] = None
        self._news.put_nowait(call)
        try:
            found = await call.answers
        finally:
            del self._waiting[call]
        made = found.choices[0].made
        listener(CompletionDelta(0, made.tokens, made.logps))
        return found

    def reward(self, value: float, *, done: bool) -> float:
        """The agent says what it has earned since it last did; with `done`, the episode is over. Raises `RequestRefused`."""
        if self._closed:
            raise session_over(self.session_id)
        if not isfinite(value):
            raise RequestRefused(f"{value} is no reward", param="reward")
        self._earned += value
        self.reported = True
        if done:
            self._news.put_nowait(AgentEnded())
        return self._earned

    def end(self, error: BaseException | None = None) -> None:
        """The agent is gone."""
        self._news.put_nowait(AgentEnded(error=error))

    # -- the episode's side

    async def next(self) -> tuple[PendingRequest, TurnContext] | AgentEnded:
        """The next call that somebody waits for, with what it conditions on."""
        while True:
            news = await self._news.get()
            if isinstance(news, AgentEnded):
                return news
            if news.gone or self._repeated(news):
                continue
            try:
                return news, self.history.context(news.ask)
            except RequestRefused as why:
                news.refuse(why)

    def deliver(self, call: PendingRequest, context: TurnContext, answer: CompletionChoice) -> None:
        """The policy has answered a call."""
        self.history.add(call.ask, context, answer)
        found = Completion(prompt=context.tokens, choices=(answer,))
        if call.gone:
            self._undelivered = call.ask, found
            return
        call.answers.set_result(found)

    def earned(self) -> float:
        """What was earned since this was last asked."""
        found, self._earned = self._earned, 0.0
        return found

    def close(self) -> None:
        """Refuse what waits, and everything that comes."""
        self._closed = True
        for call in self._waiting:
            call.refuse(session_over(self.session_id))

    def _repeated(self, call: PendingRequest) -> bool:
        """Whether it asks again for an answer that never arrived; then it has that now."""
        if self._undelivered is None:
            return False
        (ask, found), self._undelivered = self._undelivered, None
        if ask != call.ask:
            return False
        call.answers.set_result(found)
        return True


class AgentSessions:
    """All sessions of a run, by name."""

    def __init__(self, dialect: ChatTemplate) -> None:
        self._dialect = dialect
        self._open: dict[str, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> AgentSession:
        """A new one."""
        session = AgentSession(self._dialect)
        self._open[session.session_id] = session
        return session

    def close(self, session: AgentSession) -> None:
        """It is over."""
        session.close()
        self._open.pop(session.session_id, None)

    def close_all(self) -> None:
        """The run is over."""
        for session in list(self._open.values()):
            self.close(session)

    def named(self, session_id: str, key: str) -> AgentSession:
        """The session of that name, for whoever has its key. Raises `RequestRefused`."""
        session = self._open.get(session_id)
        if session is None:
            raise session_over(session_id)
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "replace")):
            raise RequestRefused("wrong API key", status=401, kind="authentication_error", code="invalid_api_key")
        return session
