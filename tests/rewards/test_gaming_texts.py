"""Attempts to win the text rewards without the answer: each is worth nothing, and its honest neighbour still wins."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headway.rewards.text_rewards import (
    make_exact_reward,
    make_format_reward,
    make_numeric_reward,
    make_regex_reward,
    parse_number,
)
from tests.rewards.factory import judge_all, judged

EXACT: dict[str, tuple[dict[str, Any], str, Any]] = {
    "superscript read as a digit": ({}, "4²", "42"),
    "circled digits": ({}, "④②", "42"),
    "digits of another script": ({}, "٤٢", "42"),
    "several candidates": ({}, "Paris, London, Rome", "Paris"),
    "all accepted answers at once": ({"ignore_punctuation": True}, "Paris Lutetia", ["Paris", "Lutetia"]),
    "the answer inside a sentence": ({"ignore_case": True}, "It is Paris or not", "Paris"),
    "zero-width characters around another word": ({}, "Lon\u200bdon", "Paris"),
    "decimal point ignored as punctuation": ({"ignore_punctuation": True}, "15", "1.5"),
    "sign ignored as punctuation": ({"ignore_punctuation": True}, "5", "-5"),
    "range ignored as punctuation": ({"ignore_punctuation": True}, "1012", "10-12"),
    "silence where only punctuation is wanted": ({"ignore_punctuation": True}, "", "!!"),
    "other punctuation where only punctuation is wanted": ({"ignore_punctuation": True}, "...", "!!"),
    "silence where only an article is wanted": ({"ignore_articles": True}, "", "The"),
    "candidates in several tags": ({"part": "tag:answer"}, "<answer>A</answer><answer>B</answer>", "A"),
    "the answer in an open tag": ({"part": "tag:answer"}, "<answer>A", "A"),
    "a tag inside the tag": ({"part": "tag:answer"}, "<answer>B <answer>C</answer> A</answer>", "A"),
    "a list of lines": ({"part": "last_line"}, "A\nB\nC", "A"),
}


@pytest.mark.parametrize("attack", EXACT)
def test_exact_is_not_won_by(attack: str) -> None:
    options, text, answer = EXACT[attack]
    assert judged(make_exact_reward(**options), text, answer=answer) == 0


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        ({}, "４２", "42"),
        ({"ignore_punctuation": True}, "U.S.A!", "USA"),
        ({"ignore_punctuation": True}, "it is -5.", "it is -5"),
        ({"ignore_punctuation": True}, "1,234", "1234"),
        ({}, "x²", "x²"),
    ],
)
def test_exact_is_still_won_by_the_answer(options: dict[str, Any], text: str, answer: str) -> None:
    assert judged(make_exact_reward(**options), text, answer=answer) == 1


BOXED, TAGGED = {"part": "boxed"}, {"part": "tag:answer"}
NUMERIC: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a box of candidates": (BOXED, r"\boxed{41, 42}", 42),
    "a box of alternatives": (BOXED, r"\boxed{41 \text{ or } 42}", 42),
    "a box with a range": (BOXED, r"\boxed{41-42}", 42),
    "a box with a tolerance of its own": (BOXED, r"\boxed{42 \pm 42}", 42),
    "a box with lines": (BOXED, r"\boxed{41\\42}", 42),
    "a tag of candidates": (TAGGED, "<answer>41 or 42</answer>", 42),
    "a tag with a range": (TAGGED, "<answer>41 to 42</answer>", 42),
    "the first of two candidates": ({"take": "first", **TAGGED}, "<answer>42; 43</answer>", 42),
    "candidates after the mark": ({"part": "after:####"}, "#### 40 41 42", 42),
    "a box in a box": (BOXED, r"\boxed{42 \boxed{43}}", 42),
    "an earlier box": (BOXED, r"\boxed{42} no, \boxed{43}", 42),
    "arabic digits": ({}, "٤٢", 42),
    "full-width digits": ({}, "４２", 42),
    "digits of another script after the number": ({}, "42 or ٤٣", 42),
    "a superscript behind the number": ({}, "4²", 4),
    "the exponent of a power": ({}, "2^{42}", 42),
    "the base of a power": ({"take": "first"}, "42^2", 42),
    "the exponent of a Python power": ({}, "2**42", 42),
    "infinity": ({}, "Infinity", 42),
    "not a number": ({}, "NaN", 42),
    "a number beyond all limits": ({"relative_tolerance": 1.0}, "1e99999", 42),
    "a division by zero": ({"tolerance": 1e9}, "1/0", 42),
    "percent for a fraction": ({}, "42%", 0.42),
    "fraction for a percentage": ({}, "0.42", "42%"),
    "strictly: candidates": ({"take": "only"}, "41 42", 42),
    "strictly: another unit of text": ({"take": "only"}, "42 or so", 42),
    "a formatted zero for nothing": ({}, "-", 0),
    "the digits apart": ({}, "4 2", 42),
    "the digits with invisible characters between": ({}, "4\u200b2", 42),
    "an underscore as a thousands separator": ({"take": "only"}, "4_2", 42),
}


@pytest.mark.parametrize("attack", NUMERIC)
def test_numeric_is_not_won_by(attack: str) -> None:
    options, text, answer = NUMERIC[attack]
    assert judged(make_numeric_reward(**options), text, answer=answer) == 0


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        (BOXED, r"\boxed{1,234}", 1234),
        (BOXED, r"\boxed{x = 42}", 42),
        (BOXED, r"\boxed{\frac{3}{4}}", 0.75),
        (BOXED, r"\boxed{42\,\text{cm}^2}", 42),
        (TAGGED, "<answer>6 * 7 = 42</answer>", 42),
        (TAGGED, "<answer>50 - 8 = 42</answer>", 42),
        (TAGGED, "<answer>-$5</answer>", -5),
        ({"part": "after:####"}, "so 6 and 7 give\n#### 42 eggs", 42),
        ({}, "**42**", 42),
    ],
)
def test_numeric_is_still_won_by_the_answer(options: dict[str, Any], text: str, answer: float) -> None:
    assert judged(make_numeric_reward(**options), text, answer=answer) == 1


def test_texts_made_to_be_slow_are_not() -> None:
    started = time.process_time()
    for text in ("1 " * 50_000, "9" * 100_000, r"\frac{" * 20_000, "1^" * 50_000, "1or" * 30_000, "1" + " " * 100_000):
        parse_number(text)
        judged(make_numeric_reward(part="tag:a"), f"<a>{text}</a>", answer=1)
    assert time.process_time() - started < 5


REGEX: dict[str, tuple[dict[str, Any], str, str]] = {
    "candidates before the last match": ({"pattern": r"answer: (\w+)", "group": 1}, "answer: a answer: b", "a"),
    "candidates in one match": ({"pattern": r"answer: (.+)", "group": 1}, "answer: a, b, c", "a"),
    "a full match with more around it": ({"pattern": r"yes|no", "match": "full"}, "yes no", ""),
    "an empty group": ({"pattern": r"answer:(\w*)", "group": 1}, "answer:", "a"),
    "a line of its own in a full match": ({"pattern": "yes", "match": "full"}, "yes\n", ""),
}


@pytest.mark.parametrize("attack", REGEX)
def test_regex_is_not_won_by(attack: str) -> None:
    options, text, answer = REGEX[attack]
    assert judge_all(make_regex_reward(**options), [(text, answer)]) == [0]


FORMAT = {
    "empty tags": "<think></think><answer></answer>",
    "tags with white space": "<think> \n </think><answer>\t</answer>",
    "tags with invisible characters": "<think>\u200b</think><answer>\u2060\ufeff</answer>",
    "tags with dots": "<think>...</think><answer>.</answer>",
    "one empty tag": "<think></think><answer>42</answer>",
    "one tag inside the other": "<think>a<answer>42</answer></think>",
    "tags that cross": "<think>a<answer></think>42</answer>",
    "each tag twice": "<think>a</think><answer>1</answer><think>a</think><answer>2</answer>",
    "another order": "<answer>1</answer><think>a</think>",
    "tags that are never closed": "<think>a<answer>42",
    "upper case": "<THINK>a</THINK><ANSWER>42</ANSWER>",
    "more text outside": "<think>a</think><answer>42</answer> or 43",
}


@pytest.mark.parametrize("attack", FORMAT)
def test_format_is_not_won_by(attack: str) -> None:
    assert judged(make_format_reward(), FORMAT[attack]) == 0


def test_format_is_still_won_by_any_content() -> None:
    for content in ("42", "∅", "日本", "π", "😀"):
        assert judged(make_format_reward(), f"<think>so</think>\n<answer>{content}</answer>") == 1
