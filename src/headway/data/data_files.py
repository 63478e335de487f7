"""Readers of data files: JSON lines, JSON, CSV, Parquet and plain lines.

Guarantees: every problem is a `ConfigError` with the file and, where there is one, the line. Rows are numbered from 1:
by the line of a text file, else by their place in the file.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.extras import suggest_install

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
"""Rows with their numbers."""

_LINES_HINT = "one JSON object a line"
_LIST_HINT = "a list of objects"


def read_json_lines(path: Path, *, key: str) -> NumberedRows:
    """Yield one object per line; blank lines are skipped."""
    for number, line in _read_lines(path, key):
        if line.strip():
            place = f"{path}:{number}"
            yield number, _check_object(_parse_json(line, place, _LINES_HINT), place, _LINES_HINT)


def read_json(path: Path, *, key: str) -> NumberedRows:
    """Yield the objects of one list; a file that does not start with `[` is read as JSON lines."""
    start = next((line.lstrip() for _, line in _read_lines(path, key) if line.strip()), "")
    if not start.startswith("["):
        yield from read_json_lines(path, key=key)
        return
    text = "".join(line for _, line in _read_lines(path, key))
    for number, value in enumerate(_parse_json(text, str(path), _LIST_HINT), start=1):
        yield number, _check_object(value, f"{path}, item {number}", _LIST_HINT)


def read_text_lines(path: Path, columns: tuple[str, str], *, key: str) -> NumberedRows:
    """Yield a prompt per line; blank lines are skipped. The answer is what stands in its first quotation marks, if any.

    Such are the prompts of pictures that should show a text. `columns` are those of the prompt and the answer.
    """
    prompt, answer = columns
    for number, line in _read_lines(path, key):
        if line.strip():
            quoted = line.strip().split('"')
            yield number, {prompt: line.strip(), answer: quoted[1] if len(quoted) > 2 else line.strip()}


def read_csv(path: Path, *, key: str) -> NumberedRows:
    """Yield the rows of a comma-separated file whose first line has the column names; every value is a text."""
    reader = csv.reader(line for _, line in _read_lines(path, key))
    try:
        columns = [name.strip() for name in next(reader, [])]
        if len(set(columns)) != len(columns):
            raise ConfigError(f"{path}:1: two columns have the same name: {columns}")
        for cells in filter(None, reader):
            if len(cells) != len(columns):
                problem = f"{path}:{reader.line_num}: {len(cells)} cells instead of {len(columns)}"
                raise ConfigError(problem, hint="a cell with a comma or a line break stands in quotes")
            yield reader.line_num, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error


def read_parquet(path: Path, *, key: str) -> NumberedRows:
    """Yield the rows of a Parquet file; needs pyarrow."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError("needs pyarrow", key=key, value=str(path), hint=suggest_install("data")) from error
    try:
        with ParquetFile(path) as file:
            yield from enumerate((row for batch in file.iter_batches(1024) for row in batch.to_pylist()), start=1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", key=key, value=str(path)) from error
    except ArrowException as error:
        raise ConfigError(f"is no Parquet file: {error}", key=key, value=str(path)) from error


READERS: Mapping[str, Callable[..., NumberedRows]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""Readers by the suffix of the file."""


def _read_lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from enumerate(lines, start=1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=key, value=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", key=key, value=str(path)) from error


def _parse_json(text: str, place: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}", hint=hint) from error


def _check_object(value: Any, place: str, hint: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {type(value).__name__} instead of an object", hint=hint)
    return value
