"""Conversations as tokens, with the chat template that came with the model.

Guarantees: tokens that a model has sampled are never tokenised again. `encode_continuation` returns the tokens that
follow an answer in a longer conversation: what the template writes between that answer and the next one. To find them,
the conversation is rendered with a marker in place of the answer, so the answer itself is not rendered.

Needs no torch: any object with the methods of `ServingTokenizer` will do.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from headway.serving.completion_requests import ChatCompletionRequest
from headway.serving.request_errors import RequestRefused

_ANSWER_MARK = "headway-was-here-4f1c9a"


class ServingTokenizer(Protocol):
    """The tokenizer methods that serving calls."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str: ...
    def __len__(self) -> int: ...


class ChatTemplate:
    """Converts between conversations and tokens of one model. `end_tokens` are the tokens that end an answer."""

    def __init__(self, tokenizer: ServingTokenizer, *, end_tokens: frozenset[int]) -> None:
        self._tokenizer, self._end_tokens = tokenizer, end_tokens
        self.vocabulary_size = len(tokenizer)

    def encode_conversation(self, request: ChatCompletionRequest) -> list[int]:
        """Encode a conversation from its beginning up to the next answer. Raises `RequestRefused`."""
        return self.encode(self._render(request, [message.to_template() for message in request.messages]))

    def encode_continuation(
        self, answer: Sequence[int], index: int, request: ChatCompletionRequest
    ) -> list[int] | None:
        """Encode what follows `answer`, the tokens of message `index`; `None` if the template hides the place."""
        messages = [message.to_template() for message in request.messages]
        messages[index] = {"role": "assistant", "content": _ANSWER_MARK}
        try:
            before, mark, text = self._render(request, messages).rpartition(_ANSWER_MARK)
        except RequestRefused:
            return None
        if not mark or _ANSWER_MARK in before:
            return None
        return self._drop_repeated_end(self.encode(text), answer)

    def _drop_repeated_end(self, following: list[int], answer: Sequence[int]) -> list[int]:
        """Remove the end token that the template writes after an answer, if the answer already ends with it."""
        if answer and answer[-1] in self._end_tokens and answer[-1] in following:
            end = following.index(answer[-1])
            if not self.decode(following[:end]).strip():
                return following[end + 1 :]
        return following

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text; `add_special_tokens` for a whole text that no template has rendered."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, tokens: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Return the text of tokens, by default without those that only mark beginnings and ends."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not keep_special_tokens))

    def _render(self, request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str:
        tools = list(request.tools) or None
        if tools and "tools" not in str(self._tokenizer.chat_template):
            problem = "the chat template of this model knows no tools"
            raise RequestRefused(problem, param="tools", code="unsupported_parameter")
        options = {**request.template_variables, "tokenize": False, "add_generation_prompt": True}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, **options))
        except Exception as error:
            problem = f"the chat template of this model refuses these messages: {error}"
            raise RequestRefused(problem, param="messages") from error
