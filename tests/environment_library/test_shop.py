"""The shop: a scripted customer gets everything, careless ones get the share that WebShop gives."""

from __future__ import annotations

import re

import pytest

from headway.environments.library.shop import ShopEnvironment, score_purchase
from headway.environments.library.shop_catalogue import make_catalogue, make_goal
from headway.environments.text_environment import Reply
from headway.errors import ConfigError


def find(shop: ShopEnvironment) -> None:
    """Search for the goal's product by its title and open it, turning pages."""
    wanted = shop.goal.product
    shop.step(f"search[{wanted.title} {wanted.description}]")
    while wanted.code not in shop.list_clickable():
        assert shop.step("click[next >]").valid, "the product is among the results"
    shop.step(f"click[{wanted.code}]")


def buy_rightly(shop: ShopEnvironment) -> Reply:
    find(shop)
    for choice in shop.goal.options.values():
        assert f"[{choice}]" in shop.step(f"I choose it: click[{choice}]").text
    return shop.step("<answer>click[Buy Now]</answer>")


def test_the_right_purchase_has_reward_one_for_every_goal() -> None:
    shop = ShopEnvironment(products=400, max_steps=15)
    for seed in range(40):
        shop.reset(seed, {})
        reply = buy_rightly(shop)
        assert reply.done and reply.success and reply.reward == 1.0, (seed, reply)


def test_what_the_instruction_says_is_enough_to_find_most_products() -> None:
    shop = ShopEnvironment(products=400)
    found = 0
    for seed in range(30):
        shop.reset(seed, {})
        shop.step(f"search[{shop.goal.product.kind} {' '.join(shop.goal.attributes)}]")
        for _ in range(5):
            found += shop.goal.product.code in shop.list_clickable()
            shop.step("click[next >]")
    assert found > 20


def test_forgotten_options_cost_their_share() -> None:
    shop = ShopEnvironment(products=400)
    tried = 0
    for seed in range(30):
        shop.reset(seed, {})
        goal = shop.goal
        if not goal.options:
            continue
        tried += 1
        find(shop)
        reply = shop.step("click[buy now]")
        parts = len(goal.attributes) + len(goal.options) + 1
        assert reply.done and not reply.success
        assert reply.reward == pytest.approx(1 - len(goal.options) / parts)
    assert tried > 5


def test_another_kind_earns_nothing_and_a_dear_one_less() -> None:
    catalogue = make_catalogue(0, 400)
    goal = make_goal(catalogue, 0, 3)
    foreign = next(one for one in catalogue if not set(one.kind.split()) & set(goal.product.kind.split()))
    assert score_purchase(foreign, {}, goal)["reward"] == 0.0
    right = score_purchase(goal.product, goal.options, goal)
    assert right["reward"] == 1.0
    strict = type(goal)(
        product=goal.product, attributes=goal.attributes, options=goal.options, price_upper=1.0, instruction=""
    )
    parts = len(goal.attributes) + len(goal.options) + 1
    assert score_purchase(goal.product, goal.options, strict)["reward"] == pytest.approx(1 - 1 / parts)


def test_missing_attributes_cost_their_share() -> None:
    catalogue = make_catalogue(0, 400)
    goal = next(goal for goal in (make_goal(catalogue, 0, n) for n in range(50)) if len(goal.attributes) == 3)
    others = [one for one in catalogue if one.kind == goal.product.kind and one.options == goal.product.options]
    others = [one for one in catalogue if one.kind == goal.product.kind and one is not goal.product] or others
    for other in others:
        got = score_purchase(other, {}, goal)
        matched = sum(attribute in other.attributes for attribute in goal.attributes)
        price = other.price <= goal.price_upper
        assert got["reward"] == pytest.approx((matched + price) / (3 + len(goal.options) + 1))


def test_the_same_goal_is_the_same_shop() -> None:
    def pages(shop: ShopEnvironment) -> list[str]:
        texts = [shop.reset(7, {}), shop.step("search[red shirt]").text, shop.step("click[next >]").text]
        return [*texts, shop.step(f"click[{shop.list_clickable()[-1]}]").text]

    assert pages(ShopEnvironment(products=300)) == pages(ShopEnvironment(products=300))
    assert ShopEnvironment(products=300).reset(0, {"goal": 7}) == ShopEnvironment(products=300).reset(7, {})
    assert pages(ShopEnvironment(products=300)) != pages(ShopEnvironment(products=300, catalogue_seed=1))


@pytest.mark.parametrize("said", ["", "buy it", "click[buy now]", "click[b0000000x]", "search red shirt"])
def test_what_cannot_be_done_is_invalid_and_changes_nothing(said: str) -> None:
    shop = ShopEnvironment(products=100)
    page = shop.reset(1, {})
    reply = shop.step(said)
    assert not reply.valid and not reply.done and reply.reward == 0.0
    assert reply.text.endswith(page)


def test_pages_are_turned_and_left() -> None:
    shop = ShopEnvironment(products=400)
    shop.reset(2, {})
    first = shop.step("search[women fashion]").text
    assert "< prev" not in first and not shop.step("search[again]").valid
    second = shop.step("click[next >]").text
    assert re.findall(r"\[b\d+\w\]", first) != re.findall(r"\[b\d+\w\]", second)
    assert shop.step("click[< prev]").text == first
    code = shop.list_clickable()[-1]
    page = shop.step(f"click[{code}]").text
    assert "[buy now]" in page
    assert "It is" in shop.step("click[description]").text
    assert shop.step("click[< prev]").text == page
    assert shop.step("click[< prev]").text == first
    assert "Search box" in shop.step("click[back to search]").text


def test_nothing_found_is_an_empty_page() -> None:
    shop = ShopEnvironment(products=50)
    shop.reset(0, {})
    assert "(0 results)" in shop.step("search[zeppelin]").text
    assert shop.list_clickable() == ["back to search"]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="products"):
        ShopEnvironment(products=0)
    with pytest.raises(ConfigError, match="max_steps"):
        ShopEnvironment(max_steps=1)
