"""Words as tokens: the chat template applied once a turn, and never to what the policy has said.

An episode is  first(observation) · sampled · next(observation) · sampled · …  What was sampled stays as it was sampled,
token for token; what stands between two turns (the end of the turn, the next message, the beginning of the answer) is
read off the template once, when this is made.

Guarantees: the text of every episode is what the template makes of the same conversation, or the template is refused
with a `ConfigError` before anything starts. A turn that ended at its end token is not ended twice, and one that was
cut off, by length or by a stop string, is ended. What an environment says cannot be read as control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.errors import ConfigError

TemplateMessage = dict[str, Any]
_PROBE_TEXTS = ("alpha7", "bravo7", "charlie7", "delta7", "echo7")
"""Contents that no template has a reason to change."""


class ChatTokenizer(Protocol):
    """The part of a tokenizer that is needed."""

    all_special_tokens: list[str]

    def apply_chat_template(
        self, conversation: list[TemplateMessage], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> Any:
        """The conversation as text, up to where the answer begins."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The tokens of a text."""
        ...


class ChatTurnEncoder:
    """The tokens around the turns of one policy. `variables` are for its template, beside the messages."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, name: str = "the model", variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._name, self._variables = tokenizer, name, dict(variables or {})
        self._special = [token for token in tokenizer.all_special_tokens if token]
        self._system = self._takes_system()
        self._before, self._after = self._between()
        self._check()
        self._end = self._encoded(self._before)[0]
        """The token that ends a turn, or at least the first of what does."""

    def first(self, instructions: str, text: str) -> list[int]:
        """Up to the first turn of the policy."""
        return self._encoded(self._opening(self._clean(instructions), self._clean(text)))

    def next(self, text: str, said: Sequence[int]) -> list[int]:
        """What comes between a turn in which the policy `said` something and its next one."""
        tokens = self._encoded(self._before + self._clean(text) + self._after)
        return tokens[1:] if len(said) and said[-1] == self._end else tokens

    def _opening(self, instructions: str, text: str) -> str:
        if not instructions:
            return self._rendered(_user_message(text))
        if self._system:
            return self._rendered({"role": "system", "content": instructions}, _user_message(text))
        return self._rendered(_user_message(f"{instructions}\n\n{text}"))

    def _takes_system(self) -> bool:
        """Some templates refuse a system message, some leave it out."""
        try:
            return _PROBE_TEXTS[0] in self._rendered(
                {"role": "system", "content": _PROBE_TEXTS[0]}, _user_message(_PROBE_TEXTS[1])
            )
        except ConfigError:
            return False

    def _between(self) -> tuple[str, str]:
        """The text from the end of an answer to the next message, and from there to the next answer."""
        question, answer, following, *_ = _PROBE_TEXTS
        text = self._rendered(_user_message(question), _assistant_message(answer), _user_message(following))
        for word in (question, answer, following):
            if text.count(word) != 1:
                raise self._refused(f"writes {word!r} {text.count(word)} times where a message says it once", text)
        before, after = text.split(answer)[1].split(following)
        if not before:
            raise self._refused("puts nothing between an answer and the next message", text)
        return before, after

    def _check(self) -> None:
        """That turns put together one by one are what the template makes of the whole."""
        one, two, three, four, five = _PROBE_TEXTS
        whole = self._rendered(
            _user_message(one),
            _assistant_message(two),
            _user_message(three),
            _assistant_message(four),
            _user_message(five),
        )
        built = self._opening("", one)
        for answer, following in ((two, three), (four, five)):
            built += answer + self._before + following + self._after
        if built != whole:
            raise self._refused("rewrites earlier turns, so that an episode cannot grow turn by turn", whole, built)

    def _refused(self, problem: str, *texts: str) -> ConfigError:
        shown = " against ".join(repr(text) for text in texts)
        given = f", without {', '.join(self._variables)}" if self._variables else ""
        hint = f"{shown}; give the tokenizer a template that only appends{given}"
        return ConfigError(f"the chat template of {self._name} {problem}", hint=hint)

    def _rendered(self, *messages: TemplateMessage) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._variables
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template of {self._name} fails for {roles}: {error}") from error
        return str(text)

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _clean(self, text: str) -> str:
        while any(token in text for token in self._special):
            for token in self._special:
                text = text.replace(token, "")
        return text


def _user_message(text: str) -> TemplateMessage:
    return {"role": "user", "content": text}


def _assistant_message(text: str) -> TemplateMessage:
    return {"role": "assistant", "content": text}
