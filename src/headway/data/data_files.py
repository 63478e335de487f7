"""Rows of the files that data comes in: JSON lines, JSON, CSV and Parquet.

Guarantees: every problem is a `ConfigError` with the file and, where there is one, the line. Rows come one after
another with their number: the line of a text file, else the place in the file, both counted from 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
"""A row and its number."""

_OBJECTS = "one JSON object a line"


def read_json_lines(path: Path, *, key: str) -> NumberedRows:
    """One object a line; blank lines are skipped."""
    for number, line in _lines(path, key):
        if line.strip():
            yield number, _object(_parsed(line, f"{path}:{number}", _OBJECTS), f"{path}:{number}", _OBJECTS)


def read_json(path: Path, *, key: str) -> NumberedRows:
    """One list of objects; a file that does not start with `[` is read as JSON lines."""
    start = next((line.lstrip() for _, line in _lines(path, key) if line.strip()), "")
    if not start.startswith("["):
        yield from read_json_lines(path, key=key)
        return
    text = "".join(line for _, line in _lines(path, key))
    for number, value in enumerate(_parsed(text, str(path), "a list of objects"), start=1):
        yield number, _object(value, f"{path}, item {number}", "a list of objects")


def read_csv(path: Path, *, key: str) -> NumberedRows:
    """Comma-separated with a line of column names; every value is a text."""
    reader = csv.reader(line for _, line in _lines(path, key))
    try:
        columns = [name.strip() for name in next(reader, [])]
        if len(set(columns)) != len(columns):
            raise ConfigError(f"{path}:1: two columns have the same name: {columns}")
        for cells in reader:
            if len(cells) != len(columns) and cells:
                problem = f"{path}:{reader.line_num}: {len(cells)} cells instead of {len(columns)}"
                raise ConfigError(problem, hint="a cell with a comma or a line break stands in quotes")
            if cells:
                yield reader.line_num, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error


def read_parquet(path: Path, *, key: str) -> NumberedRows:
    """Rows of a Parquet file; needs pyarrow."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError("needs pyarrow", key=key, value=str(path), hint="pip install 'headway[data]'") from error
    try:
        number = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
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
"""By the end of the file's name."""


def _lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from enumerate(lines, start=1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=key, value=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", key=key, value=str(path)) from error


def _parsed(text: str, where: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}", hint=hint) from error


def _object(value: Any, where: str, hint: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {type(value).__name__} instead of an object", hint=hint)
    return value
