"""Attempts to follow instructions on form without saying anything, or to break them unseen."""

from __future__ import annotations

from typing import Any

import pytest

from headway.rewards.ifeval_reward import make_ifeval_reward
from tests.rewards.factory import judged

ATTACKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "words of underscores": ("length_constraints:number_words", {"num_words": 3}, "_ _ _ a"),
    "words of punctuation": ("length_constraints:number_words", {"num_words": 3}, "- - - a"),
    "sentences of dots": ("length_constraints:number_sentences", {"num_sentences": 3}, "a. . . ."),
    "sentences of question marks": ("length_constraints:number_sentences", {"num_sentences": 3}, "a ? ? ?"),
    "paragraphs of invisible characters": (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "a *** \u200b\u2060",
    ),
    "paragraphs of dots": ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** ..."),
    "a keyword inside a word": ("keywords:existence", {"keywords": ["cat"]}, "concatenate"),
    "a forbidden word with an invisible joint": (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat"]},
        "the c\u200bat",
    ),
    "a forbidden word in full width": ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "the ｃａｔ"),
    "an arabic comma": ("punctuation:no_comma", {}, "a، b"),
    "a small comma": ("punctuation:no_comma", {}, "a﹐ b"),
    "all of the allowed answers": (
        "detectable_format:constrained_response",
        {},
        "My answer is yes. My answer is no. My answer is maybe.",
    ),
    "placeholders of blanks": ("detectable_content:number_placeholders", {"num_placeholders": 2}, "a [ ] [.]"),
    "one section again and again": (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 1 b",
    ),
    "sections without content": (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nSECTION 2\n",
    ),
    "highlights of dots": ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "a *.* *-*"),
    "a title of dashes": ("detectable_format:title", {}, "<<-->> a"),
    "a number as JSON": ("detectable_format:json_format", {}, "0"),
    "a constant that JSON has not": ("detectable_format:json_format", {}, "[NaN]"),
    "a quotation of nothing": ("startend:quotation", {}, '"."'),
    "two responses that differ in a dot": ("combination:two_responses", {}, "Yes. ****** yes"),
    "two responses of which one is invisible": ("combination:two_responses", {}, "yes ****** \u200b"),
    "the prompt and nothing else": ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. ..."),
    "a postscript of nothing": ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. ."),
    "silence": ("punctuation:no_comma", {}, "\u200b"),
    "blank letters": ("punctuation:no_comma", {}, "\u3164\u2800"),
    "punctuation alone": ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "..."),
}


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
def test_ifeval_is_not_won_by(attack: str, loose: bool) -> None:
    name, given, text = ATTACKS[attack]
    reward = make_ifeval_reward(loose=loose)
    assert judged(reward, text, instruction_id_list=[name], kwargs=[given]) == 0


def test_a_share_is_not_won_by_silence() -> None:
    names = ["punctuation:no_comma", "keywords:forbidden_words"]
    given: list[dict[str, Any]] = [{}, {"forbidden_words": ["cat"]}]
    assert judged(make_ifeval_reward(partial=True), " \u200b ", instruction_id_list=names, kwargs=given) == 0
