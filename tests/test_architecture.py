"""The shape of the code is tested like its behaviour: layers, cycles, forbidden modules, sizes.

Imports are read from the syntax tree, so that those inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LAYERS: dict[str, int] = {
    **dict.fromkeys(
        (
            "types",
            "errors",
            "extras",
            "codec",
            "deadlines",
            "user_code",
            "seeding",
            "settings",
            "config",
            "plugins",
            "registry",
            "version",
        ),
        0,
    ),
    "algorithm_traits": 0,
    **dict.fromkeys(
        ("algorithms", "monitor", "data", "rewards", "environments", "ledger", "sandbox", "models", "processes"), 1
    ),
    **dict.fromkeys(("engines", "trainers", "weights", "cluster", "denoising"), 2),
    **dict.fromkeys(("rollout", "flow", "serving"), 3),
    "runs": 4,
    **dict.fromkeys(("sim", "dashboard"), 5),
    "placement": 6,
    "launch": 7,
    "cli": 8,
    "api": 9,
    **dict.fromkeys(("", "__main__"), 10),
}
BACK_ENDS = frozenset(name for name, layer in LAYERS.items() if layer == 2)
VIRTUAL = frozenset({"flow", "rollout", "sim"})
"""Packages that run on any clock: time is the event loop's, randomness is injected."""
REAL = frozenset({"time", "random", "threading", "torch"})
WITHOUT_TORCH = ("flow", "rollout", "serving", "sim", "cli", "config", "monitor", "ledger", "placement")
PREPOSITIONS = frozenset(
    (
        *("About", "Above", "After", "Against", "Among", "As", "At", "Before", "Behind", "Below", "Beside", "Between"),
        *("Beyond", "By", "During", "For", "From", "In", "Inside", "Into", "Of", "On", "Or", "Outside", "Over"),
        *("Since", "Through", "To", "Under", "Until", "Upon", "While", "With", "Within", "Without"),
    )
)
"""Words that no docstring begins with: what it describes has a name, and comes first."""
MOST_LINES, MOST_FILES = 77_100, 474
"""Of the whole package."""
MOST_FILES_OF_THE_ROOT = 12
"""Of `launch`, the composition root: what it puts together belongs to other packages."""
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_FILE = 400


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((SOURCE / "headway").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[str]:
    """Dotted names that `module` imports; of `from a import b`, `a.b` where that is a module, else `a`."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    is_package = modules()[module].name == "__init__.py"
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, node.module] if node.module else kept)


def part_of(module: str) -> str:
    """`headway.flow.stage` → `flow`; the package itself → ``."""
    return [*module.split("."), ""][1]


def test_every_part_of_the_package_has_a_layer() -> None:
    strangers = {part_of(module) for module in modules()} - LAYERS.keys() - {""}
    assert not strangers, f"say in DESIGN and here which layer they are on: {sorted(strangers)}"


def test_imports_only_go_down() -> None:
    wrong = []
    for module in modules():
        for imported in set(imports(module)):
            if imported.startswith("headway.") and not _allowed(module, imported):
                wrong.append(f"{module} imports {imported}")
    assert not wrong, "\n" + "\n".join(sorted(wrong))


def _allowed(module: str, imported: str) -> bool:
    importer, part = part_of(module), part_of(imported)
    if importer == part:
        return True
    upper, lower = LAYERS.get(importer, 0), LAYERS.get(part, 0)
    if importer == "denoising" and part in ("engines", "trainers", "weights"):
        return True  # made of their parts: the face, the threads, the receivers and the checkpoints are the same
    if (importer, part) == ("engines", "weights"):
        return True  # receivers are made of the layouts of versions
    if (importer, imported) == ("trainers", "headway.weights.device_memory"):
        return True  # ranks on one card read each other's memory as engines read versions
    if lower == 2 and upper in (2, 3):
        return imported == f"headway.{part}.base"
    if (importer, part) in (
        ("flow", "rollout"),
        ("serving", "rollout"),
        ("settings", "config"),
        ("rewards", "sandbox"),
        ("environments", "sandbox"),
        ("environments", "data"),  # questions are rows of data sets,
        ("environments", "rewards"),  # and their answers are judged as anywhere else
    ):
        return True
    if importer == "processes":
        return part in ("codec", "errors", "types")
    if part == "processes" and importer in ("environments", "rewards", "sandbox"):
        return True  # below everything that starts children
    if part == "dashboard":
        return importer == "cli"
    return lower < upper or (lower == upper == 0 and part != "config")


def test_there_is_no_cycle_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for module in modules():
        above = graph.setdefault(part_of(module), set())
        above |= {part_of(name) for name in imports(module) if name in modules()} - {part_of(module), ""}
    while leaves := [part for part, needed in graph.items() if not needed & graph.keys()]:
        for part in leaves:
            del graph[part]
    assert not graph, {part: sorted(needed & graph.keys()) for part, needed in graph.items()}


def test_there_is_no_import_cycle() -> None:
    graph = {module: {name for name in imports(module) if name in modules()} - {module} for module in modules()}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            pytest.fail(" → ".join([*path[path.index(module) :], module]))
        if module not in done:
            for following in sorted(graph[module]):
                visit(following, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_the_scheduler_and_the_simulator_know_no_real_clock_chance_thread_or_tensor() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if part_of(module) in VIRTUAL
        for imported in set(imports(module))
        if imported.split(".")[0] in REAL
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_there_is_no_utils() -> None:
    bags = {"utils", "util", "helpers", "misc", "common"}
    assert not [module for module in modules() if bags & set(module.split("."))]


def test_everything_but_the_back_ends_imports_without_torch() -> None:
    wanted = [name for name in modules() if part_of(name) in (*WITHOUT_TORCH, "launch", "settings", "types", "")]
    code = "\n".join(
        (
            "import importlib, sys",
            "class Blocker:",
            "    def find_spec(self, name, path=None, target=None):",
            "        if name.split('.')[0] in ('torch', 'transformers', 'numpy'):",
            "            raise ImportError(f'{name} was imported')",
            "sys.meta_path.insert(0, Blocker())",
            f"for name in {wanted!r}: importlib.import_module(name)",
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_what_all_names_exists_and_is_sorted() -> None:
    for name in modules():
        if any(_is_all(node) for node in tree_of(name).body):
            module = importlib.import_module(name)
            assert sorted(set(module.__all__)) == list(module.__all__), f"{name}.__all__ is not sorted"
            missing = [public for public in module.__all__ if not hasattr(module, public)]
            assert not missing, f"{name}.__all__ names what is not there: {missing}"


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def test_names_of_public_classes_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for module in modules():
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_names_of_modules_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        found.setdefault(path.stem, []).append(module)
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert not shared.keys() - {"__init__", "base", "settings"}, shared


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """Docstrings of the module, its classes and functions, and of their fields."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_no_docstring_begins_with_a_preposition() -> None:
    wrong = [
        f"{module}:{line}: {text.splitlines()[0]}"
        for module in modules()
        for line, text in docstrings(module)
        if text and text.split()[0].strip(":,;.") in PREPOSITIONS
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_package_stays_small() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values())
    assert lines <= MOST_LINES and len(modules()) <= MOST_FILES, (lines, len(modules()))


def test_the_composition_root_stays_small() -> None:
    files = sorted(path.name for module, path in modules().items() if part_of(module) == "launch")
    assert len(files) <= MOST_FILES_OF_THE_ROOT, files


def test_every_module_says_what_it_is_for() -> None:
    silent = [module for module in modules() if not ast.get_docstring(tree_of(module))]
    assert not silent, f"no docstring: {silent}"


def test_functions_and_files_stay_short() -> None:
    long = []
    for module, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES_OF_A_FILE:
            long.append(f"{module}: {lines} lines, at most {MOST_LINES_OF_A_FILE}")
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{module}.{node.name}: {lines} lines, at most {MOST_LINES_OF_A_FUNCTION}")
    assert not long, "\n" + "\n".join(long)


def test_the_wheel_takes_every_data_file() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["headway"]
    taken = {path for pattern in patterns for path in (SOURCE / "headway").glob(pattern)}
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", str(SOURCE)], capture_output=True, text=True
    )
    files = {SOURCE.parent / name for name in listed.stdout.splitlines() if not name.endswith(".py")}
    assert not files - taken, f"no pattern of package-data takes {files - taken}"
