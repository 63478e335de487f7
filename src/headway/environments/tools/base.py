"""What a tool is, and how arguments are checked before it sees them.

A tool is a name, a description, a JSON schema of its arguments and one coroutine. What a policy did wrong is a
`ToolRefused`, whose text the policy reads; anything else a tool raises is a broken tool and ends the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints

from headway.errors import ConfigError, HeadwayError

ToolArguments = Mapping[str, Any]

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_JSON_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolRefused(HeadwayError):
    """A call that the tool cannot answer as it was made; the text is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One thing that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    call: Callable[[ToolArguments], Awaitable[str]]
    """Answers with a text. Raises `ToolRefused`."""

    @property
    def signature(self) -> dict[str, Any]:
        """As OpenAI and the chat templates of models know it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Where tools come from: a library function, a folder, a server."""

    async def begin(self) -> Sequence[Tool]:
        """Get ready for an episode. Returns the tools there are."""
        ...

    async def close(self) -> None:
        """Release everything. May be called twice, and without `begin`."""
        ...


class StaticToolSource:
    """Tools that need no getting ready."""

    def __init__(self, *tools: Tool) -> None:
        self.tools = tools

    async def begin(self) -> Sequence[Tool]:
        return self.tools

    async def close(self) -> None:
        return None


def make_function_tool(function: Callable[..., Any]) -> Tool:
    """A plain or async function as a tool: its name, docstring and annotations say everything."""
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints.get(name) not in _JSON_TYPE_NAMES:
            problem = (
                f"the parameter {name!r} needs one of the types {', '.join(kind.__name__ for kind in _JSON_TYPE_NAMES)}"
            )
            raise ConfigError(problem, key="tools", value=function.__qualname__)
        properties[name] = {"type": _JSON_TYPE_NAMES[hints[name]]}
        if parameter.default is parameter.empty:
            required.append(name)

    async def call(arguments: ToolArguments) -> str:
        answer = function(**arguments)
        return str(await answer if inspect.isawaitable(answer) else answer)

    return Tool(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        parameters={"type": "object", "properties": properties, "required": required},
        call=call,
    )


def check_tool_arguments(tool: Tool, arguments: ToolArguments) -> None:
    """Names and types against the schema's first level; deeper levels are the tool's own. Raises `ToolRefused`."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise ToolRefused(f"{tool.name} needs {', '.join(map(repr, missing))}")
    unknown = [name for name in arguments if name not in properties]
    if unknown and not tool.parameters.get("additionalProperties", False):
        raise ToolRefused(f"{tool.name} takes no {', '.join(map(repr, unknown))}; it takes {', '.join(properties)}")
    for name, value in arguments.items():
        wanted = properties.get(name, {}).get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted or []
        if kinds and not any(_has_json_type(value, kind) for kind in kinds):
            raise ToolRefused(f"{name!r} of {tool.name} must be of type {' or '.join(kinds)}")


def _has_json_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _JSON_TYPES.get(kind, (object,)))
