"""Stock of a shop: names and how many there are."""


def delivered(stock: dict[str, int], name: str, count: int) -> dict[str, int]:
    """The stock after a delivery; what was given is not changed. Raises ValueError for fewer than 1."""
    if count < 1:
        raise ValueError("nothing is delivered")
    return {**stock, name: stock.get(name, 0) + count}


def sold(stock: dict[str, int], name: str, count: int) -> dict[str, int]:
    """The stock after a sale, without what has run out. Raises ValueError where there is not enough."""
    left = stock.get(name, 0) - count
    if left < 0:
        raise ValueError(f"not enough {name}")
    changed = {**stock, name: left}
    return {one: many for one, many in changed.items() if many > 0}


def short_of(stock: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """What must be ordered so that there is at least as much as wanted of everything."""
    missing = {name: count - stock.get(name, 0) for name, count in wanted.items()}
    return {name: count for name, count in missing.items() if count > 0}
