"""Checks of form under IFEval's names: for each, texts that follow and texts that do not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.ifeval_reward import IFEVAL_CHECKS, make_ifeval_reward
from tests.rewards.factory import judged

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["a b c", "it's a well-known one"],
        ["a b", "-- a b --"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a b c"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "exactly"},
        ["One. Two!", "Dr. Who paid 3.50. Yes", "What?! Oh..."],
        ["One", "a. b. c."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a *** b", "a\n***\nb\n***"],
        ["a", "a *** *** b"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "hello"},
        ["a\n\nHello there", 'a\n \n"Hello," he said'],
        ["hello", "a\n\nb", "a\n\nhello\n\nc"],
    ),
    ("keywords:existence", {"keywords": ["cat", "c++"]}, ["The Cat knows C++."], ["category c++", "cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["category", ":"], ["a CAT!"]),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, ["ha, Ha"], ["haha", "ha"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "less than"}, ["e"], ["eE"]),
    ("change_case:english_capital", {}, ["HELLO 1!"], ["HELLo", "123"]),
    ("change_case:english_lowercase", {}, ["hello 1!"], ["Hello", "123"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at most"},
        ["A bc DE"],
        ["A B C"],
    ),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b", "a， b"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "• a\n* b"],
        ["* a", "**a**\n**b**", "---\n---", "* a\n* b\n* c"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b**", "*a* *b* *c*"],
        ["*a*", "** **  * *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1", "SECTION A SECTION B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', " [] "],
        ["{'a': 1}", "Sure: {}", '{"a": 1', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<Poem>>\nx"], ["<Poem>", "<<>>", "<< >>"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["yes", "My answer is perhaps."]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b]"], ["[a] []", "[a"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["x\nP.S. y", "x\np. s. y", "x\nPS: y"],
        ["x", "x\nP.S.", "x P.S. y", "psalm"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP.P.S y"], ["x\nP.S. y"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["x the END.\n", '"x The end."'], ["The end. x"]),
    ("startend:start_checker", {"start_phrase": "Once"}, [" once upon"], ["upon once"]),
    ("startend:quotation", {}, ['"a"', " “a” "], ["a", '"', '"a', "'a'"]),
    (
        "combination:two_responses",
        {},
        ["a ****** b", "******a******b"],
        ["a", "a ****** a", "a ****** b ****** c", "a ******"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi! Say hi."]),
    ("detectable_format:choice", {"options": ["yes", "no"]}, ["Yes", " no "], ["yes or no", "maybe", ""]),
]


@pytest.mark.parametrize(("name", "given", "following", "failing"), CASES, ids=[case[0] for case in CASES])
def test_each_check(name: str, given: dict[str, Any], following: list[str], failing: list[str]) -> None:
    for text in following:
        assert IFEVAL_CHECKS[name](text, **given), text
    for text in failing:
        assert not IFEVAL_CHECKS[name](text, **given), text


def test_every_check_has_a_case() -> None:
    assert IFEVAL_CHECKS.keys() == {case[0] for case in CASES}


def test_no_check_takes_long_on_any_text() -> None:
    texts = ["a" * 50_000, "*" * 50_000, "a." * 25_000, "[" * 50_000, " " * 50_000, "P. " * 15_000, "\n" * 50_000]
    texts += ["```json\n" * 6000, "<<" * 25_000, "* " * 25_000, "'a-" * 15_000, "SECTION" + " " * 50_000]
    for name, given, _, _ in CASES:
        for text in texts:
            started = time.process_time()
            IFEVAL_CHECKS[name](text, **given)
            assert time.process_time() - started < 2, (name, text[:10])


DATA: dict[str, Any] = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [{"keywords": None}, {"keywords": ["cat"], "num_words": None}],
}


def test_all_instructions_of_a_task_must_be_followed() -> None:
    assert judged(make_ifeval_reward(), "a cat", **DATA) == 1
    assert judged(make_ifeval_reward(), "a, cat", **DATA) == 0
    assert judged(make_ifeval_reward(partial=True), "a, cat", **DATA) == 0.5
    assert judged(make_ifeval_reward(), "  ", **DATA) == 0, "silence follows no instruction"


def test_loosely_a_preface_and_asterisks_are_forgiven() -> None:
    text = "Sure, here it is:\n*a cat*"
    assert judged(make_ifeval_reward(), text, **DATA) == 0
    assert judged(make_ifeval_reward(loose=True), text, **DATA) == 1


def test_checks_may_come_from_the_configuration() -> None:
    reward = make_ifeval_reward(
        checks=[{"id": "length_constraints:number_words", "num_words": 2, "relation": "at most"}]
    )
    assert judged(reward, "two words") == 1
    assert judged(reward, "a cat ran") == 0
    assert judged(reward, "a cat", **DATA) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["language:response_language"]}, "no check"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "keywords"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}, {}]}, "1 instructions and 2 sets"),
        (
            {
                "instruction_id_list": ["keywords:frequency"],
                "kwargs": [{"keyword": "", "frequency": 1, "relation": "~"}],
            },
            "at least",
        ),
        ({}, "no instruction"),
    ],
)
def test_a_task_that_cannot_be_checked_has_no_verdict(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        judged(make_ifeval_reward(), "text", **data)


@pytest.mark.parametrize(
    "entry", [{"id": "nothing"}, {}, {"id": "punctuation:no_comma", "x": 1}, {"id": "keywords:existence"}]
)
def test_wrong_checks_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="checks"):
        make_ifeval_reward(checks=[entry])
