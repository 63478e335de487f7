"""The modules of repair tasks: calls that show what they do, ways to make more calls, and ways to break them.

Every bug is seen by at least one call that is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.environments.library.projects.numerals import to_roman
from headway.seeding import Rng

CallArguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCases:
    """One function: calls that the tests show, and how to make others."""

    shown: tuple[CallArguments, ...]
    make: Callable[[Rng], CallArguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairModule:
    """A module of `headway.environments.library.projects`, and ways to break it."""

    functions: Mapping[str, FunctionCases]
    bugs: tuple[tuple[str, str], ...]
    """Text that is there once, and what stands there instead."""


def _one(rng: Rng, *choices: Any) -> Any:
    return choices[rng.randrange(0, len(choices))]


def _pairs(rng: Rng) -> CallArguments:
    starts = [rng.randrange(0, 30) for _ in range(rng.randrange(1, 7))]
    return ([[start, start + rng.randrange(0, 9)] for start in starts],)


def _words(rng: Rng) -> str:
    return " ".join("".join(_one(rng, *"aabeno") for _ in range(rng.randrange(1, 7))) for _ in range(12))


def _title(rng: Rng) -> CallArguments:
    return ("".join(_one(rng, *"abC9 -!'") for _ in range(20)),)


def _year(rng: Rng) -> int:
    return int(_one(rng, 100 * rng.randrange(16, 24), 400 * rng.randrange(4, 6), 1900 + rng.randrange(0, 200)))


def _date(rng: Rng) -> CallArguments:
    month = _one(rng, 0, 2, 12, 13, *(rng.randrange(1, 13) for _ in range(4)))
    return (_year(rng), month, _one(rng, 0, 0, 1, 29, 31, 32, rng.randrange(1, 29)))


def _month(rng: Rng) -> CallArguments:
    return _date(rng)[:2]


def _scores(rng: Rng) -> list[float]:
    return [float(rng.randrange(0, 101)) for _ in range(rng.randrange(0, 8))]


def _number(rng: Rng) -> int:
    digits = (_one(rng, 0, 1, 3), _one(rng, 0, 4, 8), _one(rng, 0, 9, 9, 6), _one(rng, 0, 4, 4, 9))
    return int(_one(rng, 0, 0, 4000, *(int("".join(map(str, digits))) for _ in range(6))))


def _numeral(rng: Rng) -> CallArguments:
    number = _number(rng)
    text = to_roman(number) if 1 <= number <= 3999 else ""
    wrong = _one(rng, *"IVXLCDM") * rng.randrange(1, 5)
    return (_one(rng, text, text.lower(), text.lower(), wrong, text + "I"),)


def _rows(rng: Rng, rows: int, columns: int) -> list[list[int]]:
    return [[rng.randrange(-9, 10) for _ in range(columns)] for _ in range(rows)]


def _factors(rng: Rng) -> CallArguments:
    inner = rng.randrange(1, 4)
    return (_rows(rng, rng.randrange(1, 4), inner), _rows(rng, inner, rng.randrange(1, 4)))


def _place(rng: Rng) -> CallArguments:
    rows, columns = rng.randrange(1, 5), rng.randrange(1, 5)
    return (_rows(rng, rows, columns), rng.randrange(0, rows), rng.randrange(0, columns))


def _stock(rng: Rng) -> dict[str, int]:
    return {name: rng.randrange(1, 4) for name in ("nuts", "tea", "rice", "salt")[: rng.randrange(1, 5)]}


def _sale(rng: Rng) -> CallArguments:
    stock, name = _stock(rng), _one(rng, "nuts", "tea", "salt")
    return (stock, name, _one(rng, stock.get(name, 1), rng.randrange(1, 5)))


def _letters(rng: Rng) -> str:
    return "".join(_one(rng, *"abc") * _one(rng, 1, 1, 2, 3, 11) for _ in range(rng.randrange(0, 7)))


def _code(rng: Rng) -> CallArguments:
    parts = [f"{rng.randrange(2, 15) if rng.random() < 0.6 else ''}{letter}" for letter in "vwxyz"]
    return ("".join(parts) + _one(rng, "", "", "7"),)


REPAIR_MODULES: dict[str, RepairModule] = {
    "intervals": RepairModule(
        functions={
            "merged": FunctionCases(
                shown=(([[5, 8], [1, 3]],), ([[1, 4], [5, 6]],), ([[1, 9], [2, 3]],), ([],)), make=_pairs
            ),
            "covered": FunctionCases(shown=(([[1, 3], [2, 5]],), ([],)), make=_pairs),
            "gaps": FunctionCases(shown=(([[1, 2], [6, 7]],), ([[1, 2], [3, 4]],)), make=_pairs),
        },
        bugs=(
            ("first <= result[-1][1] + 1", "first <= result[-1][1]"),
            ("= max(result[-1][1], last)", "= last"),
            ("in sorted(intervals)", "in intervals"),
            ("last - first + 1 for", "last - first for"),
            ("right[0] - 1]", "right[0]]"),
        ),
    ),
    "texts": RepairModule(
        functions={
            "slug": FunctionCases(shown=(("Hello, World!",), ("  Two  spaces ",), ("Top 10",)), make=_title),
            "commonest": FunctionCases(
                shown=(("b a b c", 2), ("A a b", 1), ("z y z y x", 3)),
                make=lambda rng: (_words(rng), rng.randrange(1, 5)),
            ),
            "wrapped": FunctionCases(
                shown=(("the quick brown fox", 9), ("extraordinary day", 5), ("ab cd ef", 7), ("", 4)),
                make=lambda rng: (_words(rng), rng.randrange(4, 16)),
            ),
        },
        bugs=(
            ("[a-z0-9]+", "[a-z]+"),
            ("title.lower()", "title"),
            ("(-words.count(word), word)", "-words.count(word)"),
            ("(-words.count(word), word)", "(words.count(word), word)"),
            ("+ 1 + len(word) <= width", "+ len(word) <= width"),
            ("+ 1 + len(word) <= width", "+ 1 + len(word) < width"),
        ),
    ),
    "days": RepairModule(
        functions={
            "is_leap": FunctionCases(shown=((2024,), (1900,), (2000,), (2023,)), make=lambda rng: (_year(rng),)),
            "days_in": FunctionCases(
                shown=((2023, 1), (2024, 2), (2023, 2), (2023, 12), (2023, 13), (2023, 0)), make=_month
            ),
            "day_of_year": FunctionCases(shown=((2023, 1, 1), (2024, 12, 31), (2023, 2, 29), (2023, 3, 0)), make=_date),
        },
        bugs=(
            (" and (year % 100 != 0 or year % 400 == 0)", ""),
            (" or year % 400 == 0)", ")"),
            ("1 <= month <= 12", "0 <= month <= 12"),
            ("1 <= month <= 12", "1 <= month < 12"),
            ("LENGTHS[month - 1]", "LENGTHS[month - 2]"),
            ("range(1, month)) + day", "range(1, month + 1)) + day"),
            ("month == 2 and is_leap", "is_leap"),
            ("not 1 <= day <=", "not 0 <= day <="),
        ),
    ),
    "grades": RepairModule(
        functions={
            "mean": FunctionCases(shown=(([1.0, 2.0, 6.0],), ([],)), make=lambda rng: (_scores(rng),)),
            "median": FunctionCases(
                shown=(([3.0, 1.0, 2.0],), ([4.0, 1.0, 3.0, 2.0],), ([],)), make=lambda rng: (_scores(rng),)
            ),
            "letter": FunctionCases(
                shown=((95,), (90,), (80,), (70,), (60,), (59,)), make=lambda rng: (10 * rng.randrange(3, 11),)
            ),
            "best_of": FunctionCases(
                shown=(([1.0, 9.0, 5.0], 2), ([4.0], 3)), make=lambda rng: ([*_scores(rng), 50.0], rng.randrange(1, 5))
            ),
        },
        bugs=(
            ("ordered = sorted(values)", "ordered = values"),
            ("(ordered[middle - 1] + ordered[middle]) / 2", "(ordered[middle] + ordered[middle + 1]) / 2"),
            ("len(ordered) % 2 == 1", "len(ordered) % 2 == 0"),
            ("score >= least", "score > least"),
            ("reverse=True)[:count]", "reverse=True)[: count - 1]"),
            (", reverse=True", ""),
            ("sum(values) / len(values)", "sum(values) // len(values) + 1"),
        ),
    ),
    "numerals": RepairModule(
        functions={
            "to_roman": FunctionCases(
                shown=((1994,), (4,), (3999,), (8,), (0,), (90,)), make=lambda rng: (_number(rng),)
            ),
            "from_roman": FunctionCases(
                shown=(("MCMXCIV",), ("xl",), ("IIII",), ("",), ("III",)),
                make=_numeral,
            ),
        },
        bugs=(
            ('(90, "XC"),', ""),
            ('(4, "IV"), ', ""),
            ("while number >= value", "while number > value"),
            ("while rest.startswith(symbol)", "if rest.startswith(symbol)"),
            ("1 <= number <= 3999", "number <= 3999"),
            ("0, text.upper()", "0, text"),
            (" or to_roman(number) != text.upper()", ""),
        ),
    ),
    "grids": RepairModule(
        functions={
            "transposed": FunctionCases(
                shown=(([[1, 2], [3, 4], [5, 6]],),), make=lambda rng: (_rows(rng, 2, rng.randrange(1, 5)),)
            ),
            "turned": FunctionCases(shown=(([[1, 2], [3, 4]],), ([[1, 2, 3]],)), make=lambda rng: (_rows(rng, 3, 2),)),
            "product": FunctionCases(
                shown=(([[1, 2], [3, 4]], [[5, 6], [7, 8]]), ([[1, 2]], [[3], [4]]), ([[1, 2]], [[3, 4]])),
                make=_factors,
            ),
            "neighbours": FunctionCases(
                shown=(([[1, 2], [3, 4]], 0, 1), ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1, 1)), make=_place
            ),
        },
        bugs=(
            ("transposed(rows[::-1])", "transposed(rows)[::-1]"),
            ("columns = transposed(right)", "columns = right"),
            ("len(left[0]) != len(right)", "len(left) != len(right)"),
            ("max(row - 1, 0)", "row - 1"),
            ("min(column + 2, len(rows[0]))", "min(column + 1, len(rows[0]))"),
            ("!= (row, column)", "!= (column, row)"),
            ("total += rows", "total = rows"),
        ),
    ),
    "stocks": RepairModule(
        functions={
            "delivered": FunctionCases(
                shown=(({"tea": 2}, "tea", 3), ({}, "nuts", 1), ({"tea": 2}, "tea", 0)),
                make=lambda rng: (_stock(rng), "rice", rng.randrange(0, 3)),
            ),
            "sold": FunctionCases(
                shown=(
                    ({"tea": 2, "rice": 1}, "tea", 1),
                    ({"tea": 2}, "tea", 2),
                    ({"tea": 2}, "tea", 3),
                    ({}, "nuts", 1),
                ),
                make=_sale,
            ),
            "short_of": FunctionCases(
                shown=(({"tea": 2}, {"tea": 5, "rice": 1}), ({"tea": 2}, {"tea": 2}), ({"tea": 2}, {"tea": 1})),
                make=lambda rng: (_stock(rng), _stock(rng)),
            ),
        },
        bugs=(
            ("stock.get(name, 0) + count", "count"),
            ("if count < 1", "if count < 0"),
            ("if left < 0", "if left <= 0"),
            ("stock.get(name, 0) - count", "stock[name] - count"),
            ("changed.items() if many > 0", "changed.items()"),
            ("missing.items() if count > 0", "missing.items() if count >= 0"),
            ("count - stock.get(name, 0) for", "stock.get(name, 0) - count for"),
        ),
    ),
    "runs": RepairModule(
        functions={
            "packed": FunctionCases(shown=(("aaabcc",), ("",), ("abc",)), make=lambda rng: (_letters(rng),)),
            "unpacked": FunctionCases(shown=(("3ab2c",), ("12x",), ("",), ("a3",)), make=_code),
            "longest": FunctionCases(shown=(("aabbb",), ("bbba",), ("",), ("a",)), make=lambda rng: (_letters(rng),)),
        },
        bugs=(
            ("if len(run[0]) > 1", "if len(run[0]) > 2"),
            (r'r"((\D)\2*)"', r'r"((\D)\2?)"'),
            (r'r"(\d*)(\D)"', r'r"(\d?)(\D)"'),
            ("int(count or 1)", "int(count or 0)"),
            ("else 1\n", "else 0\n"),
            ("best = max(best, current)", "best = current"),
            ("text and text[-1].isdigit()", "text and text[0].isdigit()"),
        ),
    ),
}
