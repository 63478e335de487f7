"""Sums to learn with: `a + b = ?`, generated, with a fifth kept for validation.

Guarantees: the same options and seed give the same problems everywhere; no problem comes twice; what is held out is
never trained, whatever its operands. Differences are not negative, unless `negative` says that they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from hashlib import blake2b
from itertools import product
from operator import add, mul, sub
from typing import Any

from headway.data.data_files import NumberedRows
from headway.errors import ConfigError
from headway.seeding import Rng, make_rng

ARITHMETIC_TASKS: Mapping[str, str] = {"addition": "+", "arithmetic": "+-×"}
"""The built-in tasks and their operations."""

_OPERATIONS = {"+": add, "-": sub, "×": mul}
_SAME = {"−": "-", "*": "×"}
_HELD_OUT = 5
"""Every fifth problem."""
_MOST = 10_000
"""Problems that are made where `size` does not say how many."""
_MOST_DIGITS = 9
_LARGEST = 10_000_000


def generate_arithmetic_rows(
    name: str, options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str
) -> NumberedRows:
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
    rng = make_rng(seed, "data", "arithmetic")
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
    given = options.get("operations", ARITHMETIC_TASKS[name])
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


STRINGS_TASK = "strings"
"""The built-in task."""
"""One in so many."""
"""Strings that are made where `size` does not say how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StringSet:
    """Strings of `shortest` to `longest` letters of `alphabet`."""

    alphabet: str = "0123456789"
    shortest: int = 4
    longest: int = 4

    def __post_init__(self) -> None:
        for name in ("shortest", "longest"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ConfigError("is no number of letters", key=name, value=getattr(self, name))
        if not isinstance(self.alphabet, str):
            raise ConfigError("is no text", key="alphabet", value=self.alphabet)
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError("must lie between 1 and longest", key="shortest", value=self.shortest)
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2 or set(self.alphabet) & set(" \n\t"):
            raise ConfigError("needs two or more different letters, no blanks", key="alphabet", value=self.alphabet)

    def any(self, rng: Rng) -> str:
        """One of all, each length as likely as another."""
        length = rng.randrange(self.shortest, self.longest + 1)
        return "".join(self.alphabet[rng.randrange(0, len(self.alphabet))] for _ in range(length))

    def trained(self, rng: Rng) -> str:
        """One that is not held out."""
        return next(text for text in iter(lambda: self.any(rng), "") if not is_held_out(text))

    def held_out(self, count: int, seed: int = 0) -> list[str]:
        """`count` different ones that are; the same for the same seed."""
        found = [text for text in self.distinct(2 * _HELD_OUT * count + 100, seed) if is_held_out(text)][:count]
        if len(found) < count:
            raise ConfigError(f"there are not so many held-out strings of {self}", key="count", value=count)
        return found

    def distinct(self, count: int, seed: int) -> list[str]:
        """`count` different ones in a drawn order; all of them where there are no more."""
        rng, lengths = make_rng(seed, "strings"), range(self.shortest, self.longest + 1)
        if sum(len(self.alphabet) ** length for length in lengths) <= 4 * count:
            every = ["".join(letters) for length in lengths for letters in product(self.alphabet, repeat=length)]
            order = list(range(len(every)))
            rng.shuffle(order)
            return [every[place] for place in order[:count]]
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.any(rng)] = None
        return list(found)


def is_held_out(text: str) -> bool:
    """Whether a string is never shown in training."""
    return blake2b(text.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def generate_string_rows(
    options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str
) -> NumberedRows:
    """Strings under the names of the columns for prompt and answer, which are the same."""
    known = [field.name for field in fields(StringSet)] + ["size", "seed"]
    for option, value in options.items():
        if option not in known:
            close = get_close_matches(option, known, 1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            hint = f"one of {', '.join(known)}"
            raise ConfigError(f"is no option of {STRINGS_TASK}{meant}", key=f"{key}.{option}", value=value, hint=hint)
    size, seed = options.get("size", _MOST), options.get("seed", seed)
    for option, value in (("size", size), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (option == "size"):
            raise ConfigError("is no such number", key=f"{key}.{option}", value=value)
    strings = StringSet(**{option: value for option, value in options.items() if option not in ("size", "seed")})
    chosen = strings.distinct(size, seed)
    if part != "all":
        chosen = [text for text in chosen if is_held_out(text) == (part == "held_out")]
    yield from enumerate(({columns[0]: text, columns[1]: text} for text in chosen), start=1)
