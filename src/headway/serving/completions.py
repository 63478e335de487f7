"""What was generated, as text: at once, or piece by piece.

A text ends before the first stop string; the tokens that completed it were drawn and are counted, but not shown. In a
stream, what may yet turn out to be the beginning of a stop string, of a tool call or of a character is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.serving import chat_messages
from headway.serving.chat_messages import ChatMessage, ToolCall
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import ChatCompletionRequest, CompletionRequest
from headway.types import FinishReason

_INCOMPLETE_CHARACTER = "\ufffd"
"""What decoders write for a character of which some bytes are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """What an engine made for one choice."""

    tokens: Sequence[int]
    logps: Sequence[float]
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """One choice, as it is given out."""

    made: GeneratedTokens
    text: str
    """Without tool calls, where there are any."""
    calls: tuple[ToolCall, ...] = ()

    @property
    def finish(self) -> str:
        """OpenAI's word for how it ended."""
        if self.calls:
            return "tool_calls"
        return "stop" if self.made.finish is FinishReason.STOP else "length"

    @property
    def message(self) -> ChatMessage:
        """As the next request should bring it back."""
        return ChatMessage(role="assistant", content=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All choices of one request."""

    prompt: Sequence[int]
    choices: tuple[CompletionChoice, ...]


def make_choice(dialect: ChatTemplate, ask: CompletionRequest, made: GeneratedTokens, name: str) -> CompletionChoice:
    """A whole answer; `name` is unique, and the names of its calls begin with it."""
    text = truncate_at_stop(dialect.decoded(made.tokens), ask.sampling.stop)
    if isinstance(ask, ChatCompletionRequest) and ask.tools:
        text, calls = chat_messages.extract_tool_calls(text, lambda number: f"call_{name}_{number}")
        return CompletionChoice(made=made, text=text, calls=calls)
    return CompletionChoice(made=made, text=text)


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop string."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


class StreamingDetokenizer:
    """Tokens in, text out: as much of it as will not change any more."""

    def __init__(self, dialect: ChatTemplate, ask: CompletionRequest) -> None:
        self._dialect, self._stops = dialect, ask.sampling.stop
        self._holds = (
            (*self._stops, chat_messages.TOOL_CALL_OPENING)
            if isinstance(ask, ChatCompletionRequest) and ask.tools
            else self._stops
        )
        self._tokens: list[int] = []
        self._from = self._upto = 0
        self._text = ""
        self._given = 0

    def more(self, tokens: Sequence[int]) -> str:
        """What can be shown now."""
        self._tokens += tokens
        self._text += self._decoded()
        end = len(truncate_at_stop(self._text, self._holds))
        if end == len(self._text):
            end -= max((_overlap_length(self._text, hold) for hold in self._holds), default=0)
        return self._give(end)

    def rest(self, text: str) -> str:
        """What is left of `text`, the whole answer. Nothing, where a tool call has changed what was shown."""
        shown = self._text[: self._given]
        return text[self._given :] if text.startswith(shown) else ""

    def _decoded(self) -> str:
        """Text of the new tokens. A few old ones are decoded with them: a token may look different behind another."""
        before = self._dialect.decoded(self._tokens[self._from : self._upto])
        now = self._dialect.decoded(self._tokens[self._from :])
        if now.endswith(_INCOMPLETE_CHARACTER):
            return ""
        self._from, self._upto = self._upto, len(self._tokens)
        return now[len(before) :]

    def _give(self, end: int) -> str:
        if end <= self._given:
            return ""
        shown, self._given = self._text[self._given : end], end
        return shown


def _overlap_length(text: str, hold: str) -> int:
    """Characters at the end of `text` that `hold` may begin with."""
    return next((size for size in range(min(len(hold) - 1, len(text)), 0, -1) if text.endswith(hold[:size])), 0)


JsonBody = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionWriter:
    """Everything that the objects of one response have in common."""

    ask: CompletionRequest
    dialect: ChatTemplate
    response_id: str
    created: int

    @property
    def _chat(self) -> bool:
        return isinstance(self.ask, ChatCompletionRequest)

    def whole(self, answers: Completion) -> JsonBody:
        """A response that is not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers.choices)]
        found = {**self._head("chat.completion" if self._chat else "text_completion"), "choices": choices}
        if self.ask.token_ids and self._chat:
            found["prompt_token_ids"] = list(answers.prompt)
        return {**found, "usage": count_usage(answers)}

    def opening(self, index: int) -> JsonBody:
        """The first object of a streamed choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, tokens: Sequence[int], logps: Sequence[float]) -> JsonBody:
        """Some more text, and the tokens that came since the last one."""
        body = self._chunk(index, {"content": text} if self._chat else text)
        choice = body["choices"][0]
        if self.ask.logprobs:
            choice["logprobs"] = self._logprobs(tokens, logps)
        if self.ask.token_ids:
            choice["token_ids"] = list(tokens)
        return body

    def calls(self, index: int, answer: CompletionChoice) -> JsonBody:
        """Tool calls, whole."""
        return self._chunk(index, {"tool_calls": [{"index": n, **c} for n, c in enumerate(_tool_call_bodies(answer))]})

    def closing(self, index: int, answer: CompletionChoice) -> JsonBody:
        """The last object of a choice."""
        body = self._chunk(index, {} if self._chat else "")
        body["choices"][0]["finish_reason"] = answer.finish
        return body

    def total(self, answers: Completion) -> JsonBody:
        """The last object of a stream that wants to know what it cost."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": count_usage(answers)}

    def _choice(self, index: int, answer: CompletionChoice) -> JsonBody:
        choice: JsonBody = {"index": index, "finish_reason": answer.finish, "logprobs": None}
        if self.ask.logprobs:
            choice["logprobs"] = self._logprobs(answer.made.tokens, answer.made.logps)
        if self.ask.token_ids:
            choice["token_ids"] = list(answer.made.tokens)
        if not self._chat:
            return {**choice, "text": answer.text}
        message: JsonBody = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message = {**message, "content": answer.text or None, "tool_calls": _tool_call_bodies(answer)}
        return {**choice, "message": message}

    def _chunk(self, index: int, said: Any) -> JsonBody:
        choice: JsonBody = {"index": index, "finish_reason": None, "logprobs": None}
        choice["delta" if self._chat else "text"] = said
        return {**self._head("chat.completion.chunk" if self._chat else "text_completion"), "choices": [choice]}

    def _head(self, kind: str) -> JsonBody:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.ask.model}

    def _logprobs(self, tokens: Sequence[int], logps: Sequence[float]) -> JsonBody:
        """Of the tokens drawn, in the distribution that they were drawn from; there are no others."""
        texts = [self.dialect.decoded([token], special=True) for token in tokens]
        if not self._chat:
            return {"tokens": texts, "token_logprobs": list(logps), "top_logprobs": None, "text_offset": []}
        content = [
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logp in zip(texts, logps, strict=True)
        ]
        return {"content": content, "refusal": None}


def count_usage(answers: Completion) -> JsonBody:
    """Tokens, all choices together."""
    made = sum(len(answer.made.tokens) for answer in answers.choices)
    prompt = len(answers.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _tool_call_bodies(answer: CompletionChoice) -> list[JsonBody]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
