"""A catalogue and shopping goals from a seed: what the shop sells and what its customers look for.

Guarantees: the same seed and size give the same catalogue and goals; at least one product, with one choice of its
options, meets every goal. Products are invented; descriptions are sentences made of their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations

from headway.seeding import Rng, choose_item, make_rng, shuffle_items


def _split(listed: str) -> tuple[str, ...]:
    return tuple(listed.split(", "))


_SIZES = _split("small, medium, large, x-large, xx-large")
_COLOURS = _split("black, white, navy blue, red, forest green, grey, beige, pink, purple, yellow")
_BRANDS = _split("Alderwick, Bramble & Co, Corvane, Dunmore, Elmgate, Fernhill, Garrow, Hollin, Istria, Juniper")
_STYLES = _split("classic, everyday, modern, premium, simple, vintage, compact, original")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopDepartment:
    """A department of the shop, from which products are drawn."""

    category: tuple[str, str]
    kinds: tuple[str, ...]
    attributes: str
    """Attributes of its products, separated by commas."""
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[int, int]


SHOP_DEPARTMENTS = (
    ShopDepartment(
        category=("fashion", "women"),
        kinds=("summer dress", "cardigan", "ankle boots", "yoga pants", "rain jacket"),
        attributes="machine wash, long sleeve, high waist, quick drying, cotton blend, loose fit, water resistant",
        options={"color": _COLOURS, "size": _SIZES},
        prices=(15, 90),
    ),
    ShopDepartment(
        category=("fashion", "men"),
        kinds=("dress shirt", "polo shirt", "hiking shorts", "leather belt", "running shoes"),
        attributes="slim fit, machine wash, short sleeve, moisture wicking, non slip, button closure, stretch fabric",
        options={"color": _COLOURS, "size": _SIZES},
        prices=(12, 110),
    ),
    ShopDepartment(
        category=("beauty", "hair care"),
        kinds=("shampoo", "conditioner", "hair mask", "styling gel"),
        attributes="sulfate free, paraben free, cruelty free, for dry hair, for curly hair, tea tree oil, argan oil",
        options={
            "scent": ("lavender", "citrus", "coconut", "unscented", "rose"),
            "volume": ("100 ml", "250 ml", "500 ml"),
        },
        prices=(5, 40),
    ),
    ShopDepartment(
        category=("electronics", "audio"),
        kinds=("wireless headphones", "bluetooth speaker", "soundbar", "earbuds"),
        attributes=(
            "noise cancelling, fast charging, long lasting, water resistant, hands free, easy to carry, deep bass"
        ),
        options={"color": _COLOURS[:6], "warranty": ("1 year", "2 years", "3 years")},
        prices=(20, 250),
    ),
    ShopDepartment(
        category=("electronics", "computer"),
        kinds=("mechanical keyboard", "laptop stand", "usb hub", "gaming mouse", "monitor arm"),
        attributes="plug and play, ultra light, easy to install, heavy duty, aluminum alloy, quiet, ergonomic",
        options={"color": _COLOURS[:6], "style": ("standard", "compact", "with cable")},
        prices=(15, 180),
    ),
    ShopDepartment(
        category=("home", "furniture"),
        kinds=("coffee table", "bookshelf", "bar stool", "tv stand", "nightstand"),
        attributes="easy assemble, solid wood, space saving, metal legs, scratch resistant, mid century, with storage",
        options={"color": ("walnut", "oak", "white", "black", "espresso"), "size": ("narrow", "regular", "wide")},
        prices=(40, 320),
    ),
    ShopDepartment(
        category=("home", "kitchen"),
        kinds=("water bottle", "frying pan", "cutting board", "coffee grinder", "lunch box"),
        attributes="bpa free, dishwasher safe, stainless steel, non stick, leak proof, easy clean, lead free",
        options={"color": _COLOURS[:7], "size": ("small", "medium", "large")},
        prices=(8, 75),
    ),
    ShopDepartment(
        category=("grocery", "snacks"),
        kinds=("trail mix", "dark chocolate", "granola bars", "rice crackers", "green tea"),
        attributes="gluten free, low sugar, non gmo, high protein, dairy free, keto friendly, fair trade",
        options={
            "flavor": ("original", "cranberry", "sea salt", "ginger", "vanilla"),
            "pack": ("pack of 1", "pack of 3", "pack of 6"),
        },
        prices=(4, 45),
    ),
)


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
    department = choose_item(rng, SHOP_DEPARTMENTS)
    kind, brand, style = choose_item(rng, department.kinds), choose_item(rng, _BRANDS), choose_item(rng, _STYLES)
    attributes = _sample(rng, _split(department.attributes), 2, 5)
    options = {name: _sample(rng, choices, 2, min(5, len(choices))) for name, choices in department.options.items()}
    low, high = department.prices
    return ShopProduct(
        code=f"b{number * 7919 % 1_000_003:07d}{'xkqzmw'[number % 6]}",
        title=f"{brand} {style} {kind}, {attributes[0]}",
        kind=kind,
        category=department.category,
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
