"""The tools of one environment: made from names and options, and called with what a policy wrote.

A tool is named `calculator`, `python`, `search`, `retrieval`, `check_answer`, `mcp`, `verl_class` for a class that was
written for verl, or `module:function` for a function that the user wrote. Options stand beside the name:
`{name: search, files: [notes/]}`. `schema` replaces what the policy is told of a tool: its name, its description, and
those of its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from headway.environments.chat_turns import describe_signatures
from headway.environments.response_parsing import ParsedToolCall
from headway.environments.tools.answer_check_tool import AnswerCheckSource
from headway.environments.tools.base import (
    StaticToolSource,
    Tool,
    ToolAnswer,
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
from headway.environments.tools.verl_tool import VerlToolSource
from headway.errors import ConfigError, EnvironmentFailed
from headway.user_code import import_function

_BUILT_IN_SOURCES: dict[str, Callable[..., ToolSource]] = {
    "calculator": lambda: StaticToolSource(CALCULATOR_TOOL),
    "python": lambda **options: StaticToolSource(make_python_tool(**options)),
    "search": lambda **options: StaticToolSource(make_search_tool(**options)),
    "retrieval": lambda **options: StaticToolSource(make_retrieval_tool(**options)),
    "check_answer": lambda **options: AnswerCheckSource(**options),
    "mcp": MCPToolSource,
    "verl_class": VerlToolSource,
}
CutSide = Literal["left", "middle", "right"]
"""Which part of a long answer the policy sees: its beginning (`left`), its end (`right`), or both, as in verl."""
_LONGEST_REFUSAL = 300
"""Characters in which the policy is told why a call has no answer, however short the answers of tools are."""
_CUT_TOOLS: set[str] = set()
"""Tools of this process whose answers have been cut before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResults:
    """The answers of the tools to the calls of one turn."""

    answers: Sequence[str]
    """What the policy reads, one text for each call."""
    counts: Mapping[str, int]
    """Calls by outcome. `malformed`: cannot be parsed, unknown tool or wrong arguments; `refused`: understood, but the
    tool could not answer; `called`: answered."""
    rewards: Sequence[float] = ()
    """Rewards that tools gave for these calls."""
    state_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that tools gave for all of the episode so far, by tool."""
    problems: Sequence[str] = ()
    """What the people of the run should know."""

    @property
    def text(self) -> str:
        """All answers in tags, as one text."""
        return "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in self.answers)


class Toolbox:
    """Tools by name. Call `begin` before each episode and `close` at the end."""

    def __init__(self, sources: Sequence[ToolSource], *, longest: int = 8000, cut_side: CutSide = "middle") -> None:
        self._sources, self._longest, self._cut_side = sources, longest, cut_side
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
        texts: list[str] = []
        counts, states = {"malformed": 0, "refused": 0, "called": 0}, {}
        rewards, problems = [], []
        for call in calls:
            outcome, answer = await self._call_tool(call)
            counts[outcome] += 1
            is_ours = outcome != "called"
            longest = max(self._longest, _LONGEST_REFUSAL) if is_ours else self._longest
            texts.append(shorten(answer.text, longest, self._cut_side))
            name = call if isinstance(call, str) else call.name
            if len(answer.text) > longest and not is_ours and name not in _CUT_TOOLS:
                _CUT_TOOLS.add(name)
                told = f"answered with {len(answer.text)} characters, of which the policy sees {self._longest}"
                problems.append(f"the tool {name} {told}; further such answers are not told")
            problems += [answer.problem] if answer.problem else []
            rewards += [] if answer.reward is None else [answer.reward]
            states.update({} if answer.state_reward is None else {name: answer.state_reward})
        return ToolResults(answers=texts, counts=counts, rewards=rewards, state_rewards=states, problems=problems)

    async def _call_tool(self, call: ParsedToolCall | str) -> tuple[str, ToolAnswer]:
        if isinstance(call, str):
            return "malformed", ToolAnswer(text=f"Error: {call}")
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools)
            return "malformed", ToolAnswer(text=f"Error: there is no tool {call.name!r}, only {known}")
        try:
            check_tool_arguments(tool, call.arguments)
        except ToolRefused as error:
            return "malformed", ToolAnswer(text=f"Error: {error}")
        try:
            answer = await tool.call(call.arguments)
        except ToolRefused as error:
            return "refused", ToolAnswer(text=f"Error: {error}")
        answer = ToolAnswer(text=answer) if isinstance(answer, str) else answer
        return answer.outcome, answer


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


def shorten(text: str, longest: int, side: CutSide) -> str:
    """Return `longest` characters of a text that has more: its beginning, its end, or both."""
    if side == "middle" or len(text) <= longest:
        return shorten_middle(text, longest)
    note = f"… {len(text) - longest} characters left out …"
    return f"{text[:longest]}\n{note}" if side == "left" else f"{note}\n{text[-longest:]}"


def describe_tools(tools: Sequence[Tool]) -> str:
    """Return the text that tells a policy which tools it has and how to call them."""
    return describe_signatures([tool.signature for tool in tools])


def is_user_tool(given: str | Mapping[str, Any]) -> bool:
    """Return whether a tool that a configuration lists is code that a user wrote."""
    name = given if isinstance(given, str) else given.get("name")
    return name == "verl_class" or name not in _BUILT_IN_SOURCES


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
