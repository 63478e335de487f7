"""Messages of a conversation, in the one form in which they are compared and rendered.

Clients send the same message in many ways: text or parts of text, `null` or an empty text, arguments with or without
spaces, fields that say nothing. Here messages that say the same are equal (`said`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headway.serving.request_errors import invalid_field

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a function, as an assistant's message has it."""

    call_id: str
    name: str
    arguments: str
    """JSON, as it was written."""

    @property
    def values(self) -> Any:
        """What templates want to have: the object, where it is one."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message."""

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of a tool's message: which call it answers."""
    name: str = ""

    def rendered(self) -> dict[str, Any]:
        """As chat templates read it."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.calls:
            found["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.values}}
                for call in self.calls
            ]
        if self.call_id:
            found["tool_call_id"] = self.call_id
        if self.name:
            found["name"] = self.name
        return found

    @property
    def said(self) -> ChatMessage:
        """As it is compared: clients trim what an assistant has said before they send it back."""
        if self.role != "assistant":
            return self
        calls = tuple(replace(call, arguments=canonicalize_json(call.arguments)) for call in self.calls)
        return replace(self, content=self.content.strip(), calls=calls)


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Raises `Refused`."""
    if not isinstance(value, list) or not value:
        raise invalid_field("messages", value, "a list of messages, not empty")
    return tuple(_parse_message(one, f"messages[{index}]") for index, one in enumerate(value))


def canonicalize_json(arguments: str) -> str:
    """Arguments of a call so that equal ones are equal; what is not JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return arguments


def _parse_message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise invalid_field(where, value, f"an object with a role: {', '.join(_ROLES)}")
    if value.get("function_call") is not None:
        raise invalid_field(
            f"{where}.function_call", value["function_call"], "absent: calls of functions are in tool_calls"
        )
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid_field(f"{where}.tool_calls", calls, "a list")
    return ChatMessage(
        role=value["role"],
        content=_parse_content(value.get("content"), f"{where}.content"),
        calls=tuple(_parse_tool_call(one, f"{where}.tool_calls[{index}]") for index, one in enumerate(calls)),
        call_id=_parse_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_parse_text(value.get("name"), f"{where}.name"),
    )


def _parse_content(value: Any, where: str) -> str:
    if not isinstance(value, list):
        return _parse_text(value, where)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid_field(
                where, part, 'a text, or parts {"type": "text", "text": …}: this model reads nothing else'
            )
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


TOOL_CALL_OPENING = "<tool_call>"
_TOOL_CALL_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def extract_tool_calls(text: str, call_id: Callable[[int], str]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and the calls. `call_id` names them by number."""
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        found = _parse_tool_call_block(block[1], call_id(len(calls)))
        if found is None:
            return block[0]
        calls.append(found)
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
