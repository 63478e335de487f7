"""Prompts: from a row to the tokens that the policy sees first.

A prompt is a text, or a list of messages (also as JSON text). It gets the configured system message and question
template, goes through the tokenizer's chat template once, ready for an answer, and is tokenized. Guarantees: no special
token is added twice. `max_length` is never less than the number of tokens, so that most prompts need not be tokenized
to know that they fit. Torch is not needed: a tokenizer is whatever has the two methods.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.config import DataArgs
from headway.errors import ConfigError

Message = dict[str, Any]

MISSING = object()
"""What `get_column` returns for a row without the column."""


class PromptTokenizer(Protocol):
    """The part of a tokenizer that data needs. If it can be called with a list of texts, it is used in batches."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> Any:
        """Return the conversation as text (`tokenize` is false), up to where the answer begins."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the tokens of a text."""


def get_column(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; `a.b` is a column of that name, else `b` inside of `a`."""
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
        self._template_lengths: dict[tuple[str, ...], int] = {}
        if args.question_template is not None and "{prompt}" not in args.question_template:
            hint, name = "the question goes where {prompt} stands", f"{key}.question_template"
            raise ConfigError("has no {prompt}", key=name, value=args.question_template, hint=hint)
        for name, given in (("system", args.system), ("chat_template_kwargs", dict(args.chat_template_kwargs) or None)):
            if self._raw and given is not None:
                raise ConfigError("needs a chat template", key=f"{key}.{name}", value=given, hint="not template: none")

    def notes(self) -> list[str]:
        """Return what is used instead of a template by name."""
        if self._args.template is None or self._raw:
            return []
        return [f"{self._key}.template = {self._args.template!r}: the tokenizer's own chat template is used"]

    def make_messages(self, row: Mapping[str, Any], place: str) -> list[Message]:
        """Return the messages of a row. `place` says in errors where the row stands."""
        value = get_column(row, self._args.prompt)
        if value is MISSING:
            hint = f"{self._key}.prompt names the column; here are {', '.join(map(str, row))}"
            raise ConfigError(f"{place}: no column {self._args.prompt!r}", hint=hint)
        messages = _parse_messages(value)
        if messages is None:
            problem = f"{place}: the prompt {_shorten(value)} is neither a text nor a list of messages"
            raise ConfigError(problem, hint='[{"role": "user", "content": "…"}]')
        if not any(message["content"] for message in messages):
            raise ConfigError(f"{place}: the prompt is empty")
        return self._apply_templates(messages)

    def max_length(self, messages: Sequence[Message], place: str) -> int:
        """Return the largest number of tokens the prompt can have: one per byte, plus those of the template.

        Normalisation makes a character that is not ASCII at most eleven times as long, and ASCII no longer.
        """
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._template_lengths:
            text = self.render([{**message, "content": "x"} for message in messages], place)
            self._template_lengths[roles] = max(len(text.encode()), len(self.tokenize([text])[0]))
        return self._template_lengths[roles] + sum(_max_tokens(message["content"]) for message in messages)

    def render(self, messages: list[Message], place: str) -> str:
        """Return the text that is tokenized."""
        if self._raw:
            if len(messages) != 1:
                raise ConfigError(f"{place}: several messages need a chat template", hint="not template: none")
            return str(messages[0]["content"])
        variables = self._args.chat_template_kwargs
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:
            hint = f"{self._key}.template: none takes the text as it is"
            if variables:
                hint = f"{self._key}.chat_template_kwargs gives it {', '.join(variables)}"
            raise ConfigError(f"{place}: the tokenizer's chat template fails: {error}", hint=hint) from error
        return str(text)

    def tokenize(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of several texts. A chat template writes the special tokens itself."""
        if not callable(self._tokenizer):
            return [self._tokenizer.encode(text, add_special_tokens=self._raw) for text in texts]
        found: Sequence[Sequence[int]] = self._tokenizer(texts, add_special_tokens=self._raw)["input_ids"]
        return found

    def tokenize_row(self, row: Mapping[str, Any]) -> Sequence[int]:
        """Return the prompt of a row that was checked before."""
        return self.tokenize([self.render(self.make_messages(row, "a row"), "a row")])[0]

    def _apply_templates(self, messages: list[Message]) -> list[Message]:
        template, system = self._args.question_template, self._args.system
        if template is not None:
            questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
            for place in questions[-1:]:
                content = template.replace("{prompt}", messages[place]["content"])
                messages[place] = {**messages[place], "content": content}
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages


def _parse_messages(value: Any) -> list[Message] | None:
    if isinstance(value, str):
        if value.startswith("[{"):
            try:
                return _parse_messages(json.loads(value)) or [{"role": "user", "content": value}]
            except json.JSONDecodeError:
                pass
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        return None
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return None
    return list(value)


def _max_tokens(text: str) -> int:
    return len(text) + 22 * (len(text.encode("utf-8", "surrogatepass")) - len(text))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
