"""What has been said in one episode, so that the next call can go on with the very tokens.

Every answered call leaves a *node*: the conversation with its answer, and the tokens it really consists of. A call
whose conversation begins with that of a node goes on from it: the node's tokens, then what was said since. Where
several match, the longest does; of equally long ones the latest.

* It continues the last turn: only what was said since is new, and the context grows.
* It continues an earlier turn (the agent went back, or talks about several things at once): the context begins anew
  with that turn's tokens and what was said since.
* It continues none (the agent rewrote or shortened its history, or asks something else): the context begins anew with
  the conversation as it was sent, tokenised from scratch.

Where a context begins anew, the turn is marked `fresh`: trainers give it a sequence of its own. Every answer is trained
once, behind exactly the tokens it was made behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.serving.chat_messages import ChatMessage
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest, TextCompletionRequest
from headway.serving.completions import CompletionChoice
from headway.serving.direct_completions import encode_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnContext:
    """What a call conditions on."""

    tokens: list[int]
    """All of it."""
    new: list[int]
    """What the last turn has not seen; all of it where the context begins anew."""
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnsweredRequest:
    """One answered call."""

    ask: ChatCompletionRequest | TextCompletionRequest
    answer: CompletionChoice
    tokens: list[int] = field(repr=False)
    """Prompt and answer."""

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        assert isinstance(self.ask, ChatCompletionRequest)
        return (*self.ask.messages, self.answer.message)


class ConversationHistory:
    """The answered calls of one episode."""

    def __init__(self, dialect: ChatTemplate) -> None:
        self._dialect = dialect
        self._nodes: list[_AnsweredRequest] = []

    def context(self, ask: ChatCompletionRequest | TextCompletionRequest) -> TurnContext:
        """What `ask` conditions on. Raises `Refused`."""
        found: tuple[_AnsweredRequest, list[int]] | None = None
        for node in reversed(self._nodes):
            if found is not None and _conversation_length(node) <= _conversation_length(found[0]):
                continue
            said = self._said_since(node, ask)
            if said is not None:
                found = node, said
        if found is None:
            prompt = encode_prompt(self._dialect, ask)
            return TurnContext(tokens=prompt, new=prompt, fresh=bool(self._nodes))
        node, said = found
        tokens = [*node.tokens, *said]
        if node is self._nodes[-1]:
            return TurnContext(tokens=tokens, new=said, fresh=False)
        return TurnContext(tokens=tokens, new=tokens, fresh=True)

    def add(
        self, ask: ChatCompletionRequest | TextCompletionRequest, context: TurnContext, answer: CompletionChoice
    ) -> None:
        """A call has its answer."""
        tokens = [*context.tokens, *(int(token) for token in answer.made.tokens)]
        self._nodes.append(_AnsweredRequest(ask=ask, answer=answer, tokens=tokens))

    def _said_since(
        self, node: _AnsweredRequest, ask: ChatCompletionRequest | TextCompletionRequest
    ) -> list[int] | None:
        """Tokens behind those of `node`; `None` where `ask` does not go on from it."""
        if isinstance(ask, ChatCompletionRequest):
            return self._since_chat(node, ask)
        if isinstance(node.ask, ChatCompletionRequest):
            return None
        if isinstance(ask.prompt, tuple):
            known = len(node.tokens)
            return list(ask.prompt[known:]) if list(ask.prompt[:known]) == node.tokens else None
        if not isinstance(node.ask.prompt, str):
            return None
        before = node.ask.prompt + node.answer.text
        return self._dialect.encoded(ask.prompt[len(before) :]) if ask.prompt.startswith(before) else None

    def _since_chat(self, node: _AnsweredRequest, ask: ChatCompletionRequest) -> list[int] | None:
        if not isinstance(node.ask, ChatCompletionRequest) or (node.ask.tools, node.ask.template) != (
            ask.tools,
            ask.template,
        ):
            return None
        known = node.conversation
        if [one.said for one in known] != [one.said for one in ask.messages[: len(known)]]:
            return None
        return self._dialect.after(node.answer.made.tokens, len(known) - 1, ask.messages, ask.tools, ask.template)


def _conversation_length(node: _AnsweredRequest) -> int:
    return len(node.conversation) if isinstance(node.ask, ChatCompletionRequest) else len(node.tokens)
