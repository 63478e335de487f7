"""Conversations as tokens, by the chat template that came with the model.

Guarantees: what a model has sampled is never tokenised again. `after` gives the tokens that follow an answer in a
longer conversation: what the template writes behind it, up to where the next answer begins. It is found by rendering
the conversation with a mark in the answer's place, so nothing of the answer itself is rendered.

Needs no torch: the tokenizer is whatever has these methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.serving.chat_messages import ChatMessage
from headway.serving.request_errors import RequestRefused

_ANSWER_MARK = "headway-was-here-4f1c9a"
ToolSchemas = Sequence[Mapping[str, Any]]


class ServingTokenizer(Protocol):
    """The part of a tokenizer that serving needs."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str: ...
    def __len__(self) -> int: ...


class ChatTemplate:
    """How one model is spoken to. `ends`: tokens that end an answer."""

    def __init__(self, tokenizer: ServingTokenizer, *, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self.tokens = len(tokenizer)
        """How many different ones there are."""

    def prompt(
        self, messages: Sequence[ChatMessage], tools: ToolSchemas = (), template: Mapping[str, Any] | None = None
    ) -> list[int]:
        """A conversation from the beginning to where an answer begins. Raises `RequestRefused`."""
        return self.encoded(self._text([message.rendered() for message in messages], tools, template or {}))

    def after(
        self,
        made: Sequence[int],
        at: int,
        messages: Sequence[ChatMessage],
        tools: ToolSchemas = (),
        template: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """What follows `made`, the tokens of the answer `messages[at]`. `None`: the template gives no way to know."""
        marked = [message.rendered() for message in messages]
        marked[at] = {"role": "assistant", "content": _ANSWER_MARK}
        try:
            before, mark, text = self._text(marked, tools, template or {}).rpartition(_ANSWER_MARK)
        except RequestRefused:
            return None
        if not mark or _ANSWER_MARK in before:
            return None
        return self._without_end(self.encoded(text), made)

    def _without_end(self, found: list[int], made: Sequence[int]) -> list[int]:
        """What the template writes behind an answer, less the end that the answer has brought itself."""
        if made and made[-1] in self._ends and made[-1] in found:
            end = found.index(made[-1])
            if not self.decoded(found[:end]).strip():
                return found[end + 1 :]
        return found

    def encoded(self, text: str, *, whole: bool = False) -> list[int]:
        """Tokens; of a `whole` text that no template has dressed, with those that begin a text."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=whole)]

    def decoded(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text, without tokens that only mark beginnings and ends unless `special`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def _text(self, messages: list[dict[str, Any]], tools: ToolSchemas, template: Mapping[str, Any]) -> str:
        if tools and not self._knows_tools:
            raise RequestRefused(
                "the chat template of this model knows no tools", param="tools", code="unsupported_parameter"
            )
        options = {**template, "tokenize": False, "add_generation_prompt": True}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=list(tools) or None, **options))
        except Exception as error:
            raise RequestRefused(
                f"the chat template of this model refuses these messages: {error}", param="messages"
            ) from error

    @property
    def _knows_tools(self) -> bool:
        template = self._tokenizer.chat_template
        return "tools" in (template if isinstance(template, str) else str(template))
