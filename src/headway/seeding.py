"""Makes random generators. No other module does, so that all randomness comes from the seed.

A generator is derived from the run's seed and a path of names, so that adding a consumer somewhere changes no
other consumer's stream, and the same seed gives the same run.
"""

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

T = TypeVar("T")


class Rng(Protocol):
    """The methods of `random.Random` that the system uses."""

    def random(self) -> float: ...
    def gauss(self, mu: float = ..., sigma: float = ...) -> float: ...
    def randrange(self, start: int, stop: int) -> int: ...
    def shuffle(self, x: list[int]) -> None: ...


def make_rng(seed: int, *path: str | int) -> Rng:
    """Make the generator of the consumer that `path` names."""
    text = "/".join(str(part) for part in (seed, *path))
    return random.Random(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big"))


def choose_item(rng: Rng, items: Sequence[T]) -> T:
    """Return one of the items at random."""
    return items[rng.randrange(0, len(items))]


def shuffle_items(rng: Rng, items: Sequence[T]) -> list[T]:
    """Return the items in random order."""
    order = list(range(len(items)))
    rng.shuffle(order)
    return [items[index] for index in order]
