"""Tools one by one: calculator, search, Python, functions of one's own, and how calls are read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headway.environments.response_parsing import ParsedToolCall, parse_tool_calls
from headway.environments.tools.base import Tool, ToolRefused, check_tool_arguments, make_function_tool
from headway.environments.tools.calculator_tool import CALCULATOR_TOOL, calculate
from headway.environments.tools.python_tool import make_python_tool
from headway.environments.tools.search_tool import BM25Index, make_search_tool
from headway.environments.tools.toolbox import Toolbox, make_tool_source
from headway.errors import ConfigError, EnvironmentFailed
from tests.sandbox.factory import require_sandbox


def ask(tool: Tool, **arguments: object) -> str:
    async def scene() -> str:
        return await tool.call(arguments)

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("2^10", "1024"),
        ("10 // 3 + 10 % 3", "4"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("6 × 7 − 2", "40"),
        ("round(pi, 2)", "3.14"),
        ("99999999999 * 99999999999", "9999999999800000000001"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1 / 0", "9**9**9", "10**5000", "(-8) ** 0.5", "1e308 * 10", "x", "__import__('os')", "().__class__",
        "open('/etc/passwd')", "[1, 2]", "'a' * 9", "True + 1", "lambda: 1", "round(1, ndigits=2)", "1 if 2 else 3",
        "(" * 300 + "1" + ")" * 300, "9" * 501, "min()", "sqrt(1, 2)", "log(0)", "1;2",
    ],
)  # fmt: skip
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ToolRefused):
        calculate(expression)


def test_the_index_ranks_by_bm25() -> None:
    index = BM25Index(["the cat sat", "the dog sat on the cat", "a bird", "cat cat cat"])
    assert [number for number, _ in index.search("cat", 10)] == [3, 0, 1], "often, then in a short text"
    assert index.search("the BIRD", 10)[0][0] == 2, "rare words weigh more"
    assert index.search("elephant", 10) == [] and BM25Index([]).search("x", 3) == []
    assert len(index.search("cat", 2)) == 2
    (number, score), *_ = index.search("bird", 1)
    # idf = ln(1 + (4 − 1 + 0.5) / 1.5), tf = 2.2 / (1 + 1.2 · (0.25 + 0.75 · 2 / 3.5))
    assert number == 2 and score == pytest.approx(1.2039728 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3.5)))


def test_search_finds_documents_in_files(tmp_path: Path) -> None:
    (tmp_path / "facts.jsonl").write_text(
        '{"title": "Peru", "text": "The capital of Peru is Lima."}\n\n"Oslo is the capital of Norway."\n'
    )
    (tmp_path / "notes.md").write_text("Bees make honey.\n\nWasps do not.\n")
    (tmp_path / "photo.png").write_bytes(b"honey")
    tool = make_search_tool([str(tmp_path)], most=2, longest=20)
    assert ask(tool, query="capital of Norway").startswith("[1] facts\nOslo is the capital …\n\n[2] Peru\n")
    assert ask(tool, query="honey") == "[1] notes\nBees make honey."
    assert ask(tool, query="zebra") == "Nothing found."
    with pytest.raises(ToolRefused):
        ask(tool, query=" ")


def test_files_that_cannot_be_searched_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"a"')
    (tmp_path / "other.jsonl").write_text('{"words": "x"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    for name, why in {
        "bad.jsonl": "line 2",
        "other.jsonl": "none of text",
        "empty.txt": "no document",
        "no": "such",
    }.items():
        with pytest.raises(ConfigError, match=why):
            make_search_tool([str(tmp_path / name)])


def test_python_answers_with_what_is_printed_and_how_it_ended() -> None:
    require_sandbox()
    tool = make_python_tool(timeout_s=1, longest=100)

    async def scene() -> list[str]:
        programs = [
            "print(6 * 7)",
            "1 / 0",
            "import time; print('so far', flush=True); time.sleep(9)",
            "print('x' * 999)",
        ]
        return await asyncio.gather(*(tool.call({"code": code}) for code in programs))

    printed, failed, hung, long = asyncio.run(scene())
    assert printed == "42"
    assert "ZeroDivisionError" in failed and failed.endswith("[exit code 1]")
    assert hung == "so far\n[ended: timeout]"
    assert "899 characters left out" in long and len(long) < 200


def double(number: int, loudly: bool = False) -> str:
    """Twice a number."""
    return f"{2 * number}{'!' if loudly else ''}"


def test_a_function_is_a_tool() -> None:
    tool = make_function_tool(double)
    assert tool.signature["function"]["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "loudly": {"type": "boolean"}},
        "required": ["number"],
    }
    assert ask(tool, number=4, loudly=True) == "8!"
    for arguments in ({}, {"number": "4"}, {"number": True}, {"number": 1, "louder": True}):
        with pytest.raises(ToolRefused):
            check_tool_arguments(tool, arguments)
    with pytest.raises(ConfigError, match="'anything'"):
        make_function_tool(lambda anything: anything)


def test_calls_are_read_in_both_styles() -> None:
    wanted = (ParsedToolCall(name="f", arguments={"x": 1}),)
    one = '{"name": "f", "arguments": {"x": 1}}'
    openai = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    for said in (
        f"<tool_call>\n{one}\n</tool_call>",
        f"<think>Maybe <tool_call>g</tool_call>?</think>So: <tool_call>{one}</tool_call>",
        f"<tool_call>{one}",
        json.dumps({"role": "assistant", "content": None, "tool_calls": [openai]}),
        json.dumps(openai),
        json.dumps([openai]),
        f"```json\n{one}\n```",
        '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>',
    ):
        assert parse_tool_calls(said).calls == wanted, said
    assert parse_tool_calls(f"Two: <tool_call>{one}</tool_call> and <tool_call>{one}</tool_call>").calls == wanted * 2


def test_what_is_no_call_is_an_answer() -> None:
    for said in ("42", "<think>hm</think>42", '{"x": 1}', "[1, 2]", "{1, 2}", "", "The function f(x)"):
        assert not parse_tool_calls(said).calls, said
    assert parse_tool_calls("<think>no</think> 42 ").text == "42"


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>{</tool_call>", "<tool_call></tool_call>", "<tool_call>[1]</tool_call>", "x </tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '{"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}', '{"name": "f", "arguments": {"x": 1}',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_say_why(said: str) -> None:
    (problem,) = parse_tool_calls(said).calls
    assert isinstance(problem, str) and problem


def test_the_toolbox_tells_what_is_malformed_from_what_is_refused() -> None:
    names = ("calculator", "tests.environment_library.test_tools:double")
    box = Toolbox([make_tool_source(name) for name in names], longest=100)

    async def scene() -> None:
        await box.begin()
        calls = [
            ParsedToolCall(name="calculator", arguments={"expression": "2 + 2"}),
            ParsedToolCall(name="double", arguments={"number": 4}),
            ParsedToolCall(name="calculator", arguments={"expression": "1 / 0"}),
            ParsedToolCall(name="calculator", arguments={}),
            ParsedToolCall(name="halve", arguments={}),
            "not valid JSON",
        ]
        answers = await box.call_tools(calls)
        assert answers.counts == {"called": 2, "refused": 1, "malformed": 3}
        assert answers.text.startswith("<tool_response>\n4\n</tool_response>\n<tool_response>\n8\n</tool_response>\n")
        assert "no tool 'halve', only calculator, double" in answers.text
        with pytest.raises(EnvironmentFailed, match="two tools"):
            await Toolbox([make_tool_source("calculator"), make_tool_source("calculator")]).begin()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "asked",
    [
        "calculater",
        {"name": "search", "file": "x"},
        "no.such:module",
        "json:loads2",
        {},
        {"name": 3},
        {"name": "tests.environment_library.test_tools:double", "x": 1},
    ],
)
def test_tools_that_do_not_exist_are_refused(asked: object) -> None:
    with pytest.raises(ConfigError):
        make_tool_source(asked)  # type: ignore[arg-type]


def test_the_calculator_is_described_for_the_policy() -> None:
    assert CALCULATOR_TOOL.signature["function"]["name"] == "calculator"
