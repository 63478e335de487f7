"""Completions: generated tokens as text, and as the JSON objects of OpenAI's protocol, whole or streamed.

A text ends before the first stop string. The tokens that completed the stop string were sampled and are counted, but
not shown. A stream holds back text that may still turn out to be the beginning of a stop string, of a tool call or of a
multi-token character.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.environments.text_environment import truncate_at_stop
from headway.serving.chat_messages import TOOL_CALL_OPENING, ChatMessage, ToolCall, extract_tool_calls
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest, CompletionRequest
from headway.types import FinishReason

JsonBody = dict[str, Any]
_INCOMPLETE_CHARACTER = "\ufffd"
"""What decoders write for a character of which some bytes are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """The engine's output for one choice."""

    tokens: Sequence[int]
    logps: Sequence[float]
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """One choice of a completion."""

    generated: GeneratedTokens
    text: str
    """The generated text without tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how the choice ended."""
        if self.tool_calls:
            return "tool_calls"
        return "stop" if self.generated.finish is FinishReason.STOP else "length"

    @property
    def message(self) -> ChatMessage:
        """The message that the client's next request should send back."""
        return ChatMessage(role="assistant", content=self.text, tool_calls=self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All choices of one request."""

    prompt: Sequence[int]
    choices: tuple[CompletionChoice, ...]

    @property
    def usage(self) -> JsonBody:
        """Token counts of all choices together."""
        prompt, generated = len(self.prompt), sum(len(choice.generated.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def make_choice(
    template: ChatTemplate, request: CompletionRequest, generated: GeneratedTokens, name: str
) -> CompletionChoice:
    """Make a choice from generated tokens. `name` must be unique: the ids of its tool calls begin with it."""
    text = truncate_at_stop(template.decode(generated.tokens), request.sampling.stop)
    if isinstance(request, ChatCompletionRequest) and request.tools:
        text, calls = extract_tool_calls(text, lambda number: f"call_{name}_{number}")
        return CompletionChoice(generated=generated, text=text, tool_calls=calls)
    return CompletionChoice(generated=generated, text=text)


class StreamingDetokenizer:
    """Converts a stream of tokens to text and returns only text that will not change any more."""

    def __init__(self, template: ChatTemplate, request: CompletionRequest) -> None:
        has_tools = isinstance(request, ChatCompletionRequest) and request.tools
        stops = request.sampling.stop
        self._template = template
        self._held_back = (*stops, TOOL_CALL_OPENING) if has_tools else stops
        """Strings at which the visible text stops; a possible beginning of one is not returned yet."""
        self._tokens: list[int] = []
        self._context_start = self._decoded_tokens = 0
        self._text = ""
        self._returned = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that can be shown now."""
        self._tokens += tokens
        self._text += self._decode_new()
        end = len(truncate_at_stop(self._text, self._held_back))
        if end == len(self._text):
            end -= max((_overlap_length(self._text, one) for one in self._held_back), default=0)
        if end <= self._returned:
            return ""
        shown, self._returned = self._text[self._returned : end], end
        return shown

    def remaining(self, text: str) -> str:
        """Return the part of the whole answer `text` that was not shown yet; nothing if a tool call changed it."""
        shown = self._text[: self._returned]
        return text[self._returned :] if text.startswith(shown) else ""

    def _decode_new(self) -> str:
        """Decode the new tokens together with a few old ones, because a token's text may depend on its context."""
        before = self._template.decode(self._tokens[self._context_start : self._decoded_tokens])
        now = self._template.decode(self._tokens[self._context_start :])
        if now.endswith(_INCOMPLETE_CHARACTER):
            return ""
        self._context_start, self._decoded_tokens = self._decoded_tokens, len(self._tokens)
        return now[len(before) :]


def _overlap_length(text: str, held_back: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `held_back`."""
    longest = min(len(held_back) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(held_back[:size])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionWriter:
    """Writes the JSON objects of one response, which share a header."""

    request: CompletionRequest
    template: ChatTemplate
    response_id: str
    created: int

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.request, ChatCompletionRequest)

    def write_completion(self, completion: Completion) -> JsonBody:
        """Return the response of a request that is not streamed."""
        choices = [self._write_choice(index, choice) for index, choice in enumerate(completion.choices)]
        body = {**self._write_header("chat.completion"), "choices": choices}
        if self.request.return_token_ids and self._is_chat:
            body["prompt_token_ids"] = list(completion.prompt)
        return {**body, "usage": completion.usage}

    def write_first_chunk(self, index: int) -> JsonBody:
        """Return the first object of a streamed chat choice."""
        return self._write_chunk(index, {"role": "assistant", "content": ""})

    def write_delta(self, index: int, text: str, tokens: Sequence[int], logps: Sequence[float]) -> JsonBody:
        """Return a chunk with more text, and with the tokens sampled since the last chunk."""
        body = self._write_chunk(index, {"content": text} if self._is_chat else text)
        body["choices"][0].update(self._write_token_details(tokens, logps))
        return body

    def write_tool_calls(self, index: int, choice: CompletionChoice) -> JsonBody:
        """Return a chunk with the whole tool calls of a choice."""
        calls = [{"index": number, **call.to_body()} for number, call in enumerate(choice.tool_calls)]
        return self._write_chunk(index, {"tool_calls": calls})

    def write_last_chunk(self, index: int, choice: CompletionChoice) -> JsonBody:
        """Return the last object of a streamed choice."""
        body = self._write_chunk(index, {} if self._is_chat else "")
        body["choices"][0]["finish_reason"] = choice.finish_reason
        return body

    def write_usage_chunk(self, completion: Completion) -> JsonBody:
        """Return the last object of a stream whose client asked for token counts."""
        return {**self._write_header("chat.completion.chunk"), "choices": [], "usage": completion.usage}

    def _write_choice(self, index: int, choice: CompletionChoice) -> JsonBody:
        generated = choice.generated
        body: JsonBody = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        body |= self._write_token_details(generated.tokens, generated.logps)
        if not self._is_chat:
            return {**body, "text": choice.text}
        message: JsonBody = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            calls = [call.to_body() for call in choice.tool_calls]
            message = {**message, "content": choice.text or None, "tool_calls": calls}
        return {**body, "message": message}

    def _write_chunk(self, index: int, content: Any) -> JsonBody:
        choice: JsonBody = {"index": index, "finish_reason": None, "logprobs": None}
        choice["delta" if self._is_chat else "text"] = content
        return {**self._write_header("chat.completion.chunk"), "choices": [choice]}

    def _write_header(self, chat_object: str) -> JsonBody:
        kind = chat_object if self._is_chat else "text_completion"
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.request.model}

    def _write_token_details(self, tokens: Sequence[int], logps: Sequence[float]) -> JsonBody:
        details: JsonBody = {}
        if self.request.logprobs:
            details["logprobs"] = self._write_logprobs(tokens, logps)
        if self.request.return_token_ids:
            details["token_ids"] = list(tokens)
        return details

    def _write_logprobs(self, tokens: Sequence[int], logps: Sequence[float]) -> JsonBody:
        """Return the log-probabilities of the sampled tokens; those of other tokens are not known."""
        texts = [self.template.decode([token], keep_special_tokens=True) for token in tokens]
        if not self._is_chat:
            return {"tokens": texts, "token_logprobs": list(logps), "top_logprobs": None, "text_offset": []}
        content = [
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logp in zip(texts, logps, strict=True)
        ]
        return {"content": content, "refusal": None}
