"""Parses a policy's text: the answer, choice or command in it, and its tool calls.

Text up to `</think>` is dropped. The answer is the last `<answer>…</answer>`, or the whole text if there is none.
Nothing is guessed: an ambiguous choice is none.

Tool calls come in two styles: JSON objects between `<tool_call>` and `</tool_call>`, as Qwen and Hermes write them; or,
without such tags, a text that is nothing but JSON in OpenAI's form: a message with `tool_calls`, one call, or a list of
calls. Arguments may be an object or its JSON text. Something that looks like a call and cannot be parsed becomes a
reason, never an answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING = re.compile(r"\A.*?</think>", re.DOTALL | re.IGNORECASE)
_TOOL_CALL_THINKING = re.compile(r"\A.*?</think>", re.DOTALL)
_TOOL_CALL_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCED_JSON = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
_MAX_COMMAND_CHARACTERS = 300
_MAX_CALLS = 16


def extract_answer(text: str) -> str:
    """Return the answer without thinking and tags."""
    visible = _THINKING.sub("", text)
    tagged = find_tagged_answer(visible)
    return visible.strip() if tagged is None else tagged


def find_tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` tag, or `None` if there is no tag."""
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else None


def find_pattern(text: str, pattern: re.Pattern[str]) -> str | None:
    """Return the last group of the first match, or all of the match if there is no group; `None` without a match."""
    found = pattern.search(text)
    return None if found is None else str(found[pattern.groups] or "").strip()


def compile_action_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Return the expression that finds an action in an answer. Raises `ConfigError`."""
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        problem = f"is no regular expression: {error}"
        raise ConfigError(problem, key="action_pattern", value=pattern) from error


def order_words(given: Mapping[int, str] | Sequence[str], usual: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the words of a list, or of a mapping from numbers, in their order; there must be as many as usual."""
    words = [given[number] for number in sorted(given, key=int)] if isinstance(given, Mapping) else list(given)
    if len(words) != len(usual) or len({str(word).lower() for word in words}) != len(usual):
        raise ConfigError(f"must be {len(usual)} different words", key=key, value=given, hint=", ".join(usual))
    return tuple(map(str, words))


def extract_choice(text: str, options: Sequence[str]) -> str | None:
    """Return the option that equals the answer, or the only option that the answer contains as a word."""
    answer = extract_answer(text)
    for option in options:
        if answer.casefold() == option.casefold():
            return option
    named = [one for one in options if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None


def extract_command(text: str) -> str:
    """Return the first non-empty line of the answer, without a leading `>`: a command for a text game."""
    lines = [line.strip().lstrip(">").strip() for line in extract_answer(text).splitlines()]
    return next((" ".join(line.split())[:_MAX_COMMAND_CHARACTERS] for line in lines if line), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCall:
    """One tool call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """The content of one turn: tool calls in order, or else an answer."""

    calls: tuple[ParsedToolCall | str, ...] = ()
    """Calls in order; a call that cannot be parsed is replaced by the reason."""
    text: str = ""
    """The rest of the text, without thinking."""


def parse_tool_calls(response: str) -> ParsedResponse:
    """Parse the tool calls of a turn. A turn without any is an answer."""
    text = _TOOL_CALL_THINKING.sub("", response).strip()
    tagged = _TOOL_CALL_TAG.findall(text)
    if tagged:
        calls = tuple(_parse_tagged_call(body) for body in tagged[:_MAX_CALLS])
        return ParsedResponse(calls=calls, text=_TOOL_CALL_TAG.sub("", text).strip())
    if "</tool_call>" in text:
        return ParsedResponse(calls=("a </tool_call> without <tool_call>",))
    fenced = _FENCED_JSON.match(text)
    return _parse_bare_json(fenced[1].strip() if fenced else text)


def _parse_tagged_call(body: str) -> ParsedToolCall | str:
    try:
        return _parse_call(json.loads(body))
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"


def _parse_bare_json(text: str) -> ParsedResponse:
    """Parse OpenAI's form, which is recognised by its keys: other JSON may be an answer."""
    if not text.startswith(("{", "[")):
        return ParsedResponse(text=text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        looks_like_call = re.search(r'"(tool_calls|arguments|function)"\s*:', text)
        return ParsedResponse(calls=(f"not valid JSON: {error}",)) if looks_like_call else ParsedResponse(text=text)
    entries = value.get("tool_calls", value) if isinstance(value, dict) else value
    entries = entries if isinstance(entries, list) else [entries]
    if not entries or not all(isinstance(one, dict) and ("function" in one or "arguments" in one) for one in entries):
        return ParsedResponse(text=text)
    return ParsedResponse(calls=tuple(_parse_call(one) for one in entries[:_MAX_CALLS]))


def _parse_call(value: object) -> ParsedToolCall | str:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call is an object with "name" and "arguments"'
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {value['name']} are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} must be an object"
    return ParsedToolCall(name=value["name"], arguments=arguments)
