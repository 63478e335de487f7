"""The answered requests of one episode, so that the next request continues with exactly the sampled tokens.

Every answered request is kept with its conversation and the tokens that it really consists of. A request whose
conversation begins with that of an earlier one continues it: the earlier tokens, then the text added since. If several
match, the longest is used; among equally long ones, the latest.

* The request continues the last turn: only the added text is new, and the context grows.
* The request continues an earlier turn (the agent went back, or holds several conversations): a new context starts
  with that turn's tokens and the text added since.
* The request continues no turn (the agent rewrote or shortened its history, or asks something else): a new context
  starts with the conversation as it was sent, tokenised from scratch.

A turn whose context starts anew is marked, and trainers give it a sequence of its own. Every answer is trained once,
after exactly the tokens that preceded it when it was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.serving.chat_messages import ChatMessage
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest
from headway.serving.completions import CompletionChoice
from headway.serving.direct_completions import AnyRequest, encode_prompt


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
        if answered is self._answered[-1]:
            return TurnContext(tokens=tokens, new_tokens=added, starts_new_context=False)
        return TurnContext(tokens=tokens, new_tokens=tokens, starts_new_context=True)

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
        answer, index = answered.choice.generated.tokens, len(known) - 1
        return self._template.encode_continuation(
            answer, index, request.messages, request.tools, request.template_variables
        )
