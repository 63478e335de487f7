"""What was generated, as text: at once, or piece by piece.

A text ends before the first stop string; the tokens that completed it were drawn and are counted, but not shown. In a
stream, what may yet turn out to be the beginning of a stop string, of a tool call or of a character is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.serving import tools
from headway.serving.chat import Dialect
from headway.serving.messages import Message, ToolCall
from headway.serving.requests import Ask, ChatAsk
from headway.types import FinishReason

_UNFINISHED = "\ufffd"
"""What decoders write for a character of which some bytes are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an engine made for one choice."""

    tokens: Sequence[int]
    logps: Sequence[float]
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice, as it is given out."""

    made: Made
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
    def message(self) -> Message:
        """As the next request should bring it back."""
        return Message(role="assistant", content=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All choices of one request."""

    prompt: Sequence[int]
    choices: tuple[Answer, ...]


def answer_of(dialect: Dialect, ask: Ask, made: Made, name: str) -> Answer:
    """A whole answer; `name` is unique, and the names of its calls begin with it."""
    text = cut(dialect.decoded(made.tokens), ask.sampling.stop)
    if isinstance(ask, ChatAsk) and ask.tools:
        text, calls = tools.parsed(text, lambda number: f"call_{name}_{number}")
        return Answer(made=made, text=text, calls=calls)
    return Answer(made=made, text=text)


def cut(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop string."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Tokens in, text out: as much of it as will not change any more."""

    def __init__(self, dialect: Dialect, ask: Ask) -> None:
        self._dialect, self._stops = dialect, ask.sampling.stop
        self._holds = (*self._stops, tools.OPENING) if isinstance(ask, ChatAsk) and ask.tools else self._stops
        self._tokens: list[int] = []
        self._from = self._upto = 0
        self._text = ""
        self._given = 0

    def more(self, tokens: Sequence[int]) -> str:
        """What can be shown now."""
        self._tokens += tokens
        self._text += self._decoded()
        end = len(cut(self._text, self._holds))
        if end == len(self._text):
            end -= max((_overlap(self._text, hold) for hold in self._holds), default=0)
        return self._give(end)

    def rest(self, text: str) -> str:
        """What is left of `text`, the whole answer. Nothing, where a tool call has changed what was shown."""
        shown = self._text[: self._given]
        return text[self._given :] if text.startswith(shown) else ""

    def _decoded(self) -> str:
        """Text of the new tokens. A few old ones are decoded with them: a token may look different behind another."""
        before = self._dialect.decoded(self._tokens[self._from : self._upto])
        now = self._dialect.decoded(self._tokens[self._from :])
        if now.endswith(_UNFINISHED):
            return ""
        self._from, self._upto = self._upto, len(self._tokens)
        return now[len(before) :]

    def _give(self, end: int) -> str:
        if end <= self._given:
            return ""
        shown, self._given = self._text[self._given : end], end
        return shown


def _overlap(text: str, hold: str) -> int:
    """Characters at the end of `text` that `hold` may begin with."""
    return next((size for size in range(min(len(hold) - 1, len(text)), 0, -1) if text.endswith(hold[:size])), 0)
