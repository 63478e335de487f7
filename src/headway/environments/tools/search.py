"""Search over local documents: BM25 over text and JSONL files.

A document is a line of a `.jsonl` file, or a paragraph of any other. Files are read once for each process and never
written; the policy sees documents, not paths. A folder stands for its `.jsonl`, `.txt` and `.md` files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from headway.environments.tools.base import Arguments, Tool, ToolRefused
from headway.environments.tools.index import Index
from headway.errors import ConfigError

_KINDS = (".jsonl", ".txt", ".md")
_TEXT_KEYS = ("text", "contents", "content", "passage", "body", "document")
_TITLE_KEYS = ("title", "name", "id")


@dataclass(frozen=True, slots=True)
class Document:
    """What a search gives back."""

    title: str
    text: str


def search_tool(files: Sequence[str], *, most: int = 3, longest: int = 1000) -> Tool:
    """Answers with at most `most` documents of at most `longest` characters. Raises `ConfigError`."""
    if most < 1 or longest < 1:
        raise ConfigError("must be at least 1", key="most" if most < 1 else "longest", value=min(most, longest))
    documents, index = _library(tuple(files))

    async def call(arguments: Arguments) -> str:
        if not str(arguments["query"]).strip():
            raise ToolRefused("the query is empty")
        found = [documents[number] for number, _ in index.search(arguments["query"], most)]
        parts = (f"[{place}] {one.title}\n{_cut(one.text, longest)}" for place, one in enumerate(found, 1))
        return "\n\n".join(parts) or "Nothing found."

    return Tool(
        name="search",
        description="Search a collection of documents by words; answers with the best ones.",
        parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        call=call,
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


@lru_cache(maxsize=8)
def _library(files: tuple[str, ...]) -> tuple[tuple[Document, ...], Index]:
    documents = tuple(one for path in _paths(files) for one in _documents(path))
    if not documents:
        raise ConfigError("there is no document", key="files", value=list(files))
    return documents, Index([f"{one.title} {one.text}" for one in documents])


def _paths(files: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            found += sorted(one for one in path.rglob("*") if one.suffix in _KINDS and one.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError("there is no such file or folder", key="files", value=name)
    return found


def _documents(path: Path) -> list[Document]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        return [_entry(path, number, line) for number, line in lines if line.strip()]
    return [Document(path.stem, part.strip()) for part in text.split("\n\n") if part.strip()]


def _entry(path: Path, number: int, line: str) -> Document:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} is not JSON: {error}", key="files", value=str(path)) from error
    if isinstance(value, str):
        return Document(path.stem, value)
    text = next((value[key] for key in _TEXT_KEYS if key in value), None) if isinstance(value, dict) else None
    if text is None:
        raise ConfigError(f"line {number} has none of {', '.join(_TEXT_KEYS)}", key="files", value=str(path))
    title = next((str(value[key]) for key in _TITLE_KEYS if key in value), path.stem)
    return Document(title, str(text))
