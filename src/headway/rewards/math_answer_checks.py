"""Checks of an answer in mathematics before its value is compared. Runs in a worker, beside math-verify.

math-verify reads generously: it drops what it cannot read, so that `41\\\\\\\\ 42` is 42, and it computes, so that
`17 \\\\times 23` is the answer to the question what 17 times 23 is. These checks refuse an answer that names several
candidates, that leaves the work to the reader, that repeats the question, or that is too large to be computed.
"""

import re
import unicodedata
from math import inf, log10
from typing import Any

_NUMBER = re.compile(r"\d+(?:(?:,|\{,\}|,\\!)\d{3}(?!\d))*(?:\.\d+)?")
_NUMERAL = re.compile(r"[-+]?[$]?\d[\d,.]*(?:\\?%)?|[-+]?\\[dt]?frac\{?\d+\}?\{?\d+\}?|[-+]?\d+/\d+")
_COMPOSED = re.compile(r"\\[dt]?frac|[/^%!]|\\(?:times|cdot|sqrt|binom|pi|circ)")
_SCIENTIFIC = re.compile(r"\d+(?:\.\d+)?(?:\\times|\\cdot|[*×·])10\^\{?-?\d+\}?")
_OPERATION = re.compile(r"\\(?:times|cdot|div|int|sum|prod|lim)(?![a-z])|[*×·÷∫∑∏]|(?<=[\w})!])[-+](?=[\w\\({.])")
_QUOTIENT = re.compile(r"\d+/\d+|\\[dt]?frac")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|[\s$]|\\[()\[\]]")
_SPELLINGS = (
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac(\d)(\d)"), r"\1/\2"),
    (re.compile(r"\\times|\\cdot|[×·]|\*\*?"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\\sqrt\{([^{}]*)\}|√\(?([\w.]+)\)?|sqrt\(([^()]*)\)"), r"√\1\2\3"),
)
_MAX_DIGITS = 10_000


def list_readings(expected: str) -> list[str]:
    """Return how to read the task's answer: an expression as LaTeX first, a sentence as it stands first.

    As a sentence, `2^{10}` would be the number 2 and `3+2x` the number 3.
    """
    bare = re.sub(r"^[A-Za-z]\s*=", "", expected.strip())
    bare = re.sub(r"(?i)^([-+]?\d+(?:\.\d+)?)e([-+]?\d+)$", r"\1 \\times 10^{\2}", bare)
    if "$" in expected or "boxed" in expected:
        return [expected, f"${expected}$"]
    is_sentence = "\n" in bare or (re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", bare) and "\\" not in bare)
    return [expected, f"${bare}$"] if is_sentence else [f"${bare}$", expected]


def find_evasion(answer: str, value: Any, expected: str, question: str) -> str:
    """Return why `answer`, which was read as `value`, is no answer; empty if it is one."""
    wanted, found = normalise_latex(expected), normalise_latex(answer)
    if wanted and found.strip("{}") == wanted.strip("{}"):
        return ""
    if any(unicodedata.category(one) in ("No", "Nd") and not one.isascii() for one in answer):
        return "digits that are not plain"
    if getattr(value, "is_Number", False) and len(_NUMBER.findall(answer)) > 1 and not _COMPOSED.search(answer):
        return "several candidates"
    if measure_digits(value) > _MAX_DIGITS:
        return "too large"
    if _NUMERAL.fullmatch(_LAYOUT.sub("", expected)) and _is_left_to_compute(answer, wanted):
        return "left to compute"
    if (
        question
        and len(found) > 2
        and re.search(r"[-+*/^!√\\]", found.lstrip("+-"))
        and found in normalise_latex(question)
    ):
        return "repeats the question"
    return ""


def normalise_latex(text: str) -> str:
    """Return one spelling of LaTeX and plain mathematics, without layout."""
    text = _LAYOUT.sub("", text)
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _is_left_to_compute(answer: str, wanted: str) -> bool:
    """Return whether the last side of an equation is arithmetic instead of a number."""
    flat = re.sub(r"_\{[^{}]*\}", "", _LAYOUT.sub("", answer))
    side = _SCIENTIFIC.sub("1", flat.rpartition("=")[2])
    is_whole = re.fullmatch(r"[-+]?[\d,]+", wanted) is not None
    return _OPERATION.search(side) is not None or (is_whole and _QUOTIENT.search(side) is not None)


def measure_digits(value: Any) -> float:
    """Return an upper bound of the digits of a number that is not computed yet; 0 for what is no number."""
    if getattr(value, "is_Number", False):
        size = abs(float(value)) if abs(getattr(value, "p", 0)) < 10**300 else inf
        return log10(size) if 1 < size < inf else 0.0 if size <= 1 else 301.0
    arguments = [argument for argument in getattr(value, "args", ()) if hasattr(argument, "args")]
    if not arguments:
        return 0.0
    digits = [measure_digits(argument) for argument in arguments]
    if type(value).__name__ == "Pow":
        return max(digits[0], 0.31) * 10 ** min(digits[1], 300.0) if digits[1] > 0 else digits[0]
    if type(value).__name__ in ("factorial", "factorial2", "binomial", "gamma"):
        return 10 ** min(max(digits), 300.0) * max(max(digits), 1.0)
    return sum(digits) if type(value).__name__ == "Mul" else max(digits)
