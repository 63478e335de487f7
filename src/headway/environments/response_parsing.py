"""What a policy meant: the action inside what it said.

The last `<answer>…</answer>` counts where there is one, after any thinking; otherwise all of the text. Nothing is
guessed: an action that cannot be told is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING = re.compile(r"\A.*?</think>", re.DOTALL | re.IGNORECASE)

_MAX_COMMAND_CHARACTERS = 300


def extract_answer(text: str) -> str:
    """The answer without thinking and tags."""
    spoken = _THINKING.sub("", text)
    found = _ANSWER.findall(spoken)
    return str(found[-1] if found else spoken).strip()


def extract_choice(text: str, options: Sequence[str]) -> str | None:
    """The one of `options` that the answer is, or the only one that it names as a word of its own."""
    answer = extract_answer(text)
    for option in options:
        if answer.casefold() == option.casefold():
            return option
    named = [one for one in options if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None


def extract_command(text: str) -> str:
    """The first line of the answer that is not empty, without a leading prompt sign: a command for a text world."""
    lines = [line.strip().lstrip(">").strip() for line in extract_answer(text).splitlines()]
    return next((" ".join(line.split())[:_MAX_COMMAND_CHARACTERS] for line in lines if line), "")


_TOOL_CALL_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_CALLS_THINKING = re.compile(r"\A.*?</think>", re.DOTALL)
_FENCED_JSON = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
_MAX_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCall:
    """One call as it was asked for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """What one turn holds: calls and problems in order, or else an answer."""

    calls: tuple[ParsedToolCall | str, ...] = ()
    """Calls, and in the place of one that cannot be read the reason."""
    text: str = ""
    """What was said besides, without thinking."""


def parse_tool_calls(spoken: str) -> ParsedResponse:
    """The calls of a turn. A turn without any is an answer."""
    text = _CALLS_THINKING.sub("", spoken).strip()
    tagged = _TOOL_CALL_TAG.findall(text)
    if tagged:
        return ParsedResponse(
            calls=tuple(_parse_tagged_call(body) for body in tagged[:_MAX_CALLS]),
            text=_TOOL_CALL_TAG.sub("", text).strip(),
        )
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
    """OpenAI's form, recognised by its keys: other JSON may well be an answer."""
    if not text.startswith(("{", "[")):
        return ParsedResponse(text=text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        looks = re.search(r'"(tool_calls|arguments|function)"\s*:', text)
        return ParsedResponse(calls=(f"not valid JSON: {error}",)) if looks else ParsedResponse(text=text)
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
