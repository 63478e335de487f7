"""Hooks of the documentation site: pages that are generated, and links that leave the folder of the documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from headway.config.field_types import FieldShape, get_fields  # noqa: E402
from headway.config.resolved_config import to_plain_value  # noqa: E402
from headway.config.schema import Config  # noqa: E402

OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:examples|src|benchmarks|tests)/[\w./-]+)(#\w+)?\)")
"""Links to files of the repository that are no pages."""
COPIES = "repository"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add every page of results to the navigation."""
    results = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    config.nav = [*(config.nav or []), {"Results": [f"results/{name}" for name in results]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated reference, and the files of the repository that pages link to."""
    reference = File.generated(config, "reference/options.md", content=make_config_reference())
    files.append(reference)
    wanted: set[str] = set()
    for page in files.documentation_pages():
        wanted |= {path for path, _ in OUTSIDE.findall(page.content_string)}
    for path in sorted(wanted):
        source = ROOT / path
        if not source.is_file():
            raise FileNotFoundError(f"a page links to {path}, which does not exist")
        files.append(File.generated(config, f"{COPIES}/{path}.txt", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave the documentation to the copies of the files."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda found: f"]({up}{COPIES}/{found[1]}.txt)", markdown)


# -- the reference of the configuration


def make_config_reference() -> str:
    """Return a page with every key of the configuration: its type, its default and its meaning."""
    lines = [
        "# Every option",
        "",
        "This page is generated from the schema. `<name>` stands for a name that you choose, `[]` for an element of a",
        "list.",
        "`headway config explain FILE` shows the values of a run, and where each comes from: the file and line, an",
        "override, a translated key of another project, or what it was derived from.",
        "",
    ]
    _describe_block(Config, "", lines)
    return "\n".join(lines) + "\n"


def _describe_block(block: type, prefix: str, lines: list[str]) -> None:
    meanings, inner = read_meanings(block), []
    title, purpose = f"`{prefix[:-1]}`" if prefix else "Top level", (inspect.getdoc(block) or "").split("\n\n")[0]
    lines += [f"## {title}", "", purpose, "", f"In `{block.__module__}.{block.__qualname__}`.", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, option in get_fields(block).items():
        shape, key = option.shape, f"{prefix}{name}"
        nested = shape.block or (shape.item.block if shape.item is not None else None)
        if nested is not None:
            ending = {"list": "[].", "map": ".<name>."}.get(shape.kind, ".")
            inner.append((nested, f"{key}{ending}"))
        kind = "block, see below" if nested else describe_type(shape)
        default = "" if nested and not option.default else describe_default(option.default)
        cells = (f"`{key}`", kind, default, meanings.get(name, ""))
        lines.append(f"| {' | '.join(_escape(cell) for cell in cells)} |")
    lines.append("")
    for nested, path in inner:
        _describe_block(nested, path, lines)


def describe_type(shape: FieldShape) -> str:
    """Return which values are accepted."""
    if shape.kind == "choice":
        return ", ".join(f"`{name}`" for name in shape.choices) + (", or null" if shape.optional else "")
    return shape.describe()


def describe_default(value: Any) -> str:
    """Return a default as YAML would have it."""
    if value is dataclasses.MISSING:
        return "has to be given"
    return f"`{json.dumps(to_plain_value(value), ensure_ascii=False)}`"


def read_meanings(block: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, those that it inherits included."""
    found: dict[str, str] = {}
    for base in reversed(block.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
