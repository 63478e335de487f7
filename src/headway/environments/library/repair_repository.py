"""Repositories with bugs, made from a seed: correct modules, changes that break some of them, and checks that show it.

Guarantees: the same seed and sizes give the same repository, bugs and checks; unchanged modules pass every check; at
least one check that the agent can see fails. Expected values are computed here, with the correct modules, whose texts
are in `repair_sources`. Every module has example calls of its functions, generators of further calls, and bugs; at
least one example call shows every bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headway.environments.library.repair_sources import MODULE_SOURCES
from headway.errors import ConfigError
from headway.seeding import Rng, choose_item, make_rng, shuffle_items

CallArguments = tuple[Any, ...]
_PACKAGES = ("toolkit", "almanac", "workbench", "pantry", "kernel", "ledgers")
_HIDDEN_CHECKS = 12
"""Checks of each function that the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairCheck:
    """A function call and its expected outcome."""

    module: str
    function: str
    arguments: CallArguments
    expected: Any
    """The returned value, or `{"raises": name}`."""
    shown: bool
    """Whether the tests in the repository contain this check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRepository:
    """The files that an agent gets, and the checks that score its work."""

    package: str
    files: Mapping[str, str]
    broken: tuple[str, ...]
    """Paths of the files with a bug."""
    right: Mapping[str, str]
    """The correct text of those files."""
    checks: tuple[RepairCheck, ...]


def make_repository(seed: int, *, modules: int, bugs: int) -> RepairRepository:
    """Make a package of `modules` modules, of which `bugs` have one bug each. Raises `ConfigError`."""
    if not 1 <= modules <= len(REPAIR_MODULES):
        raise ConfigError(f"must be from 1 to {len(REPAIR_MODULES)}", key="modules", value=modules)
    if not 1 <= bugs <= modules:
        raise ConfigError("must be from 1 to the number of modules", key="bugs", value=bugs)
    rng = make_rng(seed, "repair")
    package = choose_item(rng, _PACKAGES)
    names = shuffle_items(rng, sorted(REPAIR_MODULES))[:modules]
    broken = shuffle_items(rng, names)[:bugs]
    files = {"README.md": _make_readme(package, names), f"{package}/__init__.py": f'"""{package.title()}."""\n'}
    right: dict[str, str] = {}
    checks: list[RepairCheck] = []
    for name in sorted(names):
        path, source = f"{package}/{name}.py", MODULE_SOURCES[name]
        module_checks = make_checks(seed, name)
        checks += module_checks
        files[path] = source
        files[f"tests/test_{name}.py"] = _make_test_file(package, name, module_checks)
        if name in broken:
            right[path] = source
            files[path] = source.replace(*choose_item(rng, REPAIR_MODULES[name].bugs))
    files["tests/__init__.py"] = ""
    return RepairRepository(package=package, files=files, broken=tuple(right), right=right, checks=tuple(checks))


def call_outcome(function: Callable[..., Any], arguments: CallArguments) -> Any:
    """Call a function and return the outcome in the form of `RepairCheck.expected`."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"raises": type(error).__name__}


def make_checks(seed: int, name: str) -> list[RepairCheck]:
    """Return checks of every function of a module, shown and hidden ones."""
    module = load_module(name)
    checks = []
    for function, cases in REPAIR_MODULES[name].functions.items():
        rng = make_rng(seed, "repair", name, function)
        calls = [(arguments, True) for arguments in cases.shown]
        calls += [(cases.make(rng), False) for _ in range(_HIDDEN_CHECKS)]
        for arguments, shown in calls:
            expected = call_outcome(module[function], arguments)
            checks.append(
                RepairCheck(module=name, function=function, arguments=arguments, expected=expected, shown=shown)
            )
    return checks


def _make_test_file(package: str, name: str, checks: Sequence[RepairCheck]) -> str:
    header = f"import unittest\n\nfrom {package} import {name}\n\n\nclass {name.title()}Test(unittest.TestCase):"
    lines = [header]
    for function in REPAIR_MODULES[name].functions:
        lines.append(f"    def test_{function}(self):")
        for check in checks:
            if check.shown and check.function == function:
                call = f"{name}.{function}({', '.join(map(repr, check.arguments))})"
                if isinstance(check.expected, dict) and "raises" in check.expected:
                    lines += [f"        with self.assertRaises({check.expected['raises']}):", f"            {call}"]
                else:
                    lines.append(f"        self.assertEqual({call}, {check.expected!r})")
        lines.append("")
    return "\n".join(lines)


def _make_readme(package: str, names: Sequence[str]) -> str:
    listed = "\n".join(f"* `{package}/{name}.py`" for name in sorted(names))
    return f"# {package}\n\n{listed}\n\nRun the tests with `python3 -m unittest`.\n"


@dataclass(frozen=True, slots=True)
class FunctionCases:
    """Calls of one function: those that the repository's tests contain, and a generator of others."""

    shown: tuple[CallArguments, ...]
    make: Callable[[Rng], CallArguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairModule:
    """A module of `repair_sources`, and ways to break it."""

    functions: Mapping[str, FunctionCases]
    bugs: tuple[tuple[str, str], ...]
    """Text that occurs once in the module, and the text that replaces it."""


@cache
def load_module(name: str) -> Mapping[str, Any]:
    """Return the names that a correct module defines."""
    names: dict[str, Any] = {}
    exec(compile(MODULE_SOURCES[name], f"{name}.py", "exec"), names)
    return names


def _make_intervals(rng: Rng) -> CallArguments:
    starts = [rng.randrange(0, 30) for _ in range(rng.randrange(1, 7))]
    return ([[start, start + rng.randrange(0, 9)] for start in starts],)


def _make_words(rng: Rng) -> str:
    return " ".join("".join(choose_item(rng, "aabeno") for _ in range(rng.randrange(1, 7))) for _ in range(12))


def _make_year(rng: Rng) -> int:
    return int(choose_item(rng, (100 * rng.randrange(16, 24), 400 * rng.randrange(4, 6), 1900 + rng.randrange(0, 200))))


def _make_date(rng: Rng) -> CallArguments:
    month = choose_item(rng, (0, 2, 12, 13, *(rng.randrange(1, 13) for _ in range(4))))
    return (_make_year(rng), month, choose_item(rng, (0, 0, 1, 29, 31, 32, rng.randrange(1, 29))))


def _make_scores(rng: Rng) -> list[float]:
    return [float(rng.randrange(0, 101)) for _ in range(rng.randrange(0, 8))]


def _make_number(rng: Rng) -> int:
    digits = (
        choose_item(rng, (0, 1, 3)),
        choose_item(rng, (0, 4, 8)),
        choose_item(rng, (0, 9, 9, 6)),
        choose_item(rng, (0, 4, 4, 9)),
    )
    return int(choose_item(rng, (0, 0, 4000, *(int("".join(map(str, digits))) for _ in range(6)))))


def _make_numeral(rng: Rng) -> CallArguments:
    number = _make_number(rng)
    text = load_module("numerals")["to_roman"](number) if 1 <= number <= 3999 else ""
    wrong = choose_item(rng, "IVXLCDM") * rng.randrange(1, 5)
    return (choose_item(rng, (text, text.lower(), text.lower(), wrong, text + "I")),)


def _make_rows(rng: Rng, rows: int, columns: int) -> list[list[int]]:
    return [[rng.randrange(-9, 10) for _ in range(columns)] for _ in range(rows)]


def _make_factors(rng: Rng) -> CallArguments:
    inner = rng.randrange(1, 4)
    return (_make_rows(rng, rng.randrange(1, 4), inner), _make_rows(rng, inner, rng.randrange(1, 4)))


def _make_grid_cell(rng: Rng) -> CallArguments:
    rows, columns = rng.randrange(1, 5), rng.randrange(1, 5)
    return (_make_rows(rng, rows, columns), rng.randrange(0, rows), rng.randrange(0, columns))


def _make_stock(rng: Rng) -> dict[str, int]:
    return {name: rng.randrange(1, 4) for name in ("nuts", "tea", "rice", "salt")[: rng.randrange(1, 5)]}


def _make_sale(rng: Rng) -> CallArguments:
    stock, name = _make_stock(rng), choose_item(rng, ("nuts", "tea", "salt"))
    return (stock, name, choose_item(rng, (stock.get(name, 1), rng.randrange(1, 5))))


def _make_letters(rng: Rng) -> str:
    return "".join(choose_item(rng, "abc") * choose_item(rng, (1, 1, 2, 3, 11)) for _ in range(rng.randrange(0, 7)))


def _make_packed_text(rng: Rng) -> CallArguments:
    parts = [f"{rng.randrange(2, 15) if rng.random() < 0.6 else ''}{letter}" for letter in "vwxyz"]
    return ("".join(parts) + choose_item(rng, ("", "", "7")),)


REPAIR_MODULES: dict[str, RepairModule] = {
    "intervals": RepairModule(
        functions={
            "merged": FunctionCases(
                (([[5, 8], [1, 3]],), ([[1, 4], [5, 6]],), ([[1, 9], [2, 3]],), ([],)), _make_intervals
            ),
            "covered": FunctionCases((([[1, 3], [2, 5]],), ([],)), _make_intervals),
            "gaps": FunctionCases((([[1, 2], [6, 7]],), ([[1, 2], [3, 4]],)), _make_intervals),
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
            "slug": FunctionCases(
                (("Hello, World!",), ("  Two  spaces ",), ("Top 10",)),
                lambda rng: ("".join(choose_item(rng, "abC9 -!'") for _ in range(20)),),
            ),
            "commonest": FunctionCases(
                (("b a b c", 2), ("A a b", 1), ("z y z y x", 3)), lambda rng: (_make_words(rng), rng.randrange(1, 5))
            ),
            "wrapped": FunctionCases(
                (("the quick brown fox", 9), ("extraordinary day", 5), ("ab cd ef", 7), ("", 4)),
                lambda rng: (_make_words(rng), rng.randrange(4, 16)),
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
            "is_leap": FunctionCases(((2024,), (1900,), (2000,), (2023,)), lambda rng: (_make_year(rng),)),
            "days_in": FunctionCases(
                ((2023, 1), (2024, 2), (2023, 2), (2023, 12), (2023, 13), (2023, 0)), lambda rng: _make_date(rng)[:2]
            ),
            "day_of_year": FunctionCases(((2023, 1, 1), (2024, 12, 31), (2023, 2, 29), (2023, 3, 0)), _make_date),
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
            "mean": FunctionCases((([1.0, 2.0, 6.0],), ([],)), lambda rng: (_make_scores(rng),)),
            "median": FunctionCases(
                (([3.0, 1.0, 2.0],), ([4.0, 1.0, 3.0, 2.0],), ([],)), lambda rng: (_make_scores(rng),)
            ),
            "letter": FunctionCases(
                ((95,), (90,), (80,), (70,), (60,), (59,)), lambda rng: (10 * rng.randrange(3, 11),)
            ),
            "best_of": FunctionCases(
                (([1.0, 9.0, 5.0], 2), ([4.0], 3)), lambda rng: ([*_make_scores(rng), 50.0], rng.randrange(1, 5))
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
            "to_roman": FunctionCases(((1994,), (4,), (3999,), (8,), (0,), (90,)), lambda rng: (_make_number(rng),)),
            "from_roman": FunctionCases((("MCMXCIV",), ("xl",), ("IIII",), ("",), ("III",)), _make_numeral),
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
                (([[1, 2], [3, 4], [5, 6]],),), lambda rng: (_make_rows(rng, 2, rng.randrange(1, 5)),)
            ),
            "turned": FunctionCases((([[1, 2], [3, 4]],), ([[1, 2, 3]],)), lambda rng: (_make_rows(rng, 3, 2),)),
            "product": FunctionCases(
                (([[1, 2], [3, 4]], [[5, 6], [7, 8]]), ([[1, 2]], [[3], [4]]), ([[1, 2]], [[3, 4]])), _make_factors
            ),
            "neighbours": FunctionCases(
                (([[1, 2], [3, 4]], 0, 1), ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1, 1)), _make_grid_cell
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
                (({"tea": 2}, "tea", 3), ({}, "nuts", 1), ({"tea": 2}, "tea", 0)),
                lambda rng: (_make_stock(rng), "rice", rng.randrange(0, 3)),
            ),
            "sold": FunctionCases(
                (({"tea": 2, "rice": 1}, "tea", 1), ({"tea": 2}, "tea", 2), ({"tea": 2}, "tea", 3), ({}, "nuts", 1)),
                _make_sale,
            ),
            "short_of": FunctionCases(
                (({"tea": 2}, {"tea": 5, "rice": 1}), ({"tea": 2}, {"tea": 2}), ({"tea": 2}, {"tea": 1})),
                lambda rng: (_make_stock(rng), _make_stock(rng)),
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
            "packed": FunctionCases((("aaabcc",), ("",), ("abc",)), lambda rng: (_make_letters(rng),)),
            "unpacked": FunctionCases((("3ab2c",), ("12x",), ("",), ("a3",)), _make_packed_text),
            "longest": FunctionCases((("aabbb",), ("bbba",), ("",), ("a",)), lambda rng: (_make_letters(rng),)),
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
