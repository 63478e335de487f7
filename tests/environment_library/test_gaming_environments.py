"""Attempts to win the rewards of built-in environments without solving the task."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headway.environments.environment_registry import make_environment
from headway.environments.library.repair import RepairEnvironment
from headway.environments.library.shop import ShopEnvironment
from headway.environments.library.sokoban import Sokoban
from headway.environments.tools.base import ToolRefused
from headway.environments.tools.calculator_tool import calculate
from headway.environments.tools.tool_environment import ToolEnvironment
from tests.environment_library.test_repair import call
from tests.sandbox.factory import require_sandbox

ANSWERS: dict[str, tuple[Any, str]] = {
    "candidates": ("42", "<answer>41, 42, 43</answer>"),
    "alternatives": ("42", "<answer>41 or 42</answer>"),
    "a sentence around the answer": ("Paris", "<answer>Paris or London</answer>"),
    "a second tag": ("42", "<answer>42</answer> or <answer>43</answer>"),
    "arabic digits": ("42", "<answer>٤٢</answer>"),
    "underscores in a number": ("42", "<answer>4_2</answer>"),
    "a sign that is dropped": ("-5 m", "<answer>5 m</answer>"),
    "a decimal point that is dropped": ("1.5 m", "<answer>1 5 m</answer>"),
    "silence for punctuation": ("?!", "<answer></answer>"),
    "other punctuation": ("?!", "<answer>...</answer>"),
    "the question": ("42", "What is 6 * 7?"),
    "an expression": ("42", "<answer>6*7</answer>"),
    "a huge number": ("42", f"<answer>{'9' * 5000}</answer>"),
    "a box of candidates": ("42", r"\boxed{41, 42}"),
    "not a number": ("42", "<answer>nan</answer>"),
    "infinity": ("42", "<answer>inf</answer>"),
    "a division by zero": ("42", "<answer>42/0</answer>"),
}


def answer_tool_question(expected: Any, text: str) -> float:
    async def scene() -> float:
        world = ToolEnvironment()
        await world.reset(0, {"question": "What is 6 * 7?", "answer": expected})
        return (await world.step(text)).reward

    return asyncio.run(scene())


@pytest.mark.parametrize("attack", ANSWERS)
def test_a_question_with_tools_is_not_won_by(attack: str) -> None:
    assert answer_tool_question(*ANSWERS[attack]) == 0


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("42", "<answer>42.0</answer>"),
        ("1,234", "<answer>1234</answer>"),
        ("The Hague", "<answer>the hague.</answer>"),
        ("-5 m", "<answer>-5 m</answer>"),
        (["NY", "New York"], "<answer>New York!</answer>"),
        ("3/4", "<answer>0.75</answer>"),
    ],
)
def test_a_question_with_tools_is_still_won_by_its_answer(expected: Any, text: str) -> None:
    assert answer_tool_question(expected, text) == 1


BOMBS = [
    "9**9**9",
    "round(5, -10**9)",
    "round(5, 10**9)",
    "2**3999 * 2**3999",
    "lcm(10**1000, 10**1000 + 1)",
    "1e308 * 10",
]


@pytest.mark.parametrize(
    "expression", [*BOMBS, "(" * 400, "__import__('os')", "'a' * 10**9", "[0] * 9", "1 if 1 else 2"]
)
def test_the_calculator_refuses_at_once(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolRefused):
        calculate(expression)
    assert time.process_time() - started < 0.5
    assert calculate("round(7 / 3, 2)") == "2.33"


RETURNS_FOR_RAISES = (
    "for f in */*.py; do case $f in tests/*) ;; *) printf '"
    'def __getattr__(n):\\n return lambda *a: {"raises": "ValueError"}\\n'
    "' > $f;; esac; done"
)
CHEATS = {
    "a value that looks like an exception": RETURNS_FOR_RAISES,
    "the answers of the package": (
        "python3 -c 'import headway.environments.library.repair_repository' && echo found; "
        "find / -name repair_modules.yaml 2>/dev/null | xargs cat"
    ),
    "a report on the channel of the judge": (
        "for f in */*.py; do printf 'import os\\nfor fd in range(3, 20):\\n"
        ' try: os.write(fd, b"[[\\\\"returned\\\\", 1]]")\\n except OSError: pass\\nos._exit(0)\\n\' > $f; done'
    ),
    "a program that outlives the command": "(sleep 1; rm -rf tests; echo done > README.md) & exit 0",
    "the judge's input": "for f in */*.py; do printf 'import sys\\nprint(sys.stdin.read())\\n' > $f; done",
}


@pytest.mark.parametrize("attack", CHEATS)
def test_a_repair_is_not_won_by(attack: str) -> None:
    require_sandbox()

    async def scene() -> None:
        world = RepairEnvironment(modules=1)
        await world.reset(2, {})
        reply = await world.step(call("shell", command=CHEATS[attack]))
        assert "source: " not in reply.text and "found" not in reply.text
        reply = await world.step(call("submit"))
        assert reply.done and reply.reward == 0.0 and not reply.success

    asyncio.run(scene())


def test_pushing_a_box_to_and_fro_earns_nothing() -> None:
    world = Sokoban(max_steps=100)
    world.reset(0, {"room": "#######\n#_____#\n#P_XO_#\n#X___O#\n#######"})
    world.step("Right")
    start = world.room
    moves = ["Right", "Right", "Up", "Right", "Right", "Down", "Left", "Left", "Down", "Left", "Up"]
    total = sum(world.step(move).reward for move in moves)
    assert world.room.boxes_on_targets <= start.boxes_on_targets + 1
    assert total <= world.room.boxes_on_targets - start.boxes_on_targets


@pytest.mark.parametrize("said", ["Up Down Left Right", "<answer>Up or Right</answer>", "", "Uppercut", "１"])
def test_a_move_that_is_not_one_move_moves_nothing(said: str) -> None:
    for name, options in (("sokoban", {}), ("frozen_lake", {"is_slippery": False, "progress": 1.0})):
        world: Any = make_environment(name, **options)
        world.reset(3, {})
        reply = world.step(said)
        assert not reply.valid and reply.reward <= 0


def test_walking_to_and_fro_on_the_lake_earns_nothing() -> None:
    world: Any = make_environment("frozen_lake", is_slippery=False, progress=1.0, max_steps=100)
    world.reset(0, {"map": ["SFF", "FFF", "FFG"]})
    assert sum(world.step(move).reward for move in ["Right", "Left"] * 20) == pytest.approx(0)


def test_a_shop_does_not_pay_for_options_alone_or_twice() -> None:
    shop = ShopEnvironment(products=50)
    shop.reset(1, {})
    assert shop.step("<answer>click[buy now]</answer>").reward == 0, "nothing was chosen yet"
    wanted = shop.goal.product
    shop.step(f"<answer>search[{wanted.title}]</answer>")
    shop.step(f"<answer>click[{wanted.code}]</answer>")
    for choice in [choice for choices in wanted.options.values() for choice in choices]:
        assert shop.step(f"<answer>click[{choice}]</answer>").reward == 0
    bought = shop.step("<answer>click[buy now] click[buy now]</answer>")
    assert bought.done and bought.reward <= 1


PUZZLE_ATTACKS = ["__import__('os').abort()", "9**9**9**9", "[0] * 10**12", "().__class__", "exec('x = 1')"]


@pytest.mark.parametrize("said", PUZZLE_ATTACKS)
@pytest.mark.parametrize("task", ["countdown", "binary_matrix", "simple_integration"])
def test_a_puzzle_runs_no_code_of_its_answers(task: str, said: str) -> None:
    pytest.importorskip("reasoning_gym")
    world: Any = make_environment("reasoning_gym", task=task)
    world.reset(1, {})
    started = time.process_time()
    reply = world.step(said)
    assert reply.reward <= 0.05 and not reply.success and time.process_time() - started < 2
