"""Questions with tools: what is right is worth 1, what cannot be read costs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from headway.environments.text_environment import Reply
from headway.environments.tools.tool_environment import ToolEnvironment, score_exact_answer
from headway.errors import ConfigError, EnvironmentFailed


def play(world: ToolEnvironment, *actions: str, seed: int = 0, **data: object) -> list[Reply]:
    async def scene() -> list[Reply]:
        try:
            await world.reset(seed, data)
            return [await world.step(action) for action in actions]
        finally:
            await world.close()

    return asyncio.run(scene())


def begin(world: ToolEnvironment, seed: int) -> str:
    async def scene() -> str:
        return await world.reset(seed, {})

    return asyncio.run(scene())


def calculator(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<think>I need it.</think><tool_call>{json.dumps(call)}</tool_call>"


def test_a_policy_that_uses_its_tool_is_right_for_every_seed() -> None:
    async def scene() -> None:
        world = ToolEnvironment()
        for seed in range(20):
            question = await world.reset(seed, {})
            expression = re.search(r"What is (.*)\?", question)
            assert expression
            answer = await world.step(calculator(expression[1]))
            assert not answer.done and answer.reward == 0.0
            value = answer.text.split("\n")[1]
            end = await world.step(f"It is <answer>{value}</answer>.")
            assert end.done and end.success and end.reward == 1.0
            assert end.info == {"malformed": 0, "refused": 0, "called": 1}

    asyncio.run(scene())


def test_a_wrong_answer_is_worth_nothing() -> None:
    (end,) = play(ToolEnvironment(), "<answer>1</answer>")
    assert end.done and end.reward == 0.0 and end.success is False


def test_malformed_calls_cost_and_are_counted_and_refused_ones_do_not_cost() -> None:
    replies = play(
        ToolEnvironment(malformed_penalty=0.25),
        "<tool_call>{</tool_call><tool_call>{</tool_call>",
        calculator("1 / 0"),
        '{"name": "abacus", "arguments": {}}',
        "7",
        question="3 + 4?",
        answer=7,
    )
    assert [reply.reward for reply in replies] == [-0.5, 0.0, -0.25, 1.0]
    assert [reply.valid for reply in replies] == [False, True, False, True]
    assert [reply.done for reply in replies] == [False, False, False, True]
    assert replies[-1].info == {"malformed": 3, "refused": 1, "called": 0}


def test_the_policy_is_told_its_tools_once() -> None:
    world = ToolEnvironment()
    assert '"name": "calculator"' in world.instructions and "<tool_call>" in world.instructions
    assert "calculator" not in begin(world, 0)


def test_the_seed_decides_the_question(tmp_path: Path) -> None:
    assert [begin(ToolEnvironment(), seed) for seed in range(9)] == [
        begin(ToolEnvironment(), seed) for seed in range(9)
    ]
    assert begin(ToolEnvironment(), 0) != begin(ToolEnvironment(), 1)
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) for n in range(5)))
    world = ToolEnvironment(questions=str(path))
    assert {begin(world, seed) for seed in range(40)} == {f"q{n}" for n in range(5)}


@pytest.mark.parametrize(
    ("said", "wanted", "is_right"),
    [
        ("7.0", 7, True), ("1,234", "1234", True), ("$5", 5, True), ("1/2", 0.5, True), ("the LIMA.", "the lima", True),
        ("Lima", ["Quito", "lima"], True), ("7.1", 7, False), ("", "x", False), ("Lima Quito", "Lima", False),
        ("1e999999", "1", False), ("nan", "nan", True), ("1/0", 0, False),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers_or_words(said: str, wanted: object, is_right: bool) -> None:
    assert score_exact_answer(said, {"answer": wanted}) == float(is_right)


def generous(answer: str, data: object) -> float:
    return 0.5


def test_a_judge_of_ones_own_decides() -> None:
    world = ToolEnvironment(judge="tests.environment_library.test_tool_environment:generous")
    (end,) = play(world, "whatever", question="Why?")
    assert end.reward == 0.5 and not end.success


def test_a_question_without_an_answer_loses_the_episode() -> None:
    with pytest.raises(EnvironmentFailed, match="no answer"):
        play(ToolEnvironment(), question="Why?")


def test_bad_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}')
    for options in (
        {"max_steps": 0},
        {"judge": "json:nothing"},
        {"judge": "nothing"},
        {"questions": "no/such/file"},
        {"questions": str(tmp_path / "bad.jsonl")},
        {"tools": ["hammer"]},
    ):
        with pytest.raises(ConfigError):
            ToolEnvironment(**options)  # type: ignore[arg-type]
