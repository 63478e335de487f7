"""The tools of one environment: made from names and options, called by what a policy said.

A tool is named `calculator`, `python`, `search`, `mcp`, or `module:function` for a function of one's own; options stand
beside the name: `{name: search, files: [notes/]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.environments.tools.base import Always, Tool, ToolRefused, ToolSource, check_arguments, tool_of
from headway.environments.tools.calculator import CALCULATOR
from headway.environments.tools.calls import Call
from headway.environments.tools.mcp import MCPTools
from headway.environments.tools.python import python_tool, shortened
from headway.environments.tools.search import search_tool
from headway.errors import ConfigError, EnvironmentFailed
from headway.own_code import own_function

_SOURCES: dict[str, Callable[..., ToolSource]] = {
    "calculator": lambda: Always(CALCULATOR),
    "python": lambda **options: Always(python_tool(**options)),
    "search": lambda **options: Always(search_tool(**options)),
    "mcp": MCPTools,
}
FORMAT = """# Tools

You may call functions. These are their signatures:
<tools>
{signatures}
</tools>
For each call write a JSON object with the name and the arguments between tool_call tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
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

    async def answer(self, calls: Sequence[Call | str]) -> Answers:
        """Call one tool after the other, in the order that they were asked for."""
        texts, counts = [], {"malformed": 0, "refused": 0, "called": 0}
        for call in calls:
            what, text = await self._answered(call)
            counts[what] += 1
            texts.append(f"<tool_response>\n{shortened(text, self._longest)}\n</tool_response>")
        return Answers(text="\n".join(texts), **counts)

    async def _answered(self, call: Call | str) -> tuple[str, str]:
        if isinstance(call, str):
            return "malformed", f"Error: {call}"
        tool = self.tools.get(call.name)
        if tool is None:
            return "malformed", f"Error: there is no tool {call.name!r}, only {', '.join(self.tools)}"
        try:
            check_arguments(tool, call.arguments)
        except ToolRefused as error:
            return "malformed", f"Error: {error}"
        try:
            return "called", await tool.call(call.arguments)
        except ToolRefused as error:
            return "refused", f"Error: {error}"


def described(tools: Sequence[Tool]) -> str:
    """What a policy has to know of its tools."""
    signatures = "\n".join(json.dumps(tool.signature, ensure_ascii=False) for tool in tools)
    return FORMAT.format(signatures=signatures)


def sources_of(tools: Sequence[str | Mapping[str, Any]]) -> list[ToolSource]:
    """Raises `ConfigError` for what is no tool."""
    return [_source(one) for one in tools]


def _source(asked: str | Mapping[str, Any]) -> ToolSource:
    options = {} if isinstance(asked, str) else dict(asked)
    name = asked if isinstance(asked, str) else options.pop("name", "")
    make = _SOURCES.get(name)
    if make is None:
        tool = tool_of(_function(str(name)))
        if options:
            raise ConfigError("a function of your own has no options", key="tools", value=asked)
        return Always(tool)
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"has other options: {error}", key="tools", value=asked) from error


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        hint = f"one of {', '.join(_SOURCES)}, or module:function of your own"
        raise ConfigError("is no tool", key="tools", value=path, hint=hint)
    return own_function(path, key="tools")
