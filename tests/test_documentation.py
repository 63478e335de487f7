"""The documentation as a whole: every page is in the menu, every link leads somewhere, every block of code is tested.

`make docs` builds the site and refuses warnings; what is here needs no packages of the site.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headway.cli import main, parse_arguments
from headway.config import load_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"reference/options.md"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if "results" not in path.parts)
EVERYTHING = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
]
BLOCK = re.compile(r"(?:^ *<!-- ([^\n]*) -->\n)?^ *```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
"""A comment before a block says why it is not run here, or that it is slow."""
CHEAP = (
    "config ",
    "cluster check",
    "completion ",
    "init",
    "simulate examples/simulate_small",
    "plan examples/simulate_small",
)
"""Commands that `make docs-test` runs. All others are only parsed: they train for minutes, serve, or need a run."""


def list_pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from list_pages(value)
    elif isinstance(nav, list):
        for value in nav:
            yield from list_pages(value)


def test_every_page_is_in_the_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = set(list_pages(yaml.safe_load(text[text.index("nav:\n") :])["nav"]))  # what is above has types of Python's
    assert menu == {str(page.relative_to(DOCS)) for page in PAGES} | GENERATED


def make_anchor(heading: str) -> str:
    """The anchor of a heading, as both the site and code hosts make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\s-]", "", plain.strip().lower()).replace(" ", "-")


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    wrong = []
    for page in EVERYTHING:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            if target.startswith(("http:", "https:")) or target in GENERATED or f"reference/{target}" in GENERATED:
                continue
            found = (page.parent / target).resolve() if target else page
            if not found.exists():
                wrong.append(f"{page.name}: {link}")
            elif anchor and found.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                if anchor not in {make_anchor(heading) for heading in headings}:
                    wrong.append(f"{page.name}: no heading for {link}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_code_can_be_read(page: Path) -> None:
    """Python compiles, YAML is YAML, and where a block is a whole configuration it loads."""
    for _, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language in ("yaml", "yml"):
            tree = yaml.safe_load(code)
            assert tree is not None
            if isinstance(tree, dict) and "pretrain" in tree and "…" not in code:
                load_config(tree, [])


def list_python_blocks(*, slow: bool) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for comment, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "python" and not comment.startswith("not run: ") and comment.startswith("slow") == slow:
                found.append((page.stem, code))
    return found


@pytest.mark.parametrize("page, code", list_python_blocks(slow=False))
def test_python_on_a_page_runs(page: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, page, "exec"), {"__name__": f"page_{page}"})


@pytest.mark.docs
@pytest.mark.parametrize("page, code", list_python_blocks(slow=True))
def test_slow_python_on_a_page_runs(page: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, page, "exec"), {"__name__": f"page_{page}"})


@pytest.mark.docs
def test_cheap_commands_on_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = {line for page in PAGES for line in list_commands(page.read_text(encoding="utf-8"))}
    readers_own = re.compile(r"\b(run|rlvr_config)\.yaml")
    cheap = sorted(
        line for line in lines if line.removeprefix("headway ").startswith(CHEAP) and not readers_own.search(line)
    )
    assert len(cheap) > 5
    for line in cheap:
        assert main(shlex.split(line)[1:]) == 0, line


def list_commands(text: str) -> Iterator[str]:
    """Commands in indented or fenced blocks, with the lines that a backslash joins."""
    text = re.sub(r"\\\n\s*", "", text)
    fenced = [code for _, language, code in BLOCK.findall(text) if language in ("bash", "sh", "console")]
    indented = re.findall(r"^    (\S[^\n]*)$", text, re.MULTILINE)
    for line in [*indented, *(line for code in fenced for line in code.splitlines())]:
        line = re.sub(r"\s+#.*$", "", line.strip())
        if line.startswith("headway ") and not re.search(r"[…<>|]|\$\{?\w+|COMMAND", line):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_be_parsed(page: Path) -> None:
    for line in list_commands(page.read_text(encoding="utf-8")):
        words = shlex.split(line)[1:]
        if {"--help", "&&", "&"} & set(words):
            continue
        try:
            parse_arguments(words)
        except SystemExit as error:
            raise AssertionError(f"{page.name}: {line}") from error


def test_every_example_says_in_its_first_line_what_it_is_for() -> None:
    for path in (ROOT / "examples").rglob("*.yaml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# ") and len(first) > 40, path
