"""Rewards on the text of an answer: exact match, equal numbers, a regular expression, tags, and a limit of length.

Numbers are compared as numbers: `1,234.50` is 1234.5, `3/4` and `\\frac{3}{4}` are 0.75, `#### 42` is 42. A power,
digits of another script, or a list of candidates in a marked part of the text is no number.

Regular expressions come from the configuration but meet any text, and some take exponential time on some texts while
holding the interpreter. So they run in worker processes: one that takes too long is a failed reward, not a stalled run.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any, Literal

from headway.errors import ConfigError, RewardError
from headway.rewards.base import get_expected_answer, make_extractor
from headway.rewards.reward_worker_pool import RewardWorkerPool
from headway.rewards.scoring_functions import BuiltInReward
from headway.types import Episode, Score

_PUNCTUATION = re.compile(
    r"(?<=[0-9])[./:^-](?=[0-9])|(?<![0-9A-Za-z)])(?:-(?=\.?[0-9])|\.(?=[0-9]))|"
    rf"(?P<dropped>[{re.escape(string.punctuation)}])"
)
"""Punctuation; what belongs to a number is not dropped, since 1.5 is not 15 and -5 is not 5."""
_BLANK_LETTERS = "\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Letters and symbols that are drawn as nothing."""
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBER = re.compile(
    r"(?:(?<![\w.,)\]}])[-+])?"  # a sign, unless the character before makes it an operation
    r"(?:(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?:[eE][-+]?\d+)?"
    r"(?:\s?/\s?\d+)?"
)
_PLAIN_NOTATIONS = (
    (re.compile("[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)"), ","),
    (re.compile(r"(?<![\d}])\\[dt]?frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"-\s?\\?[$€£](?=\d)"), "-"),
    (re.compile(r"(?<=[A-Za-z}])\^\{?[23]\}?(?![\w^])"), ""),
)
"""Replacements of LaTeX and accounting notation: separators, fractions, a sign before the currency, square units."""
_POWER_BEFORE = re.compile(r"(?:\^\{?|[\w)]\*\*)[-+]?\(?\Z")
_POWER_AFTER = re.compile(r"\s?\^|\*\*[\d(+-]")
_CANDIDATES = re.compile(
    r"[0-9](?:\s|[,;/|&~<>≤≥±…-]|\.\.|or\b|and\b|to\b|\\[,;: &\\]|\\text\{\s?(?:or|and)\s?\}"
    r"|\\(?:pm|q?quad|lor|ldots|dots|le|leq)\b)+[-+]?\$?[0-9]"
)
"""Two numbers with nothing but separators between them."""
_ONLY_NUMBER = re.compile(rf"[$€£]?\s?({_NUMBER.pattern})\s?(?:%|\.)?")
_MAX_NUMBER_CHARACTERS = 60
"""A longer number is not an answer, and parsing it would cost time."""
_MAX_EXPONENT = 400


def make_exact_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    ignore_case: bool = False,
    ignore_space: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> BuiltInReward:
    """Score 1 if `part` of the text equals the task's `answer` (or one of them, if it is a list), else 0.

    Outer white space and the Unicode form never count. `ignore_space` makes any run of white space one blank.
    """
    extract = make_extractor(part)

    def normalise(text: str) -> str:
        raw = normalise_unicode(text).strip()
        text = raw.casefold() if ignore_case else raw
        if ignore_punctuation:
            text = _PUNCTUATION.sub(lambda found: "" if found["dropped"] else found[0], text).strip()
        words = text.split()
        if ignore_articles:
            words = [word for word in words if word.casefold() not in _ARTICLES]
        text = " ".join(words) if ignore_space or ignore_articles else text
        return text or raw  # silence is no answer of which nothing is left

    def score(text: str, data: Mapping[str, Any]) -> float:
        expected, found = get_expected_answer(data, answer), extract(text)
        choices = expected if isinstance(expected, list | tuple) else [expected]
        return float(found is not None and normalise(found) in {normalise(str(choice)) for choice in choices})

    return BuiltInReward("exact", score)


def normalise_unicode(text: str) -> str:
    """Return one form of characters that look alike; a superscript is no digit, so `4²` does not become 42."""
    if text.isascii():
        return text
    parts = (one if unicodedata.category(one) == "No" else unicodedata.normalize("NFKC", one) for one in text)
    return unicodedata.normalize("NFC", "".join(parts))


def make_numeric_reward(
    *,
    answer: str = "answer",
    part: str = "all",
    take: Literal["last", "first", "only"] = "last",
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
) -> BuiltInReward:
    """Score 1 if the number in `part` of the text is the task's `answer`, else 0.

    `take`: the last number (lenient), the first, or only a text that is nothing but a number (strict). A marked part
    (`boxed`, `tag:`, `after:`) that lists several candidates scores 0.
    """
    extract = make_extractor(part)
    is_marked = part == "boxed" or ":" in part
    if take not in ("last", "first", "only"):
        raise ConfigError("must be last, first or only", key="take", value=take)
    for key, value in (("tolerance", tolerance), ("relative_tolerance", relative_tolerance)):
        if not value >= 0:
            raise ConfigError("must be at least 0", key=key, value=value)

    def score(text: str, data: Mapping[str, Any]) -> float:
        expected, extracted = parse_expected_number(get_expected_answer(data, answer)), extract(text)
        if extracted is None or (is_marked and lists_candidates(extracted, take)):
            return 0.0
        found = parse_number(extracted, take)
        if found is None:
            return 0.0
        with localcontext(prec=100) as context:
            context.clear_traps()
            allowed = max(Decimal(tolerance), Decimal(relative_tolerance) * abs(expected))
            return float(abs(found - expected) <= allowed)

    return BuiltInReward("numeric", score)


def parse_number(text: str, take: str = "last") -> Decimal | None:
    """Return the number that `text` names, or `None`."""
    for notation, plain in _PLAIN_NOTATIONS:
        text = notation.sub(plain, text)
    if take == "only":
        match = _ONLY_NUMBER.fullmatch(text.strip())
        return _to_decimal(match.group(1)) if match else None
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    match = found[-1 if take == "last" else 0]
    before, after = text[max(match.start() - 8, 0) : match.start()], text[match.end() : match.end() + 4]
    if _POWER_BEFORE.search(before) or _POWER_AFTER.match(after) or unicodedata.category(after[:1] or " ") == "No":
        return None
    return _to_decimal(match.group())


def lists_candidates(text: str, take: str = "last") -> bool:
    """Return whether a text that should hold one number lists several, on the side of an equation that is taken."""
    text = text.partition("=")[0] if take == "first" else text.rpartition("=")[2]
    plain = re.sub(r"\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+|(?<!\d)\d+\s?/\s?\d+", "0", text)
    return _CANDIDATES.search(plain) is not None


def parse_expected_number(value: Any) -> Decimal:
    """Return the task's answer as a number. Raises `RewardError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RewardError(f"the task's answer {value!r} is not a number")
    number = parse_number(value if isinstance(value, str) else repr(value))
    if number is None:
        raise RewardError(f"the task's answer {value!r} holds no number")
    return number


def _to_decimal(text: str) -> Decimal | None:
    if len(text) > _MAX_NUMBER_CHARACTERS or not text.isascii():
        return None
    numerator, _, denominator = text.replace(",", "").replace(" ", "").partition("/")
    with localcontext(prec=100) as context:
        context.clear_traps()
        value = Decimal(numerator) / Decimal(denominator) if denominator else Decimal(numerator)
    return value if value.is_finite() and abs(value.adjusted()) <= _MAX_EXPONENT else None


def make_regex_reward(
    *,
    pattern: str,
    match: Literal["search", "full"] = "search",
    group: int | str | None = None,
    answer: str = "answer",
    ignore_case: bool = False,
    timeout_s: float = 2.0,
    concurrency: int = 2,
) -> BuiltInReward:
    """Score 1 if `pattern` matches, else 0. `(?s)` and `(?m)` in the pattern change how `.` and `^` see lines.

    With `group`, that group of the last match must also equal the task's `answer`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"is no regular expression: {error}", key="pattern", value=pattern) from error
    if group is not None and group not in compiled.groupindex and group not in range(compiled.groups + 1):
        raise ConfigError("is no group of the pattern", key="group", value=group)
    if match not in ("search", "full"):
        raise ConfigError("must be search or full", key="match", value=match)
    workers = RewardWorkerPool(concurrency)

    async def score(text: str, data: Mapping[str, Any]) -> float:
        args = (pattern, text, match, group, ignore_case)
        found = await workers.call(f"{__name__}:find_match", *args, timeout_s=timeout_s)
        if found is None or group is None:
            return float(found is not None)
        return float(found.strip() == str(get_expected_answer(data, answer)).strip())

    return BuiltInReward("regex", score)


def find_match(pattern: str, text: str, match: str, group: int | str | None, ignore_case: bool) -> str | None:
    """Return the group of the last match, or `None`. Runs in a worker."""
    flags = re.IGNORECASE if ignore_case else 0
    if match == "full":
        found = re.fullmatch(pattern, text, flags)
    elif group is None:
        found = re.search(pattern, text, flags)
    else:
        *_, found = (None, *re.finditer(pattern, text, flags))
    return None if found is None else found.group(group or 0) or ""


def has_content(text: str) -> bool:
    """Return whether a text says something: white space, invisible characters and punctuation alone do not."""
    return any(
        one.isalnum() if one.isascii() else unicodedata.category(one)[0] in "LNS" and one not in _BLANK_LETTERS
        for one in text
    )


def penalise_repetition(text: str, most: float, size: int = 3) -> float:
    """Return `most` times the share of word sequences of that size that stood in the text before."""
    words = text.lower().split()
    sequences = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return most * (1 - len(set(sequences)) / len(sequences)) if sequences else 0.0


def make_format_reward(*, names: Sequence[str] = ("think", "answer"), only: bool = True) -> BuiltInReward:
    """Score 1 if each `<name>…</name>` stands exactly once, in this order and with a content, else 0.

    `only`: nothing but white space may stand outside the tags.
    """
    if not names or isinstance(names, str):
        raise ConfigError("must be a list of tag names", key="names", value=names)

    def score(text: str, data: Mapping[str, Any]) -> float:
        rest = text
        for name in names:
            opening, closing = f"<{name}>", f"</{name}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            before, found, rest = rest.partition(opening)
            content, closed, rest = rest.partition(closing)
            if not found or not closed or not has_content(content) or (only and before.strip()):
                return 0.0
        return float(not (only and rest.strip()))

    return BuiltInReward("tags", score)


class OverlongPenalty:
    """The penalty of DAPO for long answers: 0 up to `longest − buffer` tokens, then it falls evenly to −`penalty`
    at `longest`, and goes on below.
    """

    def __init__(self, *, longest: int, buffer: int, penalty: float = 1.0) -> None:
        if buffer < 1 or longest < buffer:
            raise ConfigError("must be at least 1 and at most `longest`", key="buffer", value=buffer)
        self._longest, self._buffer, self._penalty = longest, buffer, penalty

    async def score(self, episode: Episode) -> Score:
        length = sum(len(turn.generation.actions) for turn in episode.turns)
        beyond = max(0, length - (self._longest - self._buffer))
        return Score(value=-beyond / self._buffer * self._penalty)
