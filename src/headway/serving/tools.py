"""Tool calls in what a model says, in the manner of Hermes and Qwen:

    <tool_call>
    {"name": "search", "arguments": {"query": "…"}}
    </tool_call>

What looks like a call and is none stays text: whoever reads it sees what the model has really said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from headway.serving.messages import ToolCall

OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parsed(text: str, call_id: Callable[[int], str]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and the calls. `call_id` names them by number."""
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        found = _call(block[1], call_id(len(calls)))
        if found is None:
            return block[0]
        calls.append(found)
        return ""

    rest = _BLOCK.sub(take, text)
    return (rest.strip() if calls else text), tuple(calls)


def _call(text: str, call_id: str) -> ToolCall | None:
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
