"""When a value or an output that came out of the sandbox is the expected one."""

from __future__ import annotations

from math import isclose
from typing import Any

_RELATIVE = 1e-6


def same_value(found: Any, wanted: Any) -> bool:
    """Whether `found`, as the harness writes values, is `wanted`. Lists and tuples are alike, floats are near."""
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return type(found) is type(wanted) and bool(found == wanted)
    if isinstance(wanted, int | float | complex):
        return _same_number(_number(found), wanted)
    if not isinstance(found, dict) or len(found) != 1:
        return False
    ((kind, content),) = found.items()
    if isinstance(wanted, bytes):
        return bool(kind == "bytes" and content == wanted.hex())
    if not isinstance(content, list):  # a program may write to the channel of the harness what it likes
        return False
    if isinstance(wanted, list | tuple) and kind == "list":
        return len(content) == len(wanted) and all(map(same_value, content, wanted))
    if isinstance(wanted, set | frozenset) and kind == "set":
        return len(content) == len(wanted) and all(any(same_value(one, other) for one in content) for other in wanted)
    return isinstance(wanted, dict) and kind == "dict" and _same_dict(content, wanted)


def _same_dict(pairs: list[Any], wanted: dict[Any, Any]) -> bool:
    """JSON has only texts as keys: the key `1` of a program is the `"1"` of a data set."""
    if len(pairs) != len(wanted) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    return all(
        any((same_value(k, key) or str(k) == key) and same_value(v, value) for k, v in pairs)
        for key, value in wanted.items()
    )


def _number(found: Any) -> int | float | complex | None:
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    try:
        match found:
            case {"float": str(text)}:
                return float(text)
            case {"complex": [str(real), str(imaginary)]}:
                return complex(float(real), float(imaginary))
    except ValueError:
        return None
    return None


def _same_number(found: int | float | complex | None, wanted: int | float | complex) -> bool:
    if found is None:
        return False
    if isinstance(found, int) and isinstance(wanted, int):
        return found == wanted
    if isinstance(found, complex) or isinstance(wanted, complex):
        return abs(complex(found) - complex(wanted)) <= _RELATIVE * max(abs(complex(wanted)), 1e-6)
    if found != found or wanted != wanted:
        return found != found and wanted != wanted
    try:
        return isclose(found, wanted, rel_tol=_RELATIVE, abs_tol=1e-9)
    except OverflowError:
        return False


def same_output(found: str, wanted: str) -> bool:
    """Line by line without trailing white space; where texts differ, numbers may be near."""
    mine, theirs = _lines(found), _lines(wanted)
    if mine == theirs:
        return True
    if len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        words, others = one.split(), other.split()
        if len(words) != len(others) or not all(map(_same_word, words, others)):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if "." not in other and "e" not in other.lower():
        return False  # whole numbers must be the same
    try:
        return isclose(float(one), float(other), rel_tol=_RELATIVE, abs_tol=1e-9)
    except ValueError:
        return False
