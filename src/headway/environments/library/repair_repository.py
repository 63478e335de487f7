"""Repositories with a bug from a seed: modules that work, one change that breaks them, and calls that show it.

Guarantees: the same seed and sizes give the same repository, bug and calls; unchanged modules pass every call; at least
one call that the agent can see fails. Expected values are those of the unbroken modules, computed here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.environments.library.repair_modules import REPAIR_MODULES, CallArguments
from headway.errors import ConfigError
from headway.seeding import Rng, make_rng

_PACKAGES = ("toolkit", "almanac", "workbench", "pantry", "kernel", "ledgers")
_HIDDEN_CHECKS = 12
"""Calls of each function that the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairCheck:
    """A call and what should come of it."""

    module: str
    function: str
    arguments: CallArguments
    expected: Any
    """The value, or `{"raises": name}`."""
    shown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRepository:
    """What an agent is given, and what its work is judged by."""

    package: str
    files: Mapping[str, str]
    broken: tuple[str, ...]
    """Paths of the files with a bug."""
    right: Mapping[str, str]
    """Those files as they should be."""
    calls: tuple[RepairCheck, ...]


def make_repository(seed: int, *, modules: int, bugs: int) -> RepairRepository:
    """A package of so many modules, of which so many have one bug each. Raises `ConfigError`."""
    if not 1 <= modules <= len(REPAIR_MODULES):
        raise ConfigError(f"must be from 1 to {len(REPAIR_MODULES)}", key="modules", value=modules)
    if not 1 <= bugs <= modules:
        raise ConfigError("must be from 1 to the number of modules", key="bugs", value=bugs)
    rng = make_rng(seed, "repair")
    package = _PACKAGES[rng.randrange(0, len(_PACKAGES))]
    names = _sample(rng, sorted(REPAIR_MODULES), modules)
    broken = _sample(rng, names, bugs)
    files = {"README.md": _make_readme(package, names), f"{package}/__init__.py": f'"""{package.title()}."""\n'}
    right: dict[str, str] = {}
    calls: list[RepairCheck] = []
    for name in sorted(names):
        path, source = f"{package}/{name}.py", read_module_source(name)
        calls += make_checks(seed, name)
        files[path] = source
        files[f"tests/test_{name}.py"] = _make_test_file(package, name, [call for call in calls if call.module == name])
        if name in broken:
            right[path] = source
            files[path] = source.replace(*REPAIR_MODULES[name].bugs[rng.randrange(0, len(REPAIR_MODULES[name].bugs))])
    files["tests/__init__.py"] = ""
    return RepairRepository(package=package, files=files, broken=tuple(right), right=right, calls=tuple(calls))


def read_module_source(name: str) -> str:
    """The text of a module that works."""
    return (Path(__file__).parent / "projects" / f"{name}.py").read_text(encoding="utf-8")


def call_outcome(function: Callable[..., Any], arguments: CallArguments) -> Any:
    """What a call gives, in the form of `RepairCheck.expected`."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"raises": type(error).__name__}


def make_checks(seed: int, name: str) -> list[RepairCheck]:
    """Calls of every function of a module, shown and hidden."""
    module = importlib.import_module(f"headway.environments.library.projects.{name}")
    calls = []
    for function, kind in REPAIR_MODULES[name].functions.items():
        rng = make_rng(seed, "repair", name, function)
        asked = [(arguments, True) for arguments in kind.shown]
        asked += [(kind.make(rng), False) for _ in range(_HIDDEN_CHECKS)]
        for arguments, shown in asked:
            expected = call_outcome(getattr(module, function), arguments)
            calls.append(
                RepairCheck(module=name, function=function, arguments=arguments, expected=expected, shown=shown)
            )
    return calls


def _make_test_file(package: str, name: str, calls: Sequence[RepairCheck]) -> str:
    lines = [
        "import unittest",
        "",
        f"from {package} import {name}",
        "",
        "",
        f"class {name.title()}Test(unittest.TestCase):",
    ]
    for function in REPAIR_MODULES[name].functions:
        lines.append(f"    def test_{function}(self):")
        for call in calls:
            if call.shown and call.function == function:
                made = f"{name}.{function}({', '.join(map(repr, call.arguments))})"
                if isinstance(call.expected, dict) and "raises" in call.expected:
                    lines += [f"        with self.assertRaises({call.expected['raises']}):", f"            {made}"]
                else:
                    lines.append(f"        self.assertEqual({made}, {call.expected!r})")
        lines.append("")
    return "\n".join(lines)


def _make_readme(package: str, names: Sequence[str]) -> str:
    listed = "\n".join(f"* `{package}/{name}.py`" for name in sorted(names))
    return f"# {package}\n\n{listed}\n\nRun the tests with `python3 -m unittest`.\n"


def _sample(rng: Rng, items: Sequence[str], count: int) -> list[str]:
    order = list(range(len(items)))
    rng.shuffle(order)
    return [items[place] for place in order[:count]]
