"""Repositories with bugs, made from a seed: correct modules, changes that break some of them, and checks that show it.

Guarantees: the same seed and sizes give the same repository, bugs and checks; unchanged modules pass every check; at
least one check that the agent can see fails. Expected values are computed here, with the correct modules, whose texts
are in `repair_modules.yaml`, with example calls of their functions and with bugs; at least one example call shows every
bug.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

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
        path, source = f"{package}/{name}.py", REPAIR_MODULES[name].source
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
    for function, shown_calls in REPAIR_MODULES[name].calls.items():
        rng = make_rng(seed, "repair", name, function)
        calls = [(arguments, True) for arguments in shown_calls]
        calls += [(_ARGUMENT_MAKERS[function](rng), False) for _ in range(_HIDDEN_CHECKS)]
        for arguments, shown in calls:
            expected = call_outcome(module[function], arguments)
            check = RepairCheck(module=name, function=function, arguments=arguments, expected=expected, shown=shown)
            checks.append(check)
    return checks


def _make_test_file(package: str, name: str, checks: Sequence[RepairCheck]) -> str:
    header = f"import unittest\n\nfrom {package} import {name}\n\n\nclass {name.title()}Test(unittest.TestCase):"
    lines = [header]
    for function in REPAIR_MODULES[name].calls:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairModule:
    """A correct module, and ways to break it."""

    source: str
    calls: Mapping[str, tuple[CallArguments, ...]]
    """Calls of each function that the repository's tests contain."""
    bugs: tuple[tuple[str, str], ...]
    """Text that occurs once in the module, and the text that replaces it."""


@cache
def load_module(name: str) -> Mapping[str, Any]:
    """Return the names that a correct module defines."""
    names: dict[str, Any] = {}
    exec(compile(REPAIR_MODULES[name].source, f"{name}.py", "exec"), names)
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
    digits = [choose_item(rng, choices) for choices in ((0, 1, 3), (0, 4, 8), (0, 9, 9, 6), (0, 4, 4, 9))]
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


_ARGUMENT_MAKERS: dict[str, Callable[[Rng], CallArguments]] = {
    "merged": _make_intervals,
    "covered": _make_intervals,
    "gaps": _make_intervals,
    "slug": lambda rng: ("".join(choose_item(rng, "abC9 -!'") for _ in range(20)),),
    "commonest": lambda rng: (_make_words(rng), rng.randrange(1, 5)),
    "wrapped": lambda rng: (_make_words(rng), rng.randrange(4, 16)),
    "is_leap": lambda rng: (_make_year(rng),),
    "days_in": lambda rng: _make_date(rng)[:2],
    "day_of_year": _make_date,
    "mean": lambda rng: (_make_scores(rng),),
    "median": lambda rng: (_make_scores(rng),),
    "letter": lambda rng: (10 * rng.randrange(3, 11),),
    "best_of": lambda rng: ([*_make_scores(rng), 50.0], rng.randrange(1, 5)),
    "to_roman": lambda rng: (_make_number(rng),),
    "from_roman": _make_numeral,
    "transposed": lambda rng: (_make_rows(rng, 2, rng.randrange(1, 5)),),
    "turned": lambda rng: (_make_rows(rng, 3, 2),),
    "product": _make_factors,
    "neighbours": _make_grid_cell,
    "delivered": lambda rng: (_make_stock(rng), "rice", rng.randrange(0, 3)),
    "sold": _make_sale,
    "short_of": lambda rng: (_make_stock(rng), _make_stock(rng)),
    "packed": lambda rng: (_make_letters(rng),),
    "unpacked": _make_packed_text,
    "longest": lambda rng: (_make_letters(rng),),
}
"""Generators, for each function of `repair_modules.yaml`, of calls that the repository's tests do not contain."""


def _load_modules() -> dict[str, RepairModule]:
    text = resources.files("headway.environments.library").joinpath("repair_modules.yaml").read_text(encoding="utf-8")
    return {
        name: RepairModule(
            source=module["source"],
            calls={function: tuple(map(tuple, calls)) for function, calls in module["calls"].items()},
            bugs=tuple(map(tuple, module["bugs"])),
        )
        for name, module in yaml.safe_load(text).items()
    }


REPAIR_MODULES = _load_modules()
