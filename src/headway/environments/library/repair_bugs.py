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

from headway.environments.library.repair_modules import MODULES, Arguments
from headway.errors import ConfigError
from headway.seeding import Rng, seeded

_PACKAGES = ("toolkit", "almanac", "workbench", "pantry", "kernel", "ledgers")
_HIDDEN = 12
"""Calls of each function that the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call and what should come of it."""

    module: str
    function: str
    arguments: Arguments
    expected: Any
    """The value, or `{"raises": name}`."""
    shown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """What an agent is given, and what its work is judged by."""

    package: str
    files: Mapping[str, str]
    broken: tuple[str, ...]
    """Paths of the files with a bug."""
    right: Mapping[str, str]
    """Those files as they should be."""
    calls: tuple[Call, ...]


def make_repository(seed: int, *, modules: int, bugs: int) -> Repository:
    """A package of so many modules, of which so many have one bug each. Raises `ConfigError`."""
    if not 1 <= modules <= len(MODULES):
        raise ConfigError(f"must be from 1 to {len(MODULES)}", key="modules", value=modules)
    if not 1 <= bugs <= modules:
        raise ConfigError("must be from 1 to the number of modules", key="bugs", value=bugs)
    rng = seeded(seed, "repair")
    package = _PACKAGES[rng.randrange(0, len(_PACKAGES))]
    names = _some(rng, sorted(MODULES), modules)
    broken = _some(rng, names, bugs)
    files = {"README.md": _readme(package, names), f"{package}/__init__.py": f'"""{package.title()}."""\n'}
    right: dict[str, str] = {}
    calls: list[Call] = []
    for name in sorted(names):
        path, source = f"{package}/{name}.py", source_of(name)
        calls += calls_of(seed, name)
        files[path] = source
        files[f"tests/test_{name}.py"] = _test_file(package, name, [call for call in calls if call.module == name])
        if name in broken:
            right[path] = source
            files[path] = source.replace(*MODULES[name].bugs[rng.randrange(0, len(MODULES[name].bugs))])
    files["tests/__init__.py"] = ""
    return Repository(package=package, files=files, broken=tuple(right), right=right, calls=tuple(calls))


def source_of(name: str) -> str:
    """The text of a module that works."""
    return (Path(__file__).parent / "projects" / f"{name}.py").read_text(encoding="utf-8")


def outcome_of(function: Callable[..., Any], arguments: Arguments) -> Any:
    """What a call gives, in the form of `Call.expected`."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"raises": type(error).__name__}


def calls_of(seed: int, name: str) -> list[Call]:
    """Calls of every function of a module, shown and hidden."""
    module = importlib.import_module(f"headway.environments.library.projects.{name}")
    calls = []
    for function, kind in MODULES[name].functions.items():
        rng = seeded(seed, "repair", name, function)
        asked = [(arguments, True) for arguments in kind.shown]
        asked += [(kind.make(rng), False) for _ in range(_HIDDEN)]
        for arguments, shown in asked:
            expected = outcome_of(getattr(module, function), arguments)
            calls.append(Call(module=name, function=function, arguments=arguments, expected=expected, shown=shown))
    return calls


def _test_file(package: str, name: str, calls: Sequence[Call]) -> str:
    lines = [
        "import unittest",
        "",
        f"from {package} import {name}",
        "",
        "",
        f"class {name.title()}Test(unittest.TestCase):",
    ]
    for function in MODULES[name].functions:
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


def _readme(package: str, names: Sequence[str]) -> str:
    listed = "\n".join(f"* `{package}/{name}.py`" for name in sorted(names))
    return f"# {package}\n\n{listed}\n\nRun the tests with `python3 -m unittest`.\n"


def _some(rng: Rng, items: Sequence[str], count: int) -> list[str]:
    order = list(range(len(items)))
    rng.shuffle(order)
    return [items[place] for place in order[:count]]
