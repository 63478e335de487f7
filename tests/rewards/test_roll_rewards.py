"""Rewards by ROLL's names: its data columns and options have their effect, and neither thinking nor noise earns."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigError, RewardError
from headway.rewards.ifeval_reward import IFEVAL_CHECKS, OPEN_INSTRUCT_CHECKS
from headway.rewards.reward_registry import make_reward, make_run_rewards
from headway.rewards.roll_rewards import read_test_cases, remove_thinking
from headway.rewards.text_rewards import penalise_repetition
from headway.types import Episode, FinishReason, Generation, Task, Turn
from tests.rewards.factory import episode, judged, scored


def test_math_rule_judges_what_follows_the_thinking() -> None:
    reward = make_reward("math_rule", answer="ground_truth")
    assert judged(reward, "<think>maybe \\boxed{3}</think> It is \\boxed{\\frac{1}{2}}.", ground_truth="0.5") == 1
    assert judged(reward, "<think>\\boxed{0.5}</think> It is \\boxed{3}.", ground_truth="0.5") == 0
    assert judged(reward, "a</think>b</think> \\boxed{0.5}", ground_truth="0.5") == 0, "thought twice"
    boxed = make_reward("math_rule", {"reward_type": "verl_boxed"}, answer="ground_truth")
    assert judged(boxed, "so\n\\boxed{0.5}", ground_truth="0.5") == 1
    assert judged(boxed, "\\boxed{0.5}\nor so", ground_truth="0.5") == 0
    with pytest.raises(ConfigError, match="verl_boxed, or nothing"):
        make_reward("math_rule", {"reward_type": "soft"})


def test_remove_thinking() -> None:
    assert remove_thinking("<think>a</think>\n\nb") == "b" and remove_thinking(" b ") == "b"


CHOICES = [
    ("It is \\boxed{B}.", "B", (1.0, 1.0, 1.0)),
    ("\\boxed{A} no, \\boxed{(B) two}", "B. two", (1.0, 1.0, 1.0)),
    ("the answer is B", "B", (1.0, 0.5, -1.0)),
    ("\\boxed{C}", "B", (-1.0, -0.5, -1.0)),
    ("the answer is C", "B", (-1.0, -1.0, -1.0)),
    ("<think>B</think>\nthe answer is C", "B", (-1.0, -1.0, -1.0)),
]


@pytest.mark.parametrize(("text", "truth", "grades"), CHOICES)
def test_a_choice_is_graded(text: str, truth: str, grades: tuple[float, ...]) -> None:
    for grade, wanted in zip(("loose", "soft", "strict"), grades, strict=True):
        reward = make_reward("crossthinkqa", {"reward_type": grade}, answer="ground_truth")
        assert judged(reward, text, ground_truth=truth) == wanted
    is_right = grades[0] > 0
    assert judged(make_reward("general_val", answer="ground_truth"), text, ground_truth=truth) == is_right
    strictly = make_reward("multiple_choice", answer="ground_truth")
    assert judged(strictly, text, ground_truth=truth) == (is_right and grades[2] > 0)


def test_repetition_and_short_answers_cost_in_crossthinkqa() -> None:
    reward = make_reward("crossthinkqa", {"response_length_penalty_coef": 0.4}, answer="ground_truth")

    def score(text: str, tokens: int) -> float:
        turn = Generation(actions=[1] * tokens, logps=[0.0] * tokens, runs=(), finish=FinishReason.STOP, text=text)
        task = Task(position=0, domain="qa", data={"ground_truth": "B"})
        played = Episode(sample_id="0", task=task, turns=(Turn(observation=(), generation=turn),))
        return asyncio.run(reward.score(played)).value

    assert score("\\boxed{B}", 500) == 1.0
    assert score("\\boxed{B}", 50) == pytest.approx(1 - 0.4 * 0.5)
    assert score("\\boxed{B}", 250) == pytest.approx(1 - 0.4 * 0.25)
    assert penalise_repetition("a b c a b c", 0.5) == pytest.approx(0.5 * (1 - 3 / 4))
    assert penalise_repetition("a b", 0.5) == 0


TEST_CASES = [
    ("input", [{"stdin": "1 2\n", "expected_stdout": "3"}], None, [{"input": "1 2\n", "output": "3"}]),
    ("input", [{"stdin": "1\n[2]", "expected_stdout": "3"}], "add", [{"call": "add(1, [2])", "expected": 3}]),
    ("assert", [{"assert_code": "assert add(1, 2) == 3"}], "None", ["assert add(1, 2) == 3"]),
    (
        "pytest",
        [{"assert_code": "from solution import add\n\ndef test_a():\n    x = 1\n    assert add(x, 2) == 3\n"}],
        None,
        ["from solution import add\nx = 1\nassert add(x, 2) == 3"],
    ),
    (
        "check_based",
        [
            {
                "assert_code": "def check(candidate):\n assert candidate(1, 2) == 3\n assert candidate(0, 0) == 0\n",
                "entry_point": "add",
            }
        ],
        None,
        ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    ),
]


@pytest.mark.parametrize(("kind", "cases", "function", "tests"), TEST_CASES)
def test_tests_of_every_kind_are_read(kind: str, cases: list[Any], function: str | None, tests: list[Any]) -> None:
    row = {"case_type": kind, "test_case_function": function}
    assert read_test_cases({**row, "test_cases": cases}) == tests
    assert read_test_cases({**row, "test_cases": json.dumps(cases)}) == tests


def test_tests_that_cannot_be_judged_are_left_out_or_there_is_no_score() -> None:
    raising = "import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        f(-1)\n"
    both = raising + "def test_b():\n    assert f(1) == 2\n"
    assert read_test_cases({"case_type": "pytest", "test_cases": [both]}) == ["import pytest\nassert f(1) == 2"]
    for row in (
        {"case_type": "pytest", "test_cases": [raising]},
        {"case_type": "text", "test_cases": ["assert {response}"]},
        {"case_type": "assert", "test_cases": ["assert ("]},
        {"case_type": "input", "test_cases": [{"stdin": "1"}]},
        {"case_type": "input", "test_cases": 7},
        {"case_type": "input"},
    ):
        with pytest.raises(RewardError):
            read_test_cases(row)


def test_code_sandbox_runs_the_program_after_the_thinking() -> None:
    reward = make_reward("code_sandbox")
    row = {"case_type": "pytest", "test_cases": ["def test_a():\n    assert add(1, 2) == 3"]}
    program = "<think>hm</think>\n```python\ndef add(a, b):\n    return a + b\n```"
    assert judged(reward, program, **row) == 1
    assert judged(reward, program.replace("+", "-"), **row) == 0


CONSTRAINTS = [
    ({"func_name": "verify_keywords", "keyword_list": ["cat"]}, "A cat.", "A dog."),
    ({"func_name": "verify_keyword_frequency", "word": "cat", "N": 2}, "cat, cat", "cat"),
    ({"func_name": "verify_paragraph_count", "N": 2}, "one\n* * *\ntwo", "one"),
    ({"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}, "word " * 22, "word " * 23),
    ({"func_name": "validate_paragraphs", "N": 2, "first_word": "so", "i": 2}, "a\n\nso it is", "so\n\na"),
    ({"func_name": "validate_choice", "options": ["yes", "no"]}, "yes", "perhaps"),
    ({"func_name": "validate_frequency_capital_words", "N": 1, "quantifier": "at most"}, "ONE two", "ONE TWO"),
    ({"func_name": "validate_end", "end_phrase": "Bye."}, "Well. Bye.", "Bye. Well."),
]


@pytest.mark.parametrize(("constraint", "following", "failing"), CONSTRAINTS)
def test_constraints_of_open_instruct(constraint: dict[str, Any], following: str, failing: str) -> None:
    reward = make_reward("ifeval", {"repetition_penalty": 0.0}, answer="ground_truth")
    nulls = {"N": None, "first_word": None, "options": None, **constraint}
    for truth in (json.dumps(nulls), nulls):
        assert judged(reward, f"<think>{failing}</think>\n{following}", ground_truth=truth) == 1
        assert judged(reward, f"<think>{following}</think>\n{failing}", ground_truth=truth) == 0


def test_every_function_of_open_instruct_names_a_check_that_takes_its_parameters() -> None:
    for check, parameters, fixed in OPEN_INSTRUCT_CHECKS.values():
        inspect.signature(IFEVAL_CHECKS[check]).bind("", **dict.fromkeys(parameters.values(), 1), **fixed)


def test_repetition_costs_in_ifeval_and_unknown_constraints_have_no_score() -> None:
    reward = make_reward("ifeval", {"repetition_penalty": 0.5}, answer="ground_truth")
    truth = {"func_name": "validate_no_commas"}
    assert scored(reward, "a b c d", ground_truth=truth).value == 1
    assert scored(reward, "a b c a b c", ground_truth=truth).value == pytest.approx(0.875)
    with pytest.raises(RewardError, match="no check for the constraint"):
        scored(reward, "a", ground_truth={"func_name": "validate_response_language"})


def test_rewards_read_the_columns_of_the_data() -> None:
    data_args = {"prompt": "messages", "answer": "ground_truth"}
    judge = {"judge_model_type": "api", "judge_api_url": "http://localhost:1/v1", "judge_model_name": "m"}
    config = load_config(
        {
            "actor_train": {"data_args": data_args},
            "rewards": {"judged": {"reward_fn": "llm_judge", "reward_args": judge}, "math_rule": {}},
        }
    ).config
    terms: Any = make_run_rewards(config)
    found = {term.name: term.reward for term in terms.terms}
    assert (found["judged"].question, found["judged"].answer) == ("messages", "ground_truth")
    row = {"messages": json.dumps([{"role": "user", "content": "Why?"}]), "ground_truth": "So."}
    fields = found["judged"]._make_fields(episode("Hm.", data=row))
    assert (fields["question"], fields["reference"], fields["answer"]) == ("Why?", "So.", "Hm.")
