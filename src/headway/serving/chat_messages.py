"""Chat messages in one normalised form, and the tool calls in them.

Clients send the same message in many ways: text or text parts, `null` or an empty text, arguments with or without
spaces, empty fields. `ChatMessage.normalized` makes messages with the same content equal.

Tool calls are read in the style of Hermes and Qwen:

    <tool_call>
    {"name": "search", "arguments": {"query": "…"}}
    </tool_call>

Something that looks like a call but cannot be parsed stays text, so that the client sees what the model really wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headway.serving.request_errors import invalid_field

_ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_CALL_OPENING = "<tool_call>"
_TOOL_CALL_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One function call in an assistant message."""

    call_id: str
    name: str
    arguments: str
    """JSON text, as it was written."""

    def to_body(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}

    def to_template(self) -> dict[str, Any]:
        """Return the form that chat templates read: arguments as an object, if they are valid JSON."""
        body = self.to_body()
        with suppress(ValueError):
            body["function"]["arguments"] = json.loads(self.arguments)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """The call that a tool message answers."""
    name: str = ""

    def to_template(self) -> dict[str, Any]:
        """Return the form that chat templates read."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message

    @property
    def normalized(self) -> ChatMessage:
        """The form to compare: clients strip an assistant's text before they send it back."""
        if self.role != "assistant":
            return self
        calls = tuple(replace(call, arguments=canonicalize_json(call.arguments)) for call in self.tool_calls)
        return replace(self, content=self.content.strip(), tool_calls=calls)


def extract_tool_calls(text: str, make_call_id: Callable[[int], str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a generated text into the text without its tool calls, and the calls. `make_call_id` numbers them."""
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        call = _parse_tool_call_block(block[1], make_call_id(len(calls)))
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    rest = _TOOL_CALL_BLOCK.sub(take, text)
    return (rest.strip() if calls else text), tuple(calls)


def _parse_tool_call_block(text: str, call_id: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call_id=call_id, name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def canonicalize_json(arguments: str) -> str:
    """Return JSON text in one fixed form, so that equal arguments compare equal; other text stays as it is."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return arguments


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Parse the `messages` of a request. Raises `RequestRefused`."""
    if not isinstance(value, list) or not value:
        raise invalid_field("messages", value, "a list of messages, not empty")
    return tuple(_parse_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _parse_message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise invalid_field(where, value, f"an object with a role: {', '.join(_ROLES)}")
    if (old_call := value.get("function_call")) is not None:
        raise invalid_field(f"{where}.function_call", old_call, "absent: calls of functions are in tool_calls")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid_field(f"{where}.tool_calls", calls, "a list")
    return ChatMessage(
        role=value["role"],
        content=_parse_content(value.get("content"), f"{where}.content"),
        tool_calls=tuple(_parse_tool_call(one, f"{where}.tool_calls[{index}]") for index, one in enumerate(calls)),
        call_id=_parse_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_parse_text(value.get("name"), f"{where}.name"),
    )


def _parse_content(value: Any, where: str) -> str:
    if not isinstance(value, list):
        return _parse_text(value, where)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            expected = 'a text, or parts {"type": "text", "text": …}: this model reads nothing else'
            raise invalid_field(where, part, expected)
    return "".join(part["text"] for part in value)


def _parse_tool_call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_field(where, value, '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(call_id=_parse_text(value.get("id"), where), name=function["name"], arguments=text)


def _parse_text(value: Any, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise invalid_field(where, value, "a text")
    return value or ""
