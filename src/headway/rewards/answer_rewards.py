"""Exact match with the expected answer, after a normalisation that the configuration spells out."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, Literal

from headway.errors import ConfigError, RewardError
from headway.rewards.answer_extraction import get_expected_answer, make_extractor
from headway.rewards.function_reward import InlineReward

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})


def make_exact_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    ignore_case: bool = False,
    ignore_space: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> InlineReward:
    """1 where `part` of the text equals the task's `answer` (one of them, where it is a list), else 0.

    Outer white space and the Unicode form never count. `ignore_space` makes any run of white space one blank.
    """
    extract = make_extractor(part)

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFKC", text).strip()
        text = text.casefold() if ignore_case else text
        text = text.translate(_NO_PUNCTUATION).strip() if ignore_punctuation else text
        words = text.split()
        if ignore_articles:
            words = [word for word in words if word.casefold() not in _ARTICLES]
        return " ".join(words) if ignore_space or ignore_articles else text

    def judge(text: str, data: Mapping[str, Any]) -> float:
        gold, said = get_expected_answer(data, answer), extract(text)
        golds = gold if isinstance(gold, list | tuple) else [gold]
        return float(said is not None and normal(said) in {normal(_text(one)) for one in golds})

    return InlineReward("exact", judge)


def _text(value: Any) -> str:
    """JSON's values as a model would write them."""
    return value if isinstance(value, str) else str(value)


_NUMBER = re.compile(
    r"(?:(?<![\w.,)\]}])[-+])?"  # a sign, unless something stands before it that makes it an operation
    r"(?:(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?:[eE][-+]?\d+)?"
    r"(?:\s?/\s?\d+)?"
)
_PLAIN = (
    (re.compile("[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)"), ","),
    (re.compile(r"(?<![\d}])\\[dt]?frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"-\s?\\?[$€£](?=\d)"), "-"),
)
"""What LaTeX and accountants write otherwise: separators, fractions, a sign before the currency."""
_ONLY = re.compile(rf"[$€£]?\s?({_NUMBER.pattern})\s?(?:%|\.)?")
_LONGEST = 60
"""Digits and signs of one number. What is longer is no answer, and must not cost time."""
_LARGEST_EXPONENT = 400


def make_numeric_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    take: Literal["last", "first", "only"] = "last",
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
) -> InlineReward:
    """1 where the number in `part` of the text is the task's `answer`, else 0.

    `take`: the last number (lenient), the first, or only a text that is nothing but a number (strict).
    """
    extract = make_extractor(part)
    if take not in ("last", "first", "only"):
        raise ConfigError("must be last, first or only", key="take", value=take)
    for key, value in (("tolerance", tolerance), ("relative_tolerance", relative_tolerance)):
        if not value >= 0:
            raise ConfigError("must be at least 0", key=key, value=value)

    def judge(text: str, data: Mapping[str, Any]) -> float:
        gold, said = parse_expected_number(get_expected_answer(data, answer)), extract(text)
        found = None if said is None else parse_number(said, take)
        if found is None:
            return 0.0
        with localcontext(prec=100) as context:
            context.clear_traps()
            room = max(Decimal(tolerance), Decimal(relative_tolerance) * abs(gold))
            return float(abs(found - gold) <= room)

    return InlineReward("numeric", judge)


def parse_number(text: str, take: str = "last") -> Decimal | None:
    """The number that `text` names, or `None`."""
    for written, plain in _PLAIN:
        text = written.sub(plain, text)
    if take == "only":
        match = _ONLY.fullmatch(text.strip())
        return _value(match.group(1)) if match else None
    found = _NUMBER.findall(text)
    return _value(found[-1 if take == "last" else 0]) if found else None


def parse_expected_number(value: Any) -> Decimal:
    """The task's own answer as a number. Raises `RewardError` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RewardError(f"the task's answer {value!r} is not a number")
    number = parse_number(value if isinstance(value, str) else repr(value))
    if number is None:
        raise RewardError(f"the task's answer {value!r} holds no number")
    return number


def _value(found: str) -> Decimal | None:
    if len(found) > _LONGEST:
        return None
    top, _, bottom = found.replace(",", "").replace(" ", "").partition("/")
    with localcontext(prec=100) as context:
        context.clear_traps()
        value = Decimal(top) / Decimal(bottom) if bottom else Decimal(top)
    sound = value.is_finite() and abs(value.adjusted()) <= _LARGEST_EXPONENT
    return value if sound else None
