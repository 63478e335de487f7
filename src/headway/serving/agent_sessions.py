"""Sessions of external agents: their pending requests, the answers to them, and the rewards they report.

A session connects two sides. HTTP handlers add requests and wait for the answers; an episode takes the requests one by
one, in order of arrival, and answers each with what the policy generated. Concurrent requests of one session therefore
wait for each other.

Guarantees: every request gets an answer or a refusal, at the latest when the session is closed; a request whose client
has disconnected is skipped; a client that lost the answer and sends exactly the same request again gets exactly the
same answer, without another turn. Sessions do not know episodes, engines or HTTP.

The answered requests are kept with the tokens that they really consist of, so that the next request continues with
exactly the sampled tokens. A request whose conversation begins with that of an earlier one continues it: the earlier
tokens, then the text added since. If several match, the longest is used; among equally long ones, the latest.

* The request continues the last turn: only the added text is new, and the context grows.
* The request continues an earlier turn (the agent went back, or holds several conversations): a new context starts
  with that turn's tokens and the text added since.
* The request continues no turn (the agent rewrote or shortened its history, or asks something else): a new context
  starts with the conversation as it was sent, tokenised from scratch.

A turn whose context starts anew is marked, and trainers give it a sequence of its own. Every answer is trained once,
after exactly the tokens that preceded it when it was sampled.
"""

import asyncio
import hmac
from dataclasses import dataclass, field
from math import isfinite
from secrets import token_hex, token_urlsafe
from typing import Any

from headway.serving.chat_messages import ChatMessage
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest
from headway.serving.completions import Completion, CompletionChoice
from headway.serving.direct_completions import AnyRequest, CompletionDelta, DeltaListener, encode_prompt
from headway.serving.request_errors import RequestRefused, session_over, too_many_requests, wrong_api_key

MAX_PENDING_REQUESTS = 64
"""Requests of one session that may wait for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnContext:
    """The tokens that a request is conditioned on."""

    tokens: list[int]
    """All tokens of the context."""
    new_tokens: list[int]
    """Tokens that the last turn has not seen; all tokens if the context starts anew."""
    starts_new_context: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnsweredRequest:
    """A request and its answer."""

    request: AnyRequest
    choice: CompletionChoice
    tokens: list[int] = field(repr=False)
    """Tokens of the prompt and the answer."""

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        assert isinstance(self.request, ChatCompletionRequest)
        return (*self.request.messages, self.choice.message)

    @property
    def length(self) -> int:
        return len(self.conversation) if isinstance(self.request, ChatCompletionRequest) else len(self.tokens)


class ConversationHistory:
    """Keeps the answered requests of one episode."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._answered: list[_AnsweredRequest] = []

    def make_context(self, request: AnyRequest) -> TurnContext:
        """Return the tokens that `request` is conditioned on. Raises `RequestRefused`."""
        found: tuple[_AnsweredRequest, list[int]] | None = None
        for answered in reversed(self._answered):
            if found is not None and answered.length <= found[0].length:
                continue
            added = self._encode_added(answered, request)
            if added is not None:
                found = answered, added
        if found is None:
            prompt = encode_prompt(self._template, request)
            return TurnContext(tokens=prompt, new_tokens=prompt, starts_new_context=bool(self._answered))
        answered, added = found
        tokens = [*answered.tokens, *added]
        is_last = answered is self._answered[-1]
        return TurnContext(tokens=tokens, new_tokens=added if is_last else tokens, starts_new_context=not is_last)

    def add(self, request: AnyRequest, context: TurnContext, choice: CompletionChoice) -> None:
        """Record the answer to a request."""
        tokens = [*context.tokens, *(int(token) for token in choice.generated.tokens)]
        self._answered.append(_AnsweredRequest(request=request, choice=choice, tokens=tokens))

    def _encode_added(self, answered: _AnsweredRequest, request: AnyRequest) -> list[int] | None:
        """Encode what `request` adds to an answered request; `None` if it does not continue that one."""
        earlier = answered.request
        if isinstance(request, ChatCompletionRequest):
            if not isinstance(earlier, ChatCompletionRequest):
                return None
            return self._encode_added_messages(answered, earlier, request)
        if isinstance(earlier, ChatCompletionRequest):
            return None
        if isinstance(request.prompt, tuple):
            known = len(answered.tokens)
            return list(request.prompt[known:]) if list(request.prompt[:known]) == answered.tokens else None
        if not isinstance(earlier.prompt, str):
            return None
        before = earlier.prompt + answered.choice.text
        return self._template.encode(request.prompt[len(before) :]) if request.prompt.startswith(before) else None

    def _encode_added_messages(
        self, answered: _AnsweredRequest, earlier: ChatCompletionRequest, request: ChatCompletionRequest
    ) -> list[int] | None:
        if (earlier.tools, earlier.template_variables) != (request.tools, request.template_variables):
            return None
        known = answered.conversation
        if [one.normalized for one in known] != [one.normalized for one in request.messages[: len(known)]]:
            return None
        return self._template.encode_continuation(answered.choice.generated.tokens, len(known) - 1, request)


class PendingRequest:
    """A request that waits for its answer."""

    def __init__(self, request: AnyRequest, name: str) -> None:
        self.request, self.name = request, name
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has stopped waiting."""
        return self.completion.done()

    def refuse(self, reason: RequestRefused) -> None:
        if not self.completion.done():
            self.completion.set_exception(reason)
            self.completion.exception()  # marks the exception as retrieved, in case the client is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded:
    """The agent sends no more requests."""

    error: BaseException | None = None
    """The exception that ended the agent, if there was one."""


class AgentSession:
    """The session of one agent in one episode; a `CompletionBackend` for that agent."""

    def __init__(self, template: ChatTemplate) -> None:
        self.session_id, self.key = token_hex(8), token_urlsafe(24)
        self.has_reward = False
        """Whether the agent has reported any reward."""
        self.info: dict[str, Any] = {}
        self._queue: asyncio.Queue[PendingRequest | AgentEnded] = asyncio.Queue()
        self._pending: dict[PendingRequest, None] = {}
        self._reward = 0.0
        self._is_closed = False
        self._undelivered: tuple[AnyRequest, Completion] | None = None
        self._history = ConversationHistory(template)

    # -- called for the agent

    async def complete(self, request: AnyRequest, name: str, listener: DeltaListener) -> Completion:
        """Wait until the episode answers. Raises `RequestRefused`; a cancelled request is skipped."""
        if self._is_closed:
            raise session_over(self.session_id)
        if request.num_choices != 1:
            raise RequestRefused("n must be 1 in a session: an episode goes one way", param="n")
        if len(self._pending) >= MAX_PENDING_REQUESTS:
            raise too_many_requests(f"{MAX_PENDING_REQUESTS} calls of this session wait already", retry_after_s=1)
        pending = PendingRequest(request, name)
        self._pending[pending] = None
        self._queue.put_nowait(pending)
        try:
            completion = await pending.completion
        finally:
            del self._pending[pending]
        generated = completion.choices[0].generated
        listener(CompletionDelta(0, generated.tokens, generated.logps))
        return completion

    def add_reward(self, value: float, *, done: bool) -> float:
        """Add to the reward of the current turn and return that; `done` ends the episode. Raises `RequestRefused`."""
        if self._is_closed:
            raise session_over(self.session_id)
        if not isfinite(value):
            raise RequestRefused(f"{value} is no reward", param="reward")
        self._reward += value
        self.has_reward = True
        if done:
            self._queue.put_nowait(AgentEnded())
        return self._reward

    def end(self, error: BaseException | None = None) -> None:
        """Report that the agent has ended."""
        self._queue.put_nowait(AgentEnded(error=error))

    # -- called by the episode

    async def next_request(self) -> tuple[PendingRequest, TurnContext] | AgentEnded:
        """Return the next request whose client still waits, with its context, or the end of the agent."""
        while True:
            pending = await self._queue.get()
            if isinstance(pending, AgentEnded):
                return pending
            if pending.is_abandoned or self._answer_repeated(pending):
                continue
            try:
                return pending, self._history.make_context(pending.request)
            except RequestRefused as reason:
                pending.refuse(reason)

    def deliver(self, pending: PendingRequest, context: TurnContext, choice: CompletionChoice) -> None:
        """Answer a request with the policy's turn."""
        self._history.add(pending.request, context, choice)
        completion = Completion(prompt=context.tokens, choices=(choice,))
        if pending.is_abandoned:
            self._undelivered = pending.request, completion
            return
        pending.completion.set_result(completion)

    def take_reward(self) -> float:
        """Return the reward reported since the last call, and reset it."""
        reward, self._reward = self._reward, 0.0
        return reward

    def close(self) -> None:
        """Refuse the pending requests and all later ones."""
        self._is_closed = True
        for pending in self._pending:
            pending.refuse(session_over(self.session_id))

    def _answer_repeated(self, pending: PendingRequest) -> bool:
        """Answer a request that repeats the one whose answer was not delivered; return whether it does."""
        if self._undelivered is None:
            return False
        (request, completion), self._undelivered = self._undelivered, None
        if request != pending.request:
            return False
        pending.completion.set_result(completion)
        return True


class AgentSessions:
    """The open sessions of a run, by id."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._open: dict[str, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> AgentSession:
        """Open a new session."""
        session = AgentSession(self._template)
        self._open[session.session_id] = session
        return session

    def close(self, session: AgentSession) -> None:
        """Close a session and forget it."""
        session.close()
        self._open.pop(session.session_id, None)

    def close_all(self) -> None:
        """Close all sessions at the end of a run."""
        for session in list(self._open.values()):
            self.close(session)

    def find(self, session_id: str, key: str) -> AgentSession:
        """Return the session with this id if the key is right. Raises `RequestRefused`."""
        session = self._open.get(session_id)
        if session is None:
            raise session_over(session_id)
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "replace")):
            raise wrong_api_key()
        return session
