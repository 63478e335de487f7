"""Tool calls in what a policy said.

Two styles are read: JSON objects between `<tool_call>` and `</tool_call>`, as Qwen and Hermes write them, and, where
there is no such tag, a text that is nothing but JSON in OpenAI's form: a message with `tool_calls`, one call, or a list
of calls. Arguments may be an object or its JSON text. Thinking is left out. What looks like a call and cannot be read
is a problem with a reason, never an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_THINKING = re.compile(r"\A.*?</think>", re.DOTALL)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
_MOST_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call as it was asked for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one turn holds: calls and problems in order, or else an answer."""

    calls: tuple[Call | str, ...] = ()
    """Calls, and in the place of one that cannot be read the reason."""
    text: str = ""
    """What was said besides, without thinking."""


def read_calls(spoken: str) -> Said:
    """The calls of a turn. A turn without any is an answer."""
    text = _THINKING.sub("", spoken).strip()
    tagged = _TAG.findall(text)
    if tagged:
        return Said(calls=tuple(_tagged(body) for body in tagged[:_MOST_CALLS]), text=_TAG.sub("", text).strip())
    if "</tool_call>" in text:
        return Said(calls=("a </tool_call> without <tool_call>",))
    fenced = _FENCED.match(text)
    return _bare(fenced[1].strip() if fenced else text)


def _tagged(body: str) -> Call | str:
    try:
        return _call(json.loads(body))
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"


def _bare(text: str) -> Said:
    """OpenAI's form, recognised by its keys: other JSON may well be an answer."""
    if not text.startswith(("{", "[")):
        return Said(text=text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        looks = re.search(r'"(tool_calls|arguments|function)"\s*:', text)
        return Said(calls=(f"not valid JSON: {error}",)) if looks else Said(text=text)
    entries = value.get("tool_calls", value) if isinstance(value, dict) else value
    entries = entries if isinstance(entries, list) else [entries]
    if not entries or not all(isinstance(one, dict) and ("function" in one or "arguments" in one) for one in entries):
        return Said(text=text)
    return Said(calls=tuple(_call(one) for one in entries[:_MOST_CALLS]))


def _call(value: object) -> Call | str:
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
    return Call(name=value["name"], arguments=arguments)
