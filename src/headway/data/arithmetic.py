"""Sums to learn with: `a + b = ?`, generated, with a fifth kept for validation.

Guarantees: the same options and seed give the same problems everywhere; no problem comes twice; what is held out is
never trained, whatever its operands. Differences are not negative, unless `negative` says that they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from operator import add, mul, sub
from typing import Any

from headway.data.files import Rows
from headway.errors import ConfigError
from headway.seeding import seeded

NAMES: Mapping[str, str] = {"addition": "+", "arithmetic": "+-×"}
"""The built-in tasks and their operations."""

_OPERATIONS = {"+": add, "-": sub, "×": mul}
_SAME = {"−": "-", "*": "×"}
_HELD_OUT = 5
"""Every fifth problem."""
_MOST = 10_000
"""Problems that are made where `size` does not say how many."""
_MOST_DIGITS = 9
_LARGEST = 10_000_000


def rows(name: str, options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str) -> Rows:
    """Problems under the names of the columns for prompt and answer. `part`: all, train or held_out."""
    operations, digits, size, seed = _checked(name, options, seed, key)
    per_operation = 10 ** (2 * digits)
    negative = bool(options.get("negative", False))

    def allowed(problem: int) -> bool:
        left, right = divmod(problem % per_operation, 10**digits)
        return negative or left >= right or operations[problem // per_operation] != "-"

    chosen = _distinct(len(operations) * per_operation, size, seed, allowed)
    if part != "all":
        held_out = part == "held_out"
        chosen = [number for place, number in enumerate(chosen) if (place % _HELD_OUT == 0) == held_out]
    for number, problem in enumerate(chosen, start=1):
        sign = operations[problem // per_operation]
        left, right = divmod(problem % per_operation, 10**digits)
        answer = str(_OPERATIONS[sign](left, right))
        yield number, {columns[0]: f"{left} {sign} {right} = ?", columns[1]: answer}


def _distinct(kinds: int, size: int | None, seed: int, allowed: Callable[[int], bool]) -> list[int]:
    """`size` different allowed numbers below `kinds`, in a drawn order; all of them where there are no more."""
    count = min(size or _MOST, kinds)
    rng = seeded(seed, "data", "arithmetic")
    if kinds <= 4 * count:
        every = list(filter(allowed, range(kinds)))
        rng.shuffle(every)
        return every[:count]
    found: dict[int, None] = {}
    while len(found) < count:
        problem = rng.randrange(0, kinds)
        if allowed(problem):
            found[problem] = None
    return list(found)


def _checked(
    name: str, options: Mapping[str, Any], seed: int, key: str
) -> tuple[tuple[str, ...], int, int | None, int]:
    known = ("digits", "negative", "operations", "seed", "size")
    for option, value in options.items():
        if option not in known:
            close = get_close_matches(option, known, 1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"is no option of {name}{meant}", key=f"{key}.{option}", value=value, hint=f"one of {', '.join(known)}"
            )
    if not isinstance(options.get("negative", False), bool):
        raise ConfigError("must be true or false", key=f"{key}.negative", value=options["negative"])
    digits = _whole(options, "digits", 1, 1, _MOST_DIGITS, key)
    size = _whole(options, "size", 0, 5, _LARGEST, key) if options.get("size") is not None else None
    given = options.get("operations", NAMES[name])
    signs = [_SAME.get(sign, sign) for sign in given] if isinstance(given, str | list | tuple) else []
    if not signs or len(set(signs)) != len(signs) or any(sign not in _OPERATIONS for sign in signs):
        hint = 'some of + - ×, such as "+-"'
        raise ConfigError("are no operations", key=f"{key}.operations", value=given, hint=hint)
    return tuple(signs), digits, size, _whole(options, "seed", seed, 0, 2**63, key)


def _whole(options: Mapping[str, Any], option: str, default: int, least: int, most: int, key: str) -> int:
    value = options.get(option, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        hint = f"expected an integer from {least} to {most}"
        raise ConfigError("is no such number", key=f"{key}.{option}", value=value, hint=hint)
    return value
