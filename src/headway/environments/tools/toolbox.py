"""The tools of one environment: made from names and options, and called with what a policy wrote.

A tool is named `calculator`, `python`, `search`, `retrieval`, `check_answer`, `mcp`, or `module:function` for one that
the user wrote. Options stand beside the name: `{name: search, files: [notes/]}`. `schema` replaces what the policy is
told of a tool: its name, its description, and those of its arguments.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from headway.environments.response_parsing import ParsedToolCall
from headway.environments.tools.answer_check_tool import AnswerCheckSource
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
from headway.environments.tools.retrieval_tool import make_retrieval_tool
from headway.environments.tools.search_tool import make_search_tool
from headway.errors import ConfigError, EnvironmentFailed
from headway.user_code import import_function

_BUILT_IN_SOURCES: dict[str, Callable[..., ToolSource]] = {
    "calculator": lambda: StaticToolSource(CALCULATOR_TOOL),
    "python": lambda **options: StaticToolSource(make_python_tool(**options)),
    "search": lambda **options: StaticToolSource(make_search_tool(**options)),
    "retrieval": lambda **options: StaticToolSource(make_retrieval_tool(**options)),
    "check_answer": lambda **options: AnswerCheckSource(**options),
    "mcp": MCPToolSource,
}
TOOL_PROMPT_FORMAT = files("headway.environments.tools").joinpath("tool_prompt.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResults:
    """The answers of the tools to the calls of one turn."""

    text: str
    counts: Mapping[str, int]
    """Calls by outcome. `malformed`: cannot be parsed, unknown tool or wrong arguments; `refused`: understood, but the
    tool could not answer; `called`: answered."""


class Toolbox:
    """Tools by name. Call `begin` before each episode and `close` at the end."""

    def __init__(self, sources: Sequence[ToolSource], *, longest: int = 8000) -> None:
        self._sources, self._longest = sources, longest
        self.tools: dict[str, Tool] = {}

    async def begin(self, data: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.tools = {}
        for source in self._sources:
            for tool in await source.begin(data):
                if tool.name in self.tools:
                    raise EnvironmentFailed(f"two tools have the name {tool.name!r}")
                self.tools[tool.name] = tool

    async def close(self) -> None:
        for source in self._sources:
            await source.close()

    async def call_tools(self, calls: Sequence[ParsedToolCall | str]) -> ToolResults:
        """Make the calls one after the other, in the order in which the policy wrote them."""
        texts, counts = [], {"malformed": 0, "refused": 0, "called": 0}
        for call in calls:
            outcome, text = await self._call_tool(call)
            counts[outcome] += 1
            texts.append(f"<tool_response>\n{shorten_middle(text, self._longest)}\n</tool_response>")
        return ToolResults(text="\n".join(texts), counts=counts)

    async def _call_tool(self, call: ParsedToolCall | str) -> tuple[str, str]:
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


class _RenamedTools:
    """Provides the only tool of a source under another name and description."""

    def __init__(self, source: ToolSource, schema: Mapping[str, Any]) -> None:
        function = schema.get("function", schema)
        known = {name: function[name] for name in ("name", "description", "parameters") if name in function}
        if not isinstance(known.get("name"), str) or not isinstance(known.get("parameters", {}), Mapping):
            raise ConfigError("is no signature of a function", key="schema", value=schema, hint="name, parameters")
        self._source, self._given = source, known

    async def begin(self, data: Mapping[str, Any]) -> Sequence[Tool]:
        (tool,) = await self._source.begin(data)
        return [replace(tool, **self._given)]

    async def close(self) -> None:
        await self._source.close()


def describe_tools(tools: Sequence[Tool]) -> str:
    """Return the text that tells a policy which tools it has and how to call them."""
    signatures = "\n".join(json.dumps(tool.signature, ensure_ascii=False) for tool in tools)
    return TOOL_PROMPT_FORMAT.format(signatures=signatures)


def make_tool_source(given: str | Mapping[str, Any]) -> ToolSource:
    """Make the source of a tool that a configuration lists. Raises `ConfigError`."""
    options = {} if isinstance(given, str) else dict(given)
    name = str(given if isinstance(given, str) else options.pop("name", ""))
    schema = options.pop("schema", None)
    if name in _BUILT_IN_SOURCES:
        try:
            source = _BUILT_IN_SOURCES[name](**options)
            return source if schema is None else _RenamedTools(source, schema)
        except TypeError as error:
            raise ConfigError(f"has other options: {error}", key="tools", value=given) from error
    module, _, function = name.partition(":")
    if not module or not function:
        hint = f"one of {', '.join(_BUILT_IN_SOURCES)}, or module:function of your own"
        raise ConfigError("is no tool", key="tools", value=name, hint=hint)
    tool = make_function_tool(import_function(name, key="tools"))
    if options or schema is not None:
        raise ConfigError("a function of your own has no options", key="tools", value=given)
    return StaticToolSource(tool)
