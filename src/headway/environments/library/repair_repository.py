"""Repositories with bugs, made from a seed: correct modules, changes that break some of them, and checks that show it.

Guarantees: the same seed and sizes give the same repository, bugs and checks; unchanged modules pass every check; at
least one check that the agent can see fails. Expected values are computed here, with the correct modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.environments.library.repair_modules import REPAIR_MODULES, CallArguments, load_module
from headway.environments.library.repair_sources import MODULE_SOURCES
from headway.errors import ConfigError
from headway.seeding import choose_item, make_rng, shuffle_items

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
