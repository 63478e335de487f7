"""Strings to draw: `4711` is to become a picture that shows 4711. All of an alphabet up to a length, a fifth held out.

Which part a string belongs to follows from its letters alone, so that pretraining, RL and evaluation agree on what is
held out without having to know each other. The same options and seed give the same strings everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from hashlib import blake2b
from itertools import product
from typing import Any

from headway.data.files import Rows
from headway.errors import ConfigError
from headway.seeding import Rng, seeded

NAME = "strings"
"""The built-in task."""

_HELD_OUT = 5
"""One in so many."""
_MOST = 10_000
"""Strings that are made where `size` does not say how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
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
        rng, lengths = seeded(seed, "strings"), range(self.shortest, self.longest + 1)
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


def rows(options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, part: str, key: str) -> Rows:
    """Strings under the names of the columns for prompt and answer, which are the same."""
    known = [field.name for field in fields(Strings)] + ["size", "seed"]
    for option, value in options.items():
        if option not in known:
            close = get_close_matches(option, known, 1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            hint = f"one of {', '.join(known)}"
            raise ConfigError(f"is no option of {NAME}{meant}", key=f"{key}.{option}", value=value, hint=hint)
    size, seed = options.get("size", _MOST), options.get("seed", seed)
    for option, value in (("size", size), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (option == "size"):
            raise ConfigError("is no such number", key=f"{key}.{option}", value=value)
    strings = Strings(**{option: value for option, value in options.items() if option not in ("size", "seed")})
    chosen = strings.distinct(size, seed)
    if part != "all":
        chosen = [text for text in chosen if is_held_out(text) == (part == "held_out")]
    yield from enumerate(({columns[0]: text, columns[1]: text} for text in chosen), start=1)
