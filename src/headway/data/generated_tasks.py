"""Built-in tasks that are generated: sums (`a + b = ?`) and strings to be drawn. A fifth is kept for validation.

Guarantees: the same options and seed give the same rows everywhere, and no row comes twice. A held-out row is never
trained. Whether a string is held out follows from its letters alone, so that pretraining, RL and evaluation agree on it
without knowing each other. Differences are not negative unless the option `negative` allows them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import product
from operator import add, mul, sub
from typing import Any

from headway.data.data_files import NumberedRows
from headway.errors import ConfigError, suggest_close_match
from headway.seeding import Rng, make_rng

ARITHMETIC_TASKS: Mapping[str, str] = {"addition": "+", "arithmetic": "+-×"}
"""The arithmetic tasks and their operations."""
STRINGS_TASK = "strings"

_OPERATIONS = {"+": add, "-": sub, "×": mul}
_OPERATION_ALIASES = {"−": "-", "*": "×"}
_HOLDOUT_PERIOD = 5
"""One row in so many is held out."""
_DEFAULT_SIZE = 10_000
"""Rows where `size` does not say how many."""
_MAX_DIGITS = 9
_MAX_SIZE = 10_000_000


def generate_arithmetic_rows(
    name: str, options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str
) -> NumberedRows:
    """Yield problems under the names of the columns for prompt and answer. `part`: all, train or held_out."""
    _check_options(name, options, ("digits", "negative", "operations", "seed", "size"), key)
    negative = options.get("negative", False)
    if not isinstance(negative, bool):
        raise ConfigError("must be true or false", key=f"{key}.negative", value=negative)
    digits = _read_integer(options, "digits", 1, 1, _MAX_DIGITS, key)
    size = None if options.get("size") is None else _read_integer(options, "size", 0, 5, _MAX_SIZE, key)
    operations = _read_operations(options.get("operations", ARITHMETIC_TASKS[name]), key)
    seed = _read_integer(options, "seed", seed, 0, 2**63, key)
    per_operation = 10 ** (2 * digits)

    def parse(problem: int) -> tuple[str, int, int]:
        return operations[problem // per_operation], *divmod(problem % per_operation, 10**digits)

    def is_allowed(problem: int) -> bool:
        sign, left, right = parse(problem)
        return negative or left >= right or sign != "-"

    chosen = _draw_distinct(len(operations) * per_operation, size, seed, is_allowed)
    if part != "all":
        held_out = part == "held_out"
        chosen = [problem for place, problem in enumerate(chosen) if (place % _HOLDOUT_PERIOD == 0) == held_out]
    for number, problem in enumerate(chosen, start=1):
        sign, left, right = parse(problem)
        answer = str(_OPERATIONS[sign](left, right))
        yield number, {columns[0]: f"{left} {sign} {right} = ?", columns[1]: answer}


def _draw_distinct(count: int, size: int | None, seed: int, is_allowed: Callable[[int], bool]) -> list[int]:
    """Draw `size` different allowed numbers below `count`, or all of them if there are no more."""
    size = min(size or _DEFAULT_SIZE, count)
    rng = make_rng(seed, "data", "arithmetic")
    if count <= 4 * size:
        allowed = list(filter(is_allowed, range(count)))
        rng.shuffle(allowed)
        return allowed[:size]
    found: dict[int, None] = {}
    while len(found) < size:
        problem = rng.randrange(0, count)
        if is_allowed(problem):
            found[problem] = None
    return list(found)


def _read_operations(given: Any, key: str) -> tuple[str, ...]:
    signs = [_OPERATION_ALIASES.get(sign, sign) for sign in given] if isinstance(given, str | list | tuple) else []
    if not signs or len(set(signs)) != len(signs) or any(sign not in _OPERATIONS for sign in signs):
        hint = 'some of + - ×, such as "+-"'
        raise ConfigError("are no operations", key=f"{key}.operations", value=given, hint=hint)
    return tuple(signs)


def _check_options(name: str, options: Mapping[str, Any], known: Collection[str], key: str) -> None:
    for option, value in options.items():
        if option not in known:
            problem = f"is no option of {name}{suggest_close_match(option, known)}"
            raise ConfigError(problem, key=f"{key}.{option}", value=value, hint=f"one of {', '.join(known)}")


def _read_integer(options: Mapping[str, Any], option: str, default: int, least: int, most: int, key: str) -> int:
    value = options.get(option, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        hint = f"expected an integer from {least} to {most}"
        raise ConfigError("is no such number", key=f"{key}.{option}", value=value, hint=hint)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StringSet:
    """The strings of `shortest` to `longest` letters of `alphabet`."""

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

    def draw(self, rng: Rng) -> str:
        """Draw any string; all lengths are equally likely."""
        length = rng.randrange(self.shortest, self.longest + 1)
        return "".join(self.alphabet[rng.randrange(0, len(self.alphabet))] for _ in range(length))

    def draw_trained(self, rng: Rng) -> str:
        """Draw a string that is not held out."""
        return next(text for text in iter(lambda: self.draw(rng), "") if not is_held_out(text))

    def list_held_out(self, count: int, seed: int = 0) -> list[str]:
        """Return `count` different held-out strings, the same for the same seed."""
        found = [text for text in self.list_distinct(2 * _HOLDOUT_PERIOD * count + 100, seed) if is_held_out(text)]
        if len(found) < count:
            raise ConfigError(f"there are not so many held-out strings of {self}", key="count", value=count)
        return found[:count]

    def list_distinct(self, count: int, seed: int) -> list[str]:
        """Return `count` different strings in a drawn order, or all of them if there are no more."""
        rng, lengths = make_rng(seed, "strings"), range(self.shortest, self.longest + 1)
        if sum(len(self.alphabet) ** length for length in lengths) <= 4 * count:
            every = ["".join(letters) for length in lengths for letters in product(self.alphabet, repeat=length)]
            order = list(range(len(every)))
            rng.shuffle(order)
            return [every[place] for place in order[:count]]
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.draw(rng)] = None
        return list(found)


def is_held_out(text: str) -> bool:
    """Return whether a string is never shown in training."""
    return blake2b(text.encode(), digest_size=8).digest()[0] % _HOLDOUT_PERIOD == 0


def generate_string_rows(
    options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str
) -> NumberedRows:
    """Yield strings under the names of the columns for prompt and answer, which are the same."""
    _check_options(STRINGS_TASK, options, [*(field.name for field in fields(StringSet)), "size", "seed"], key)
    size, seed = options.get("size", _DEFAULT_SIZE), options.get("seed", seed)
    for option, value in (("size", size), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (option == "size"):
            raise ConfigError("is no such number", key=f"{key}.{option}", value=value)
    strings = StringSet(**{option: value for option, value in options.items() if option not in ("size", "seed")})
    chosen = strings.list_distinct(size, seed)
    if part != "all":
        chosen = [text for text in chosen if is_held_out(text) == (part == "held_out")]
    yield from enumerate(({columns[0]: text, columns[1]: text} for text in chosen), start=1)
