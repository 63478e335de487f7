"""The tools of one environment: made from names and options, called by what a policy said.

A tool is named `calculator`, `python`, `search`, `mcp`, or `module:function` for a function of one's own; options stand
beside the name: `{name: search, files: [notes/]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.environments.response_parsing import ParsedToolCall
from headway.environments.tools.base import (
    StaticToolSource,
    Tool,
    ToolRefused,
    ToolSource,
    check_tool_arguments,
    make_function_tool,
)
from headway.environments.tools.calculator_tool import CALCULATOR_TOOL
from headway.environments.tools.mcp_tools import MCPToolSource
from headway.environments.tools.python_tool import make_python_tool, shorten_middle
from headway.environments.tools.search_tool import make_search_tool
from headway.errors import ConfigError, EnvironmentFailed
from headway.user_code import import_function

_BUILT_IN_SOURCES: dict[str, Callable[..., ToolSource]] = {
    "calculator": lambda: StaticToolSource(CALCULATOR_TOOL),
    "python": lambda **options: StaticToolSource(make_python_tool(**options)),
    "search": lambda **options: StaticToolSource(make_search_tool(**options)),
    "mcp": MCPToolSource,
}
TOOL_PROMPT_FORMAT = """# Tools

You may call functions. These are their signatures:
<tools>
{signatures}
</tools>
For each call write a JSON object with the name and the arguments between tool_call tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResults:
    """What the tools said to the calls of one turn."""

    text: str
    malformed: int
    """Calls that could not be read, of unknown tools, or with arguments that do not fit."""
    refused: int
    """Calls that were understood and that the tool could not answer."""
    called: int
    """Calls that were answered."""


class Toolbox:
    """Tools by name. `begin` before each episode, `close` at the end."""

    def __init__(self, sources: Sequence[ToolSource], *, longest: int = 8000) -> None:
        self._sources, self._longest = sources, longest
        self.tools: dict[str, Tool] = {}

    async def begin(self) -> None:
        self.tools = {}
        for source in self._sources:
            for tool in await source.begin():
                if tool.name in self.tools:
                    raise EnvironmentFailed(f"two tools have the name {tool.name!r}")
                self.tools[tool.name] = tool

    async def close(self) -> None:
        for source in self._sources:
            await source.close()

    async def answer(self, calls: Sequence[ParsedToolCall | str]) -> ToolResults:
        """Call one tool after the other, in the order that they were asked for."""
        texts, counts = [], {"malformed": 0, "refused": 0, "called": 0}
        for call in calls:
            what, text = await self._answered(call)
            counts[what] += 1
            texts.append(f"<tool_response>\n{shorten_middle(text, self._longest)}\n</tool_response>")
        return ToolResults(text="\n".join(texts), **counts)

    async def _answered(self, call: ParsedToolCall | str) -> tuple[str, str]:
        if isinstance(call, str):
            return "malformed", f"Error: {call}"
        tool = self.tools.get(call.name)
        if tool is None:
            return "malformed", f"Error: there is no tool {call.name!r}, only {', '.join(self.tools)}"
        try:
            check_tool_arguments(tool, call.arguments)
        except ToolRefused as error:
            return "malformed", f"Error: {error}"
        try:
            return "called", await tool.call(call.arguments)
        except ToolRefused as error:
            return "refused", f"Error: {error}"


def describe_tools(tools: Sequence[Tool]) -> str:
    """What a policy has to know of its tools."""
    signatures = "\n".join(json.dumps(tool.signature, ensure_ascii=False) for tool in tools)
    return TOOL_PROMPT_FORMAT.format(signatures=signatures)


def make_tool_sources(tools: Sequence[str | Mapping[str, Any]]) -> list[ToolSource]:
    """Raises `ConfigError` for what is no tool."""
    return [_make_source(one) for one in tools]


def _make_source(asked: str | Mapping[str, Any]) -> ToolSource:
    options = {} if isinstance(asked, str) else dict(asked)
    name = asked if isinstance(asked, str) else options.pop("name", "")
    make = _BUILT_IN_SOURCES.get(name)
    if make is None:
        tool = make_function_tool(_import_function(str(name)))
        if options:
            raise ConfigError("a function of your own has no options", key="tools", value=asked)
        return StaticToolSource(tool)
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"has other options: {error}", key="tools", value=asked) from error


def _import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        hint = f"one of {', '.join(_BUILT_IN_SOURCES)}, or module:function of your own"
        raise ConfigError("is no tool", key="tools", value=path, hint=hint)
    return import_function(path, key="tools")
