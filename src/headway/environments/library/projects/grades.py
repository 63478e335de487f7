"""Grades: averages and letters."""


def mean(values: list[float]) -> float:
    """Raises ValueError where there are no values."""
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


def median(values: list[float]) -> float:
    """The middle value, or the mean of the two in the middle. Raises ValueError where there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def letter(score: float) -> str:
    """A from 90, B from 80, C from 70, D from 60, else F."""
    for least, name in ((90, "A"), (80, "B"), (70, "C"), (60, "D")):
        if score >= least:
            return name
    return "F"


def best_of(values: list[float], count: int) -> float:
    """The mean of the `count` highest values, or of all where there are fewer."""
    return mean(sorted(values, reverse=True)[:count])
