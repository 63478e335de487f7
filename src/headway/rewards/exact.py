"""Exact match with the expected answer, after a normalisation that the configuration spells out."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Mapping
from typing import Any

from headway.rewards.function import QuickReward
from headway.rewards.text import expected, extractor

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})


def exact(
    *,
    answer: str = "answer",
    part: str = "all",
    ignore_case: bool = False,
    ignore_space: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> QuickReward:
    """1 where `part` of the text equals the task's `answer` (one of them, where it is a list), else 0.

    Outer white space and the Unicode form never count. `ignore_space` makes any run of white space one blank.
    """
    extract = extractor(part)

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFKC", text).strip()
        text = text.casefold() if ignore_case else text
        text = text.translate(_NO_PUNCTUATION).strip() if ignore_punctuation else text
        words = text.split()
        if ignore_articles:
            words = [word for word in words if word.casefold() not in _ARTICLES]
        return " ".join(words) if ignore_space or ignore_articles else text

    def judge(text: str, data: Mapping[str, Any]) -> float:
        gold, said = expected(data, answer), extract(text)
        golds = gold if isinstance(gold, list | tuple) else [gold]
        return float(said is not None and normal(said) in {normal(_text(one)) for one in golds})

    return QuickReward("exact", judge)


def _text(value: Any) -> str:
    """JSON's values as a model would write them."""
    return value if isinstance(value, str) else str(value)
