"""A catalogue and shopping goals from a seed: what the shop sells and what its customers look for.

Guarantees: the same seed and size give the same catalogue and goals; at least one product, with one choice of its
options, meets every goal. Products are invented; descriptions are sentences made of their attributes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product as combinations

import yaml

from headway.seeding import Rng, choose_item, make_rng, shuffle_items

_WORDS = yaml.safe_load(files("headway.environments.library").joinpath("shop_departments.yaml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopProduct:
    """A product for sale."""

    code: str
    title: str
    kind: str
    category: tuple[str, str]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    """Choices of each option."""
    price: float
    surcharges: Mapping[str, float]
    """Extra price of some choices."""
    description: str

    def price_with(self, chosen: Mapping[str, str]) -> float:
        return round(self.price + sum(self.surcharges.get(choice, 0.0) for choice in chosen.values()), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShoppingGoal:
    """What a customer looks for. `product` is one that meets the goal."""

    product: ShopProduct
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    instruction: str


def make_catalogue(seed: int, size: int) -> tuple[ShopProduct, ...]:
    """Return `size` products with unique codes."""
    return tuple(_make_product(make_rng(seed, "shop", number), number) for number in range(size))


def make_goal(catalogue: Sequence[ShopProduct], seed: int, number: int) -> ShoppingGoal:
    """Return the goal `number` of a catalogue."""
    rng = make_rng(seed, "shop goal", number)
    wanted = choose_item(rng, catalogue)
    attributes = _sample(rng, wanted.attributes, 1, 3)
    named = _sample(rng, tuple(wanted.options), 0, len(wanted.options))
    options = {name: choose_item(rng, wanted.options[name]) for name in sorted(named)}
    choices = (dict(zip(wanted.options, choice, strict=True)) for choice in combinations(*wanted.options.values()))
    dearest = max(wanted.price_with({**choice, **options}) for choice in choices)
    upper = float(10 * (int(dearest) // 10 + 1 + rng.randrange(0, 3)))
    described = " and ".join(attributes) + "".join(f", {name}: {choice}" for name, choice in options.items())
    return ShoppingGoal(
        product=wanted,
        attributes=attributes,
        options=options,
        price_upper=upper,
        instruction=f"I am looking for {wanted.kind} that is {described}, and price lower than {upper:.2f} dollars",
    )


def _make_product(rng: Rng, number: int) -> ShopProduct:
    department = choose_item(rng, _WORDS["departments"])
    words = (department["kinds"], _WORDS["brands"], _WORDS["styles"])
    kind, brand, style = (choose_item(rng, choices) for choices in words)
    attributes = _sample(rng, department["attributes"], 2, 5)
    options = {name: _sample(rng, choices, 2, min(5, len(choices))) for name, choices in department["options"].items()}
    low, high = department["prices"]
    return ShopProduct(
        code=f"b{number * 7919 % 1_000_003:07d}{'xkqzmw'[number % 6]}",
        title=f"{brand} {style} {kind}, {attributes[0]}",
        kind=kind,
        category=tuple(department["category"]),
        attributes=attributes,
        options=options,
        price=low + round((high - low) * rng.random(), 2),
        surcharges={choice: float(rng.randrange(1, 9)) for choices in options.values() for choice in choices[-1:]},
        description=f"A {style} {kind} by {brand}. It is {', '.join(attributes)}.",
    )


def _sample(rng: Rng, items: Sequence[str], least: int, most: int) -> tuple[str, ...]:
    """Return between `least` and `most` different items in random order."""
    shuffled = shuffle_items(rng, items)
    return tuple(shuffled[: rng.randrange(least, most + 1)])
