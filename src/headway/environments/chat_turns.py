"""Chat turns as tokens: the chat template is applied once per turn, and never to what the policy has sampled.

An episode is  opening · sampled · following observation · sampled · …  Sampled tokens stay as they were sampled. The
text between two turns (the end of the turn, the next message, the beginning of the answer) is taken from the template
once, when the encoder is made.

Guarantees: the text of every episode is what the template makes of the same conversation; otherwise the template is
refused with a `ConfigError` before anything starts. A turn that ended with its end token is not ended twice. A turn
that was cut off, by length or by a stop string, gets the end that it lacks. Control tokens in what an environment says
are removed.

Tools are told and answer as the template writes it: signatures through its variable `tools`, answers as messages of the
role `tool`. A template that has no place for signatures gets them as a text behind the system message; one that has no
tool messages, or rewrites earlier turns with them, gets the answers as a message of the user.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

from headway.data.prompts import Message, PromptTokenizer
from headway.errors import ConfigError

_PROBE_TEXTS = ("alpha7", "bravo7", "charlie7", "delta7", "echo7")
"""Message contents that no template has a reason to change."""
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "foxtrot7", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TOOL_PROMPT_FORMAT = files("headway.environments.tools").joinpath("tool_prompt.txt").read_text(encoding="utf-8")


def describe_signatures(signatures: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that tells a policy which tools it has and how to call them."""
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in signatures)
    return TOOL_PROMPT_FORMAT.format(signatures=lines)


class ChatTokenizer(PromptTokenizer, Protocol):
    """The part of a tokenizer that the encoder needs."""

    all_special_tokens: list[str]


class ChatTurnEncoder:
    """Encodes the text around the turns of one policy. `variables` are passed to its chat template."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, name: str = "the model", variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._name, self._variables = tokenizer, name, dict(variables or {})
        self._special = [token for token in tokenizer.all_special_tokens if token]
        self._has_system_role = self._accepts_system_message()
        self._before, self._after = self._find_separators()
        self._check_appends()
        self._end_token = self._encode(self._before)[0]
        """The token that ends a turn, or the first token of the text that does."""
        self.shows_tools, self.has_tool_messages = self._accepts_tools(), self._accepts_tool_messages()

    def encode_opening(self, instructions: str, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens up to the first turn of the policy, which has `tools`."""
        if tools and not self.shows_tools:
            instructions, tools = "\n\n".join(filter(None, (instructions, describe_signatures(tools)))), ()
        return self._encode(self._render_opening(self._clean(instructions), self._clean(text), tools))

    def encode_following(self, text: str, generated: Sequence[int], tool_answers: Sequence[str] = ()) -> list[int]:
        """Return the tokens between the turn `generated` and the next one.

        The environment says `text` there; `tool_answers` say the same as messages of tools.
        """
        said = self._before + self._clean(text) + self._after
        if tool_answers and self.has_tool_messages:
            said = self._render_tool_answers(*map(self._clean, tool_answers))
        tokens = self._encode(said)
        return tokens[1:] if len(generated) and generated[-1] == self._end_token else tokens

    def _render_opening(self, instructions: str, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not instructions:
            return self._render(_make_message("user", text), tools=tools)
        if self._has_system_role:
            return self._render(_make_message("system", instructions), _make_message("user", text), tools=tools)
        return self._render(_make_message("user", f"{instructions}\n\n{text}"), tools=tools)

    def _render_tool_answers(self, *answers: str) -> str:
        """Return the text between an answer that called tools and the next answer."""
        question, answer, *_ = _PROBE_TEXTS
        tools = [_make_message("tool", one) for one in answers]
        whole = self._render(_make_message("user", question), _make_message("assistant", answer), *tools)
        return whole.split(answer, 1)[1]

    def _accepts_tools(self) -> bool:
        """Return whether the template shows the signatures of tools."""
        try:
            return "foxtrot7" in self._render(_make_message("user", _PROBE_TEXTS[0]), tools=[_PROBE_TOOL])
        except ConfigError:
            return False

    def _accepts_tool_messages(self) -> bool:
        """Return whether the template shows messages of tools, such that an episode can grow by them."""
        question, first, answer, second, other = _PROBE_TEXTS
        roles = ("user", "assistant", "tool", "assistant", "tool", "tool")
        texts = (question, first, answer, second, other, question)
        try:
            whole = self._render(*map(_make_message, roles, texts))
            turns = self._render_tool_answers(answer), self._render_tool_answers(other, question)
        except ConfigError:
            return False
        built = self._render_opening("", question) + first + turns[0] + second + turns[1]
        return built == whole and all(one in "".join(turns) for one in (answer, other, question))

    def _accepts_system_message(self) -> bool:
        """Return whether the template shows a system message; some templates refuse it, others drop it."""
        system, user = _PROBE_TEXTS[:2]
        try:
            return system in self._render(_make_message("system", system), _make_message("user", user))
        except ConfigError:
            return False

    def _find_separators(self) -> tuple[str, str]:
        """Return the text between an answer and the next message, and between that message and the next answer."""
        question, answer, following, *_ = _PROBE_TEXTS
        text = self._render(
            _make_message("user", question), _make_message("assistant", answer), _make_message("user", following)
        )
        for probe in (question, answer, following):
            if text.count(probe) != 1:
                raise self._refuse(f"writes {probe!r} {text.count(probe)} times where a message says it once", text)
        before, after = text.split(answer)[1].split(following)
        if not before:
            raise self._refuse("puts nothing between an answer and the next message", text)
        return before, after

    def _check_appends(self) -> None:
        """Check that a conversation built turn by turn equals what the template makes of the whole."""
        roles = ("user", "assistant") * 3
        whole = self._render(*map(_make_message, roles, _PROBE_TEXTS))
        built = self._render_opening("", _PROBE_TEXTS[0])
        for answer, following in (_PROBE_TEXTS[1:3], _PROBE_TEXTS[3:5]):
            built += answer + self._before + following + self._after
        if built != whole:
            raise self._refuse("rewrites earlier turns, so that an episode cannot grow turn by turn", whole, built)

    def _refuse(self, problem: str, *texts: str) -> ConfigError:
        shown = " against ".join(repr(text) for text in texts)
        given = f", without {', '.join(self._variables)}" if self._variables else ""
        hint = f"{shown}; give the tokenizer a template that only appends{given}"
        return ConfigError(f"the chat template of {self._name} {problem}", hint=hint)

    def _render(self, *messages: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        options = {**self._variables, "tools": [dict(tool) for tool in tools]} if tools else self._variables
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template of {self._name} fails for {roles}: {error}") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _clean(self, text: str) -> str:
        """Remove control tokens; removing one may create another, so repeat until none is left."""
        while any(token in text for token in self._special):
            for token in self._special:
                text = text.replace(token, "")
        return text


def _make_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
