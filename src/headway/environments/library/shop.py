"""An offline shop in the manner of WebShop: search, look, choose options, and buy what the instruction asks for.

Actions are `search[words]` and `click[a name shown in brackets]`. The reward comes with `buy now` and is WebShop's: the
fraction of wanted attributes, wanted options and the price limit that the purchase meets, times how well its type fits.
Two things differ: the nouns of a title are the words of the product's kind (WebShop uses a tagger), and words must be
equal (WebShop compares loosely).

Guarantees: the same catalogue seed and goal give the same pages and rewards; every goal can be met with a reward of 1.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.environments.library.shop_catalogue import ShoppingGoal, ShopProduct, make_catalogue, make_goal
from headway.environments.response_parsing import extract_answer
from headway.environments.text_environment import Reply
from headway.environments.tools.search_tool import BM25Index
from headway.errors import ConfigError

_INSTRUCTIONS = """You are shopping online. Buy the product that the instruction describes, with its options.
Each turn answer with one action:
<answer>search[words]</answer> where there is a search box, or
<answer>click[name]</answer> for one of the names shown in brackets.
Choose the options before you click [buy now]; buying ends the task."""
_ACTION = re.compile(r"(search|click)\s{0,3}\[([^\[\]]{0,500})\]", re.IGNORECASE)
_MAX_RESULTS, _RESULTS_PER_PAGE = 50, 10
_DETAILS = ("description", "features")


class ShopEnvironment:
    """Plays one shopping goal per episode: the one of the seed, or the number `data["goal"]`."""

    instructions = _INSTRUCTIONS
    reusable = True

    def __init__(self, *, products: int = 1000, catalogue_seed: int = 0, max_steps: int = 15) -> None:
        if not 1 <= products <= 100_000:
            raise ConfigError("must be from 1 to 100,000", key="products", value=products)
        if max_steps < 2:
            raise ConfigError("nothing is bought in fewer than 2 steps", key="max_steps", value=max_steps)
        self.max_steps = max_steps
        self._seed = catalogue_seed
        self._catalogue, self._index = _load_catalogue(catalogue_seed, products)

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.goal = make_goal(self._catalogue, self._seed, int(data.get("goal", seed)))
        self._open_search_page()
        return self._show_page()

    def _open_search_page(self) -> None:
        self._results: list[ShopProduct] | None = None
        self._product: ShopProduct | None = None
        self._chosen: dict[str, str] = {}
        self._first, self._detail = 0, ""

    def step(self, action: str) -> Reply:
        found = _ACTION.findall(extract_answer(action))
        if not found:
            return self._refuse("Answer with search[words] or click[name].")
        verb, what = found[-1][0].lower(), " ".join(found[-1][1].lower().split())
        if verb == "search":
            if self._product is not None or self._results is not None:
                return self._refuse("There is no search box on this page.")
            self._results, self._first = [self._catalogue[one] for one, _ in self._index.search(what, _MAX_RESULTS)], 0
            return Reply(self._show_page())
        if what not in self.list_clickable():
            return self._refuse(f"There is no [{what}] on this page.")
        return self._click(what)

    def list_clickable(self) -> list[str]:
        """Return the names that `click[…]` accepts on this page."""
        if self._product is not None and self._detail:
            return ["back to search", "< prev"]
        if self._product is not None:
            choices = [choice for choices in self._product.options.values() for choice in choices]
            return ["back to search", "< prev", *choices, *_DETAILS, "buy now"]
        if self._results is None:
            return []
        ways = ["next >"] if self._first + _RESULTS_PER_PAGE < len(self._results) else []
        ways += ["< prev"] if self._first else []
        return ["back to search", *ways, *(one.code for one in self._visible_results())]

    def _click(self, what: str) -> Reply:
        if what == "buy now":
            return self._buy()
        if what == "back to search":
            self._open_search_page()
        elif what in ("next >", "< prev"):
            self._turn_page(what)
        elif self._product is None:
            self._product, self._chosen = next(one for one in self._visible_results() if one.code == what), {}
        elif what in _DETAILS:
            self._detail = what
        else:
            name = next(name for name, choices in self._product.options.items() if what in choices)
            self._chosen[name] = what
        return Reply(self._show_page())

    def _buy(self) -> Reply:
        assert self._product is not None
        parts = score_purchase(self._product, self._chosen, self.goal)
        reward = parts["reward"]
        text = f"Thank you for shopping with us! Your score (min 0.0, max 1.0): {reward:.3f}"
        return Reply(text, reward, done=True, success=reward == 1.0, info=parts)

    def _turn_page(self, what: str) -> None:
        if self._detail:
            self._detail = ""
        elif self._product is not None:
            self._product = None
        else:
            self._first += _RESULTS_PER_PAGE if what == "next >" else -_RESULTS_PER_PAGE

    def _visible_results(self) -> list[ShopProduct]:
        return (self._results or [])[self._first : self._first + _RESULTS_PER_PAGE]

    def _refuse(self, why: str) -> Reply:
        return Reply(f"{why}\n{self._show_page()}", valid=False)

    def _show_page(self) -> str:
        lines = [f"Instruction: {self.goal.instruction}"]
        if self._product is not None:
            lines += self._show_product(self._product)
        elif self._results is None:
            lines.append("Search box: search[words]")
        else:
            ways = [way for way in self.list_clickable() if way in ("back to search", "< prev", "next >")]
            lines.append("".join(f"[{way}] " for way in ways).strip())
            lines.append(f"Page {self._first // _RESULTS_PER_PAGE + 1} ({len(self._results)} results)")
            lines += [f"[{one.code}] {one.title} — {_format_price_range(one)}" for one in self._visible_results()]
        return "\n".join(lines)

    def _show_product(self, product: ShopProduct) -> list[str]:
        lines = ["[back to search] [< prev]"]
        if self._detail:
            told = product.description if self._detail == "description" else "; ".join(product.attributes)
            return [*lines, f"{self._detail}: {told}"]
        for name, choices in product.options.items():
            lines.append(f"{name}: " + " ".join(f"[{choice}]" for choice in choices))
        chosen = ", ".join(f"{name} {choice}" for name, choice in self._chosen.items())
        lines += [product.title, f"Chosen: {chosen or 'nothing'}"]
        return [*lines, f"Price: {product.price_with(self._chosen):.2f} dollars", "[description] [features] [buy now]"]


def score_purchase(product: ShopProduct, chosen: Mapping[str, str], goal: ShoppingGoal) -> dict[str, float]:
    """Return the reward of a purchase and the parts that it is made of."""
    text = f"{product.title} {product.description}".lower()
    attributes = sum(one in product.attributes or one in text for one in goal.attributes)
    options = sum(chosen.get(name) == choice for name, choice in goal.options.items())
    price = product.price_with(chosen) <= goal.price_upper
    kind = _type_reward(product, goal.product)
    met = (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)
    return {
        "reward": met * kind,
        "type": kind,
        "attributes": attributes / len(goal.attributes),
        "options": options / len(goal.options) if goal.options else 1.0,
        "price": float(price),
    }


def _type_reward(bought: ShopProduct, wanted: ShopProduct) -> float:
    nouns = set(wanted.kind.split())
    shared = len(nouns & set(bought.kind.split())) / len(nouns)
    if shared < 0.1:
        return 0.1 if shared else 0.0
    alike = bought.kind == wanted.kind or bought.category == wanted.category or shared > 0.2
    return 1.0 if alike else 0.5


def _format_price_range(product: ShopProduct) -> str:
    extra = product.surcharges
    dearest = {name: max(c, key=lambda one: extra.get(one, 0.0)) for name, c in product.options.items()}
    return f"{product.price:.2f} to {product.price_with(dearest):.2f} dollars"


@lru_cache(maxsize=4)
def _load_catalogue(seed: int, size: int) -> tuple[tuple[ShopProduct, ...], BM25Index]:
    """Return a catalogue and its index. The shops of a process share them, as neither changes."""
    catalogue = make_catalogue(seed, size)
    texts = (f"{one.title} {one.kind} {' '.join(one.category)} {one.description}" for one in catalogue)
    return catalogue, BM25Index(tuple(texts))
