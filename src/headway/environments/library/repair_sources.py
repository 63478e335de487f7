"""The correct modules that repair tasks are made of, as text. `repair_repository` breaks copies of them.

Each module imports nothing but the standard library, so its text works anywhere. The policy reads these texts, so their
wording is part of the environment's behaviour.
"""

MODULE_SOURCES: dict[str, str] = {
    "days": r'''"""Days of the Gregorian calendar."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year: int) -> bool:
    """Whether a year has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year: int, month: int) -> int:
    """Days of a month from 1 to 12. Raises ValueError for other months."""
    if not 1 <= month <= 12:
        raise ValueError(f"there is no month {month}")
    return LENGTHS[month - 1] + (1 if month == 2 and is_leap(year) else 0)


def day_of_year(year: int, month: int, day: int) -> int:
    """1 for the first of January. Raises ValueError for days that the month does not have."""
    if not 1 <= day <= days_in(year, month):
        raise ValueError(f"there is no day {day} in month {month}")
    return sum(days_in(year, earlier) for earlier in range(1, month)) + day
''',
    "grades": r'''"""Grades: averages and letters."""


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
''',
    "grids": r'''"""Rectangles of numbers, as lists of rows."""


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Rows as columns."""
    return [list(column) for column in zip(*rows, strict=True)]


def turned(rows: list[list[int]]) -> list[list[int]]:
    """Turned clockwise by a quarter."""
    return transposed(rows[::-1])


def product(left: list[list[int]], right: list[list[int]]) -> list[list[int]]:
    """The product of two matrices. Raises ValueError where their sizes do not fit."""
    if len(left[0]) != len(right):
        raise ValueError("sizes do not fit")
    columns = transposed(right)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def neighbours(rows: list[list[int]], row: int, column: int) -> int:
    """The sum of the up to eight values around a place."""
    total = 0
    for near_row in range(max(row - 1, 0), min(row + 2, len(rows))):
        for near_column in range(max(column - 1, 0), min(column + 2, len(rows[0]))):
            if (near_row, near_column) != (row, column):
                total += rows[near_row][near_column]
    return total
''',
    "intervals": r'''"""Intervals of whole numbers, each a pair of its first and last number."""

from itertools import pairwise


def merged(intervals: list[list[int]]) -> list[list[int]]:
    """Sorted, with those that overlap or touch joined."""
    result: list[list[int]] = []
    for first, last in sorted(intervals):
        if result and first <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result


def covered(intervals: list[list[int]]) -> int:
    """How many numbers are in at least one interval."""
    return sum(last - first + 1 for first, last in merged(intervals))


def gaps(intervals: list[list[int]]) -> list[list[int]]:
    """The intervals between those given."""
    joined = merged(intervals)
    return [[left[1] + 1, right[0] - 1] for left, right in pairwise(joined)]
''',
    "numerals": r'''"""Roman numerals from 1 to 3999."""

SYMBOLS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def to_roman(number: int) -> str:
    """Raises ValueError for numbers that have no numeral."""
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no numeral")
    text = ""
    for value, symbol in SYMBOLS:
        while number >= value:
            text += symbol
            number -= value
    return text


def from_roman(text: str) -> int:
    """The number of a numeral, in either case. Raises ValueError for other texts."""
    number, rest = 0, text.upper()
    for value, symbol in SYMBOLS:
        while rest.startswith(symbol):
            number += value
            rest = rest[len(symbol) :]
    if rest or not text or to_roman(number) != text.upper():
        raise ValueError(f"{text!r} is no numeral")
    return number
''',
    "runs": r'''"""Runs of equal letters: packed, unpacked, counted."""

import re


def packed(text: str) -> str:
    """Every run as its length and its letter; runs of one have no number."""
    return "".join((str(len(run[0])) if len(run[0]) > 1 else "") + run[1] for run in re.findall(r"((\D)\2*)", text))


def unpacked(text: str) -> str:
    """What was packed. Raises ValueError for a number without a letter."""
    if text and text[-1].isdigit():
        raise ValueError("ends with a number")
    return "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)(\D)", text))


def longest(text: str) -> int:
    """The length of the longest run; 0 of an empty text."""
    best = current = 0
    for place, letter in enumerate(text):
        current = current + 1 if place and text[place - 1] == letter else 1
        best = max(best, current)
    return best
''',
    "stocks": r'''"""Stock of a shop: names and how many there are."""


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
''',
    "texts": r'''"""Texts: titles for addresses, counted words, lines of a given width."""

import re


def slug(title: str) -> str:
    """Lower case letters and digits, joined by single hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def commonest(text: str, count: int) -> list[str]:
    """The `count` most frequent words in lower case; equally frequent ones in alphabetical order."""
    words = re.findall(r"[a-z]+", text.lower())
    return sorted(dict.fromkeys(words), key=lambda word: (-words.count(word), word))[:count]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken between words; longer words have a line of their own."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
''',
}
"""Source text by module name."""
