"""The tool protocol, and the check of arguments before a tool sees them.

A tool is a name, a description, a JSON schema of its arguments and one coroutine. A mistake of the policy is a
`ToolRefused`, whose text the policy reads. Any other exception means that the tool is broken and ends the episode.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_type_hints

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
    """A call that the tool cannot answer; the text is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """An answer of a tool that says more than a text."""

    text: str
    outcome: Literal["called", "refused"] = "called"
    """`refused`: the tool could not answer, and the text says why."""
    reward: float | None = None
    """Reward that the tool gives for this call. Rewards of the run see it; nothing is added by itself."""
    state_reward: float | None = None
    """Reward that the tool gives for what it was asked in the episode so far."""
    problem: str = ""
    """What the people of the run should know. It becomes a line of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, which form an object."""
    call: Callable[[ToolArguments], Awaitable[str | ToolAnswer]]
    """Returns a text, or an answer that says more. Raises `ToolRefused`."""

    @property
    def signature(self) -> dict[str, Any]:
        """The description that OpenAI and the chat templates of models use."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Provides tools: fixed ones, or those of a server that has to be started."""

    async def begin(self, data: Mapping[str, Any]) -> Sequence[Tool]:
        """Prepare for an episode of the task with `data`, and return its tools."""

    async def close(self) -> None:
        """Release everything. May be called twice, and without `begin`."""


class StaticToolSource:
    """Provides tools that need no preparation."""

    def __init__(self, *tools: Tool) -> None:
        self.tools = tools

    async def begin(self, data: Mapping[str, Any]) -> Sequence[Tool]:
        return self.tools

    async def close(self) -> None:
        return None


def make_schema(properties: Mapping[str, str], required: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of an object from the JSON type of each property; by default all are required."""
    types = {name: {"type": json_type} for name, json_type in properties.items()}
    return {"type": "object", "properties": types, "required": list(types) if required is None else list(required)}


def make_function_tool(function: Callable[..., Any]) -> Tool:
    """Make a tool from a plain or async function: its name, docstring and annotations describe it."""
    hints = get_type_hints(function)
    properties: dict[str, str] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints.get(name) not in _JSON_TYPE_NAMES:
            types = ", ".join(kind.__name__ for kind in _JSON_TYPE_NAMES)
            problem = f"the parameter {name!r} needs one of the types {types}"
            raise ConfigError(problem, key="tools", value=function.__qualname__)
        properties[name] = _JSON_TYPE_NAMES[hints[name]]
        if parameter.default is parameter.empty:
            required.append(name)

    async def call(arguments: ToolArguments) -> str:
        answer = function(**arguments)
        return str(await answer if inspect.isawaitable(answer) else answer)

    return Tool(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        parameters=make_schema(properties, required),
        call=call,
    )


def check_tool_arguments(tool: Tool, arguments: ToolArguments) -> None:
    """Check names and types against the first level of the schema. Raises `ToolRefused`.

    Deeper levels are left to the tool.
    """
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise ToolRefused(f"{tool.name} needs {', '.join(map(repr, missing))}")
    unknown = [name for name in arguments if name not in properties]
    if unknown and not tool.parameters.get("additionalProperties", False):
        raise ToolRefused(f"{tool.name} takes no {', '.join(map(repr, unknown))}; it takes {', '.join(properties)}")
    for name, value in arguments.items():
        expected = properties.get(name, {}).get("type")
        types = [expected] if isinstance(expected, str) else expected or []
        if types and not any(_has_json_type(value, json_type) for json_type in types):
            raise ToolRefused(f"{name!r} of {tool.name} must be of type {' or '.join(types)}")


def _has_json_type(value: object, json_type: str) -> bool:
    if isinstance(value, bool):
        return json_type == "boolean"
    return isinstance(value, _JSON_TYPES.get(json_type, (object,)))
