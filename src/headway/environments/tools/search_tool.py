"""A search tool over local documents, with a BM25 index in memory.

A document is a line of a `.jsonl` file, or a paragraph of any other file. Files are read once per process and never
written; the policy sees documents, not paths. A folder stands for its `.jsonl`, `.txt` and `.md` files.

Guarantees: results depend on documents and query alone; equal scores keep the order of the documents. Scores are those
of Robertson and Zaragoza with k₁ = 1.2, b = 0.75 and an inverse document frequency that is never negative. The index
knows no stems, synonyms or phrases. It suits thousands of documents, not millions.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from math import log
from pathlib import Path

from headway.environments.tools.base import Tool, ToolArguments, ToolRefused, make_schema
from headway.errors import ConfigError

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75
_SUFFIXES = (".jsonl", ".txt", ".md")
_TEXT_KEYS = ("text", "contents", "content", "passage", "body", "document")
_TITLE_KEYS = ("title", "name", "id")


def split_words(text: str) -> list[str]:
    """Return the words of a text in the form that is compared."""
    return _WORD.findall(text.casefold())


class BM25Index:
    """Finds documents by words. Documents are numbered; their weights are computed once."""

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(split_words(document)) for document in documents]
        lengths = [sum(count.values()) for count in counts]
        average = sum(lengths) / max(len(lengths), 1) or 1.0
        containing = Counter(word for count in counts for word in count)
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = _K1 * (1 - _B + _B * length / average)
            for word, times in count.items():
                rarity = log(1 + (len(counts) - containing[word] + 0.5) / (containing[word] + 0.5))
                weight = rarity * times * (_K1 + 1) / (times + norm)
                self._weights.setdefault(word, []).append((number, weight))

    def search(self, query: str, most: int) -> list[tuple[int, float]]:
        """Return numbers and scores of the best documents that share a word with the query, best first."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(split_words(query)):
            for number, weight in self._weights.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        return nsmallest(most, scores.items(), key=lambda scored: (-scored[1], scored[0]))


@dataclass(frozen=True, slots=True)
class SearchDocument:
    """A document that a search can return."""

    title: str
    text: str


def make_search_tool(files: Sequence[str], *, most: int = 3, longest: int = 1000) -> Tool:
    """Make a tool that answers with at most `most` documents of at most `longest` characters. Raises `ConfigError`."""
    if most < 1 or longest < 1:
        raise ConfigError("must be at least 1", key="most" if most < 1 else "longest", value=min(most, longest))
    documents, index = _load_index(tuple(files))

    async def call(arguments: ToolArguments) -> str:
        if not str(arguments["query"]).strip():
            raise ToolRefused("the query is empty")
        found = [documents[number] for number, _ in index.search(arguments["query"], most)]
        texts = (one.text if len(one.text) <= longest else f"{one.text[:longest]}…" for one in found)
        parts = (f"[{rank}] {one.title}\n{text}" for rank, (one, text) in enumerate(zip(found, texts, strict=True), 1))
        return "\n\n".join(parts) or "Nothing found."

    return Tool(
        name="search",
        description="Search a collection of documents by words; answers with the best ones.",
        parameters=make_schema({"query": "string"}),
        call=call,
    )


@lru_cache(maxsize=8)
def _load_index(files: tuple[str, ...]) -> tuple[tuple[SearchDocument, ...], BM25Index]:
    documents = tuple(one for path in _find_files(files) for one in _read_documents(path))
    if not documents:
        raise ConfigError("there is no document", key="files", value=list(files))
    return documents, BM25Index([f"{one.title} {one.text}" for one in documents])


def _find_files(files: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            found += sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES and one.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError("there is no such file or folder", key="files", value=name)
    return found


def _read_documents(path: Path) -> list[SearchDocument]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        return [_parse_jsonl_document(path, number, line) for number, line in lines if line.strip()]
    return [SearchDocument(path.stem, part.strip()) for part in text.split("\n\n") if part.strip()]


def _parse_jsonl_document(path: Path, number: int, line: str) -> SearchDocument:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} is not JSON: {error}", key="files", value=str(path)) from error
    if isinstance(value, str):
        return SearchDocument(path.stem, value)
    text = next((value[key] for key in _TEXT_KEYS if key in value), None) if isinstance(value, dict) else None
    if text is None:
        raise ConfigError(f"line {number} has none of {', '.join(_TEXT_KEYS)}", key="files", value=str(path))
    title = next((str(value[key]) for key in _TITLE_KEYS if key in value), path.stem)
    return SearchDocument(title, str(text))
