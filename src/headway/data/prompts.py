"""From a row to the tokens that the policy sees first.

A prompt is a text, or a list of messages (also as JSON text). It gets the system message and the text around the
question that the configuration asks for, goes through the tokenizer's chat template once, ready for an answer, and
is tokenised. Guarantees: no special token is added twice; `longest` is never less than the tokens of a prompt, so
that most need not be tokenised to know that they fit. Needs no torch: the tokenizer is whatever has two methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headway.config import DataArgs
from headway.errors import ConfigError

Message = dict[str, Any]

MISSING = object()
"""What `get_column` gives where a row has no such column."""


class PromptTokenizer(Protocol):
    """The part of a tokenizer that data needs. One that can be called with a list of texts is asked in batches."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> Any:
        """The conversation as text (`tokenize` is false), up to where the answer begins."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The tokens of a text."""
        ...


def get_column(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; `a.b` is a column of that name, else `b` inside of `a`."""
    if column in row:
        return row[column]
    head, _, rest = column.partition(".")
    inner = row.get(head)
    return get_column(inner, rest) if rest and isinstance(inner, Mapping) else MISSING


class PromptBuilder:
    """Makes the prompts of one `data_args`."""

    def __init__(self, tokenizer: PromptTokenizer, args: DataArgs, *, key: str) -> None:
        self._tokenizer, self._args, self._key = tokenizer, args, key
        self._raw = (args.template or "").lower() == "none"
        self._frames: dict[tuple[str, ...], int] = {}
        if args.question_template is not None and "{prompt}" not in args.question_template:
            hint = "the question goes where {prompt} stands"
            where = f"{key}.question_template"
            raise ConfigError("has no {prompt}", key=where, value=args.question_template, hint=hint)
        if self._raw and args.system is not None:
            raise ConfigError(
                "needs a chat template", key=f"{key}.system", value=args.system, hint="not template: none"
            )
        if self._raw and args.chat_template_kwargs:
            where, given = f"{key}.chat_template_kwargs", dict(args.chat_template_kwargs)
            raise ConfigError("needs a chat template", key=where, value=given, hint="not template: none")
        self.of_row: Callable[[Mapping[str, Any]], Sequence[int]] = self._of_row

    def note(self) -> str | None:
        """What is used instead of a template by name."""
        if self._args.template is None or self._raw:
            return None
        return f"{self._key}.template = {self._args.template!r}: the tokenizer's own chat template is used"

    def conversation(self, row: Mapping[str, Any], place: str) -> list[Message]:
        """The messages of a row. `place`: where it stands, for what is wrong with it."""
        value = get_column(row, self._args.prompt)
        if value is MISSING:
            hint = f"{self._key}.prompt names the column; here are {', '.join(map(str, row))}"
            raise ConfigError(f"{place}: no column {self._args.prompt!r}", hint=hint)
        messages = _messages(value)
        if messages is None:
            problem = f"{place}: the prompt {_shown(value)} is neither a text nor a list of messages"
            raise ConfigError(problem, hint='[{"role": "user", "content": "…"}]')
        if not any(message["content"] for message in messages):
            raise ConfigError(f"{place}: the prompt is empty")
        return self._dressed(messages)

    def longest(self, messages: Sequence[Message], place: str) -> int:
        """As many tokens as the prompt can have at most: one a byte, and what the template puts around them.

        Normalisation makes a character that is not ASCII at most eleven times as long, and ASCII no longer.
        """
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._frames:
            empty = self.text([{**message, "content": "x"} for message in messages], place)
            self._frames[roles] = max(len(empty.encode()), len(self.tokens([empty])[0]))
        return self._frames[roles] + sum(_most(message["content"]) for message in messages)

    def text(self, messages: list[Message], place: str) -> str:
        """What is tokenised."""
        if self._raw:
            if len(messages) != 1:
                raise ConfigError(f"{place}: several messages need a chat template", hint="not template: none")
            return str(messages[0]["content"])
        variables = self._args.chat_template_kwargs
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:
            hint = f"{self._key}.template: none takes the text as it is"
            if variables:
                hint = f"{self._key}.chat_template_kwargs gives it {', '.join(variables)}"
            raise ConfigError(f"{place}: the tokenizer's chat template fails: {error}", hint=hint) from error
        return str(rendered)

    def tokens(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Tokens of several texts. A chat template writes the special tokens itself."""
        if not callable(self._tokenizer):
            return [self._tokenizer.encode(text, add_special_tokens=self._raw) for text in texts]
        found: Sequence[Sequence[int]] = self._tokenizer(texts, add_special_tokens=self._raw)["input_ids"]
        return found

    def _of_row(self, row: Mapping[str, Any]) -> Sequence[int]:
        return self.tokens([self.text(self.conversation(row, "a row"), "a row")])[0]

    def _dressed(self, messages: list[Message]) -> list[Message]:
        around, system = self._args.question_template, self._args.system
        if around is not None:
            asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
            for place in asked[-1:]:
                content = around.replace("{prompt}", messages[place]["content"])
                messages[place] = {**messages[place], "content": content}
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages


def _messages(value: Any) -> list[Message] | None:
    if isinstance(value, str):
        if value.startswith("[{"):
            try:
                return _messages(json.loads(value)) or [{"role": "user", "content": value}]
            except json.JSONDecodeError:
                pass
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        return None
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return None
    return list(value)


def _most(text: str) -> int:
    return len(text) + 22 * (len(text.encode("utf-8", "surrogatepass")) - len(text))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
