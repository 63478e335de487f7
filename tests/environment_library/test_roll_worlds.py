"""Worlds by ROLL's names: questions of data sets, puzzles, the shop, games of GEM; and those that cannot be had."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.environments.environment_registry import find_environment_path, is_built_in, make_environment
from headway.environments.text_environment import Reply, read_traits
from headway.errors import ConfigError, EnvironmentFailed


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def play(world: Any, *actions: str, seed: int = 0, data: dict[str, Any] | None = None) -> tuple[str, list[Reply]]:
    async def scenario() -> tuple[str, list[Reply]]:
        first, replies = world.reset(seed, data or {}), []
        for action in actions:
            reply = world.step(action)
            replies.append(await reply if asyncio.iscoroutine(reply) else reply)
        return str(first), replies

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", ["roll_math", "math:GSM8K", "eval:MATH500"])
def test_a_question_of_mathematics_is_judged_by_value(name: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "What is half of one?", "solution": "0.5"})
    options = {"dataset_name": file, "question_key": "prompt", "answer_key": "solution", "seed": 1, "mode": "train"}
    world = make_environment(name, **options)
    first, (right,) = play(world, "so \\boxed{\\frac{1}{2}}")
    assert first == "What is half of one?" and right.done and right.success and right.reward == 1 and right.valid
    _, (wrong,) = play(world, "\\boxed{2}")
    assert wrong.done and not wrong.success and wrong.reward == 0
    assert not play(world, "0.5")[1][0].valid, "no box"
    assert "\\boxed{}" in read_traits(world).instructions and read_traits(world).max_steps == 1


@pytest.mark.parametrize(
    ("name", "answer"), [("roll_qa", "<answer>the Paris!</answer>"), ("logic:RuleTaker-d0", "\\boxed{Paris}")]
)
def test_a_question_in_words_is_judged_without_case_articles_and_punctuation(
    name: str, answer: str, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"question": "Capital of France?", "answer": ["paris", "Paris, France"]})
    world = make_environment(name, dataset_name=file, split="train")
    assert play(world, answer)[1][0].reward == 1
    assert play(world, answer.replace("Paris", "Rome"))[1][0].reward == 0


def test_the_task_may_bring_the_question_and_the_seed_draws_one_otherwise(tmp_path: Path) -> None:
    rows = [{"problem": f"q{number}", "answer": str(number)} for number in range(20)]
    world = make_environment("roll_math", dataset_name=write_rows(tmp_path / "rows.jsonl", *rows))
    asked = [play(world, seed=seed)[0] for seed in range(30)]
    assert asked == [play(world, seed=seed)[0] for seed in range(30)] and len(set(asked)) > 10
    first, (reply,) = play(world, "\\boxed{7}", data={"problem": "mine", "answer": "7"})
    assert first == "mine" and reply.reward == 1
    with pytest.raises(EnvironmentFailed, match="neither dataset_name nor the task's column 'problem'"):
        play(make_environment("roll_math"))


def test_programs_run_before_the_answer_and_no_more_than_allowed(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"problem": "6 * 7?", "answer": "42"})
    tools = {
        "tool_reward": 0.5,
        "tool_success_reward": 0.25,
        "max_tool_uses": 2,
        "tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 5, "sandbox_type": "none"}}],
    }
    world = make_environment("roll_math", dataset_name=file, tools=tools, max_steps=4)
    program = "```python\nprint(6 * 7)\n```"
    _, (ran, failed, answered) = play(world, program, "<python>1 / 0</python>", f"{program} \\boxed{{42}}")
    assert "Code execution result: 42" in ran.text and ran.reward == 0.75 and not ran.done
    assert "ZeroDivisionError" in failed.text and "No more programs" in failed.text and failed.reward == 0.5
    assert answered.done and answered.reward == 1 and answered.info == {"programs": 2}
    for missing in ({"tool_id": "search"}, {"tool_id": "mcp", "tool_args": {"server_url": "http://localhost"}}):
        with pytest.raises(ConfigError, match="env_type: tools with"):
            make_environment("roll_math", dataset_name=file, tools={"tool_configs": [missing]})


def test_a_program_that_is_asked_for_is_tested(tmp_path: Path) -> None:
    tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    file = write_rows(tmp_path / "rows.jsonl", {"problem": "Add.", "tests": json.dumps(tests)})
    world = make_environment("code:CodeContest", dataset_name=file)
    assert play(world, "```python\nprint(sum(map(int, input().split())))\n```")[1][0].reward == 1
    assert play(world, "```python\nprint(0)\n```")[1][0].reward == 0


def test_a_data_set_without_the_column_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"q": "?", "answer": "1"})
    with pytest.raises(ConfigError, match=r"has no column 'problem'.*here are q, answer"):
        make_environment("roll_math", dataset_name=file)


def test_a_puzzle_is_answered_in_a_box() -> None:
    pytest.importorskip("reasoning_gym")
    world = make_environment("rg:leg_counting", size=500, seed=42)
    first, (wrong, *_) = play(world, "no box")
    assert "legs" in first and not wrong.valid and wrong.reward == 0 and wrong.done
    answer = world._entry["answer"]  # type: ignore[attr-defined]
    assert play(world, f"\\boxed{{{answer}}}")[1][0].success
    with pytest.raises(ConfigError, match="is no task of reasoning-gym, did you mean 'letter_counting'"):
        make_environment("rg:letter_countin")


def test_webshop_is_the_shop_here() -> None:
    world = make_environment("webshop", observation_mode="text", max_steps=5, num_products=20)
    assert "Search box" in play(world)[0] and read_traits(world).max_steps == 5
    with pytest.raises(ConfigError, match="only text can be read"):
        make_environment("webshop", observation_mode="html")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("sokoban_sandbox", "sokoban"),
        ("rock_tb_native_env", "repair"),
        ("openreward_env", "openai_agent"),
        ("deepeyes", "pictures"),
    ],
)
def test_a_world_that_cannot_be_had_is_refused_in_one_line_that_names_another(name: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_environment(name, anything=1)
    assert instead in str(caught.value) and "\n" not in str(caught.value)


def test_worlds_can_be_made_in_worker_processes_and_a_module_of_the_user_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_environment_path("math:GSM8K") == "math:GSM8K" and is_built_in("rg:sokoban")
    mine = ModuleType("game")
    mine.Mine = type("Mine", (), {"reset": lambda *_: "", "step": lambda *_: Reply()})  # type: ignore[attr-defined]
    mine.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("game", None)
    monkeypatch.setitem(sys.modules, "game", mine)
    assert not is_built_in("game:Mine")
    assert type(make_environment("game:Mine")).__name__ == "Mine"


def test_games_need_the_library_of_gem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ConfigError, match=r"needs gem.*pip install '.*gem"):
        make_environment("game:GuessTheNumber-v0", min_number=1)


def test_a_game_of_gem_is_played() -> None:
    pytest.importorskip("gem")
    world = make_environment("game:GuessTheNumber-v0", min_number=1, max_number=4, max_turns=5)
    first, (reply,) = play(world, "\\boxed{9}", seed=3)
    assert "between 1 and 4" in first and "Enter your next guess." in first and not reply.done
    results = [play(world, f"\\boxed{{{number}}}", seed=3)[1][0] for number in range(1, 5)]
    assert [result.success for result in results].count(True) == 1 and read_traits(world).max_steps == 5
    assert read_traits(world).workers > 0
    with pytest.raises(ConfigError, match="is no world of GEM"):
        make_environment("game:NoSuchGame-v0")
