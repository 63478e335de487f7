"""Numbers in texts, compared as numbers: `1,234.50` is 1234.5, `3/4` and `\\frac{3}{4}` are 0.75, `#### 42` is 42."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, Literal

from headway.errors import ConfigError, RewardError
from headway.rewards.function import QuickReward
from headway.rewards.text import expected, extractor

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


def numeric(
    *,
    answer: str = "answer",
    part: str = "all",
    take: Literal["last", "first", "only"] = "last",
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
) -> QuickReward:
    """1 where the number in `part` of the text is the task's `answer`, else 0.

    `take`: the last number (lenient), the first, or only a text that is nothing but a number (strict).
    """
    extract = extractor(part)
    if take not in ("last", "first", "only"):
        raise ConfigError("must be last, first or only", key="take", value=take)
    for key, value in (("tolerance", tolerance), ("relative_tolerance", relative_tolerance)):
        if not value >= 0:
            raise ConfigError("must be at least 0", key=key, value=value)

    def judge(text: str, data: Mapping[str, Any]) -> float:
        gold, said = gold_number(expected(data, answer)), extract(text)
        found = None if said is None else number_in(said, take)
        if found is None:
            return 0.0
        with localcontext(prec=100) as context:
            context.clear_traps()
            room = max(Decimal(tolerance), Decimal(relative_tolerance) * abs(gold))
            return float(abs(found - gold) <= room)

    return QuickReward("numeric", judge)


def number_in(text: str, take: str = "last") -> Decimal | None:
    """The number that `text` names, or `None`."""
    for written, plain in _PLAIN:
        text = written.sub(plain, text)
    if take == "only":
        match = _ONLY.fullmatch(text.strip())
        return _value(match.group(1)) if match else None
    found = _NUMBER.findall(text)
    return _value(found[-1 if take == "last" else 0]) if found else None


def gold_number(value: Any) -> Decimal:
    """The task's own answer as a number. Raises `RewardError` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RewardError(f"the task's answer {value!r} is not a number")
    number = number_in(value if isinstance(value, str) else repr(value))
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
