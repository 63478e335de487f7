"""Exact, numeric, pattern and format rewards on texts that like to be misread."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, RewardError
from headway.rewards.base import extract_boxed, final_text, make_extractor
from headway.rewards.text_rewards import (
    make_exact_reward,
    make_format_reward,
    make_numeric_reward,
    make_regex_reward,
    parse_number,
)
from tests.rewards.factory import episode, judge_all, judged

# -- text


def test_the_last_turn_is_what_counts() -> None:
    assert final_text(episode("first", "last")) == "last"
    with pytest.raises(RewardError, match="no turn"):
        final_text(episode())


@pytest.mark.parametrize(
    ("part", "text", "found"),
    [
        ("all", " a\n", " a\n"),
        ("last_line", "a\nb\n\n", "b"),
        ("first_line", "\n a\nb", " a"),
        ("last_line", "", None),
        ("boxed", r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("tag:answer", "<answer>1</answer><answer>2</answer>", "2"),
        ("tag:answer", "</answer><answer>", None),
        ("tag:answer", "<answer>a<answer>b</answer>", "b"),
        ("after:####", "1 #### 2 #### 3", " 3"),
        ("after:####", "3", None),
    ],
)
def test_parts_of_a_text(part: str, text: str, found: str | None) -> None:
    assert make_extractor(part)(text) == found


@pytest.mark.parametrize("part", ["", "box", "tag:", "after:", "All"])
def test_a_part_that_does_not_exist_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="last_line"):
        make_extractor(part)


def test_a_box_with_a_hundred_thousand_braces_costs_nothing() -> None:
    assert extract_boxed("\\boxed{" + "{" * 100_000) is None


# -- exact


@pytest.mark.parametrize(
    ("options", "text", "answer", "value"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({}, "", "", 1),
        ({"ignore_case": True}, "STRASSE", "straße", 1),
        ({"ignore_space": True}, "New\n  York", "New York", 1),
        ({}, "New  York", "New York", 0),
        ({"ignore_punctuation": True}, "Paris.", "Paris", 1),
        ({"ignore_articles": True, "ignore_case": True}, "The answer", "answer", 1),
        ({}, "ﬁ", "fi", 1),
        ({}, "b", ["a", "b"], 1),
        ({}, "42", 42, 1),
        ({"part": "tag:answer"}, "<answer>yes</answer> or no", "yes", 1),
        ({"part": "tag:answer"}, "yes", "yes", 0),
    ],
)
def test_exact(options: dict[str, Any], text: str, answer: Any, value: float) -> None:
    assert judged(make_exact_reward(**options), text, answer=answer) == value


@pytest.mark.parametrize("reward", [make_exact_reward(), make_numeric_reward()])
def test_a_task_without_an_answer_cannot_be_judged(reward: Any) -> None:
    with pytest.raises(RewardError, match="no 'answer' to compare with, only \\['solution'\\]"):
        judged(reward, "42", solution="42")
    with pytest.raises(RewardError, match="no 'answer'"):
        judged(reward, "42", answer=None)


# -- numeric


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("The answer is 42.", 42, 1),
        ("1 + 1 = 2", 2, 1),
        ("5-3", 3, 1),
        ("5 -3", -3, 1),
        ("x=-7", -7, 1),
        ("−7", -7, 1),
        ("it is 1,234,567.50 dollars", 1234567.5, 1),
        ("1, 2, 3", 3, 1),
        ("1,2,3", 3, 1),
        ("12,34", 34, 1),
        ("it is 1,234, as we saw", 1234, 1),
        ("10,000,", 10000, 1),
        ("**1,234,567,**", 1234567, 1),
        ("1,234,5", 5, 1),
        (r"1{,}234", 1234, 1),
        (r"1,\!234", 1234, 1),
        (r"\frac{3}{4}", 0.75, 1),
        (r"4", r"\frac{3}{4}", 0),
        (r"-\dfrac{1}{2}", "-1/2", 1),
        ("-$5", -5, 1),
        (r"10-\$5", 5, 1),
        ("$1,000", "#### 1,000", 1),
        ("so we have 18 eggs.\n#### 18", "9 * 2 = 18\n#### 18", 1),
        ("3/4", 0.75, 1),
        ("1/0", 0, 0),
        ("0.1", 0.1, 1),
        (".5", 0.5, 1),
        ("5.", 5, 1),
        ("1e3", 1000, 1),
        ("1.2.3", 3, 1),
        ("007", 7, 1),
        ("-0", 0, 1),
        ("42 or 43", 42, 0),
        ("no number", 0, 0),
        ("", 0, 0),
        ("9" * 100_000, 9, 0),
        ("1e999999999", 1, 0),
        ("1e400000000/3", 1, 0),
        ("1000001", 1000000, 0),
        ("x2", 2, 1),
        ("it covers 42 cm^2", 42, 1),
        ("٣", 3, 0),
    ],
)
def test_the_last_number_counts(text: str, answer: Any, value: float) -> None:
    assert judged(make_numeric_reward(), text, answer=answer) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 1), (" 42.\n", 1), ("$42", 1), ("42%", 1), ("42.0", 1), ("is 42", 0), ("42 43", 0), ("4 2", 0), ("", 0)],
)
def test_strictly_only_the_number_counts(text: str, value: float) -> None:
    assert judged(make_numeric_reward(take="only"), text, answer=42) == value


def test_tolerances() -> None:
    assert judged(make_numeric_reward(tolerance=0.01), "3.14", answer=3.14159) == 1
    assert judged(make_numeric_reward(tolerance=0.001), "3.14", answer=3.14159) == 0
    assert judged(make_numeric_reward(relative_tolerance=0.01), "1005", answer=1000) == 1
    assert judged(make_numeric_reward(take="first"), "42 and 43", answer=42) == 1
    assert judged(make_numeric_reward(part="after:####"), "42", answer=42) == 0


@pytest.mark.parametrize("answer", ["none", True, [1], {}])
def test_an_answer_that_is_no_number_is_no_verdict(answer: Any) -> None:
    with pytest.raises(RewardError, match="number"):
        judged(make_numeric_reward(), "1", answer=answer)


@given(st.text(alphabet="0123456789.,-+/eE $%x", max_size=60))
def test_any_text_has_a_number_or_none(text: str) -> None:
    for take in ("last", "first", "only"):
        found = parse_number(text, take)
        assert found is None or found.is_finite()


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_numbers_are_found_however_they_are_grouped(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"it is {number:,}.", f"**{number}**", f"\\boxed{{{number}}}"):
        assert parse_number(text) == number, text


def test_long_texts_cost_little() -> None:
    started = time.process_time()
    for text in ("1," * 50_000, "1.1" * 30_000, "-" * 100_000, "1/" * 50_000, "1e" * 50_000, "111," * 30_000):
        parse_number(text)
        parse_number(text, "only")
    assert time.process_time() - started < 2


@pytest.mark.parametrize("wrong", [{"take": "middle"}, {"tolerance": -1}, {"relative_tolerance": float("nan")}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_numeric_reward(**wrong)


# -- regex and format


def test_regex() -> None:
    assert judge_all(make_regex_reward(pattern=r"\d+"), [("a1", None), ("a", None)]) == [1, 0]
    assert judge_all(
        make_regex_reward(pattern="yes", match="full", ignore_case=True), [("YES", None), ("yes!", None)]
    ) == [1, 0]
    last = make_regex_reward(pattern=r"answer: (\w+)", group=1)
    assert judge_all(last, [("answer: a, no, answer: b", "b"), ("answer: b, no, answer: a", "b"), ("b", "b")]) == [
        1,
        0,
        0,
    ]


def test_an_expression_that_explodes_is_no_verdict_and_stalls_nobody() -> None:
    reward = make_regex_reward(pattern=r"(a+)+$", timeout_s=0.3, concurrency=1)
    verdicts = judge_all(reward, [("a" * 40 + "b", None), ("aaa", None), ("a" * 40 + "b", None), ("b", None)])
    assert verdicts[1::2] == [1, 0]
    assert all("no verdict after 0.3 s" in str(verdict) for verdict in verdicts[0::2])


def test_wrong_expressions_are_refused() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        make_regex_reward(pattern="(")
    with pytest.raises(ConfigError, match="no group"):
        make_regex_reward(pattern="a", group=1)


@pytest.mark.parametrize(
    ("text", "strict", "open_"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1, 1),
        ("well <think>a</think><answer>b</answer>", 0, 1),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think>a</think><think>b</think><answer>b</answer>", 0, 0),
        ("<think>a<answer>b</think></answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags(text: str, strict: float, open_: float) -> None:
    assert (judged(make_format_reward(), text), judged(make_format_reward(only=False), text)) == (strict, open_)
