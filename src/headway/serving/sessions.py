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

from headway.serving.answers import Answer, Answers
from headway.serving.chat import Dialect
from headway.serving.direct import Listener, Piece
from headway.serving.history import Context, History
from headway.serving.refusals import Refused, over
from headway.serving.requests import ChatAsk, TextAsk

MOST_WAITING = 64
"""Calls of one session that may wait for an answer."""


class Call:
    """A request that waits for its answer."""

    __slots__ = ("answers", "ask", "name")

    def __init__(self, ask: ChatAsk | TextAsk, name: str) -> None:
        self.ask, self.name = ask, name
        self.answers: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more."""
        return self.answers.done()

    def refuse(self, why: Refused) -> None:
        if not self.answers.done():
            self.answers.set_exception(why)
            self.answers.exception()  # looked at: whoever waits will see it again


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Nothing more will come."""

    error: BaseException | None = None
    """What the agent died of."""


class Session:
    """One episode's side of the endpoint."""

    def __init__(self, dialect: Dialect) -> None:
        self.session_id, self.key = token_hex(8), token_urlsafe(24)
        self.reported = False
        """Whether a reward has been reported at all."""
        self.info: dict[str, Any] = {}
        self._news: asyncio.Queue[Call | Ended] = asyncio.Queue()
        self._waiting: dict[Call, None] = {}
        self._earned = 0.0
        self._closed = False
        self._undelivered: tuple[ChatAsk | TextAsk, Answers] | None = None
        self.history = History(dialect)

    # -- the agent's side

    async def answer(self, ask: ChatAsk | TextAsk, name: str, listener: Listener) -> Answers:
        """Wait for the episode to answer. Raises `Refused`; cancelling leaves the call behind."""
        if self._closed:
            raise over(self.session_id)
        if ask.choices != 1:
            raise Refused("n must be 1 in a session: an episode goes one way", param="n")
        if len(self._waiting) >= MOST_WAITING:
            raise Refused(
                f"{MOST_WAITING} calls of this session wait already",
                status=429,
                kind="rate_limit_error",
                headers={"Retry-After": "1"},
            )
        call = Call(ask, name)
        self._waiting[call] = None
        self._news.put_nowait(call)
        try:
            found = await call.answers
        finally:
            del self._waiting[call]
        made = found.choices[0].made
        listener(Piece(0, made.tokens, made.logps))
        return found

    def reward(self, value: float, *, done: bool) -> float:
        """The agent says what it has earned since it last did; with `done`, the episode is over. Raises `Refused`."""
        if self._closed:
            raise over(self.session_id)
        if not isfinite(value):
            raise Refused(f"{value} is no reward", param="reward")
        self._earned += value
        self.reported = True
        if done:
            self._news.put_nowait(Ended())
        return self._earned

    def end(self, error: BaseException | None = None) -> None:
        """The agent is gone."""
        self._news.put_nowait(Ended(error=error))

    # -- the episode's side

    async def next(self) -> tuple[Call, Context] | Ended:
        """The next call that somebody waits for, with what it conditions on."""
        while True:
            news = await self._news.get()
            if isinstance(news, Ended):
                return news
            if news.gone or self._repeated(news):
                continue
            try:
                return news, self.history.context(news.ask)
            except Refused as why:
                news.refuse(why)

    def deliver(self, call: Call, context: Context, answer: Answer) -> None:
        """The policy has answered a call."""
        self.history.add(call.ask, context, answer)
        found = Answers(prompt=context.tokens, choices=(answer,))
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
            call.refuse(over(self.session_id))

    def _repeated(self, call: Call) -> bool:
        """Whether it asks again for an answer that never arrived; then it has that now."""
        if self._undelivered is None:
            return False
        (ask, found), self._undelivered = self._undelivered, None
        if ask != call.ask:
            return False
        call.answers.set_result(found)
        return True


class Sessions:
    """All sessions of a run, by name."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Session:
        """A new one."""
        session = Session(self._dialect)
        self._open[session.session_id] = session
        return session

    def close(self, session: Session) -> None:
        """It is over."""
        session.close()
        self._open.pop(session.session_id, None)

    def close_all(self) -> None:
        """The run is over."""
        for session in list(self._open.values()):
            self.close(session)

    def named(self, session_id: str, key: str) -> Session:
        """The session of that name, for whoever has its key. Raises `Refused`."""
        session = self._open.get(session_id)
        if session is None:
            raise over(session_id)
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "replace")):
            raise Refused("wrong API key", status=401, kind="authentication_error", code="invalid_api_key")
        return session
