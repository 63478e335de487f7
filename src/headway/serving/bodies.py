"""Answers as the JSON objects of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.serving.answers import Answer, Answers
from headway.serving.chat import Dialect
from headway.serving.requests import Ask, ChatAsk

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Everything that the objects of one response have in common."""

    ask: Ask
    dialect: Dialect
    response_id: str
    created: int

    @property
    def _chat(self) -> bool:
        return isinstance(self.ask, ChatAsk)

    def whole(self, answers: Answers) -> Body:
        """A response that is not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers.choices)]
        found = {**self._head("chat.completion" if self._chat else "text_completion"), "choices": choices}
        if self.ask.token_ids and self._chat:
            found["prompt_token_ids"] = list(answers.prompt)
        return {**found, "usage": usage(answers)}

    def opening(self, index: int) -> Body:
        """The first object of a streamed choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, tokens: Sequence[int], logps: Sequence[float]) -> Body:
        """Some more text, and the tokens that came since the last one."""
        body = self._chunk(index, {"content": text} if self._chat else text)
        choice = body["choices"][0]
        if self.ask.logprobs:
            choice["logprobs"] = self._logprobs(tokens, logps)
        if self.ask.token_ids:
            choice["token_ids"] = list(tokens)
        return body

    def calls(self, index: int, answer: Answer) -> Body:
        """Tool calls, whole."""
        return self._chunk(index, {"tool_calls": [{"index": n, **c} for n, c in enumerate(_calls(answer))]})

    def closing(self, index: int, answer: Answer) -> Body:
        """The last object of a choice."""
        body = self._chunk(index, {} if self._chat else "")
        body["choices"][0]["finish_reason"] = answer.finish
        return body

    def total(self, answers: Answers) -> Body:
        """The last object of a stream that wants to know what it cost."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(answers)}

    def _choice(self, index: int, answer: Answer) -> Body:
        choice: Body = {"index": index, "finish_reason": answer.finish, "logprobs": None}
        if self.ask.logprobs:
            choice["logprobs"] = self._logprobs(answer.made.tokens, answer.made.logps)
        if self.ask.token_ids:
            choice["token_ids"] = list(answer.made.tokens)
        if not self._chat:
            return {**choice, "text": answer.text}
        message: Body = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message = {**message, "content": answer.text or None, "tool_calls": _calls(answer)}
        return {**choice, "message": message}

    def _chunk(self, index: int, said: Any) -> Body:
        choice: Body = {"index": index, "finish_reason": None, "logprobs": None}
        choice["delta" if self._chat else "text"] = said
        return {**self._head("chat.completion.chunk" if self._chat else "text_completion"), "choices": [choice]}

    def _head(self, kind: str) -> Body:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.ask.model}

    def _logprobs(self, tokens: Sequence[int], logps: Sequence[float]) -> Body:
        """Of the tokens drawn, in the distribution that they were drawn from; there are no others."""
        texts = [self.dialect.decoded([token], special=True) for token in tokens]
        if not self._chat:
            return {"tokens": texts, "token_logprobs": list(logps), "top_logprobs": None, "text_offset": []}
        content = [
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logp in zip(texts, logps, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage(answers: Answers) -> Body:
    """Tokens, all choices together."""
    made = sum(len(answer.made.tokens) for answer in answers.choices)
    prompt = len(answers.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _calls(answer: Answer) -> list[Body]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
