"""Entries of `file_name`: a file by its suffix, `scheme:name`, or the name of a built-in task.

Guarantees: an unknown entry is refused, with a suggestion, before anything is read. Rows are not looked into here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from headway.config import DataArgs
from headway.data.data_files import READERS, NumberedRows, read_text_lines
from headway.data.dataset_hub import read_dataset_rows
from headway.data.generated_tasks import ARITHMETIC_TASKS, STRINGS_TASK, generate_arithmetic_rows, generate_string_rows
from headway.data.reasoning_tasks import generate_reasoning_rows
from headway.errors import ConfigError, suggest_close_match

DatasetPart = Literal["all", "train", "held_out"]
"""Which rows of a generated task to read: built-in tasks keep a fifth of theirs for validation."""

SCHEMES = ("hf", "reasoning_gym")
BUILT_IN = (*ARITHMETIC_TASKS, STRINGS_TASK)
"""Tasks that are generated here. They keep rows for validation without being told."""
_LINES = ".txt"
"""Suffix of files with a prompt per line."""
_HINT = (
    f"a {', '.join((*READERS, _LINES))} file, {', '.join(f'{scheme}:name' for scheme in SCHEMES)}, "
    f"{', '.join(BUILT_IN[:-1])} or {BUILT_IN[-1]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEntry:
    """One entry that was found and can be read."""

    name: str
    """The entry as written in `file_name`; the path of a file."""
    label: str
    """Domain of its rows where nothing else says one: the stem of a file, the name of a task."""
    rows: NumberedRows
    by_line: bool = False
    """Whether rows are numbered by the lines of a text file."""
    has_own_reward: bool = False
    """Whether its rows bring all that their own reward needs, with or without an answer."""

    def place(self, number: int) -> str:
        """Return where a row stands, for messages."""
        return f"{self.name}:{number}" if self.by_line else f"{self.name}, row {number}"


def open_entries(
    args: DataArgs, *, key: str, seed: int, part: DatasetPart, names: Sequence[str] | None = None
) -> Iterator[DataEntry]:
    """Open the entries of `file_name` in order, or only `names`. `key` is the place of `args` in the configuration."""
    if not args.file_name:
        raise ConfigError("names no data", key=f"{key}.file_name", value=[], hint=_HINT)
    if args.options and all(map(is_file_entry, args.file_name)):
        raise ConfigError("files take no options", key=f"{key}.options", value=dict(args.options))
    for name in args.file_name if names is None else names:
        yield _open_entry(name, args, key=key, seed=seed, part=part)


def is_file_entry(name: str) -> bool:
    """Return whether an entry is read from a file, which its suffix decides."""
    return Path(name).suffix.lower() in (*READERS, _LINES) and name.partition(":")[0] not in SCHEMES


def _open_entry(name: str, args: DataArgs, *, key: str, seed: int, part: DatasetPart) -> DataEntry:
    folder, name_key = Path(args.dataset_dir or ".").expanduser(), f"{key}.file_name"
    scheme, _, rest = name.partition(":")
    columns = (args.prompt, args.answer or "answer")
    if is_file_entry(name):
        path = _find_file(name, folder, name_key)
        suffix = path.suffix.lower()
        rows = read_text_lines(path, columns, key=name_key) if suffix == _LINES else READERS[suffix](path, key=name_key)
        return DataEntry(name=str(path), label=path.stem, by_line=suffix in (".jsonl", ".csv", _LINES), rows=rows)
    options = entry_options(name, args, key)
    if scheme == "hf" and rest:
        rows = read_dataset_rows(rest, options, folder=folder, key=name_key)
        return DataEntry(name=name, label=rest.rstrip("/").split("/")[min(1, rest.count("/"))], rows=rows)
    if scheme == "reasoning_gym" and rest:
        held_out = part == "held_out"
        rows = generate_reasoning_rows(rest, options, columns=columns, seed=seed, held_out=held_out, key=name_key)
        return DataEntry(name=name, label=scheme, rows=rows, has_own_reward=True)
    if name in ARITHMETIC_TASKS:
        rows = generate_arithmetic_rows(name, options, columns=columns, seed=seed, part=part, key=f"{key}.options")
        return DataEntry(name=name, label=name, rows=rows)
    if name == STRINGS_TASK:
        rows = generate_string_rows(options, columns=columns, seed=seed, part=part, key=f"{key}.options")
        return DataEntry(name=name, label=name, rows=rows)
    raise _unknown_entry(name, folder, name_key)


def entry_options(name: str, args: DataArgs, key: str) -> Mapping[str, Any]:
    """Return the `options` of one entry; its own come before those for all."""
    own = args.options.get(name, {})
    if not isinstance(own, Mapping):
        raise ConfigError("is not a mapping", key=f"{key}.options.{name}", value=own, hint="its options by name")
    return {option: value for option, value in args.options.items() if option not in args.file_name} | dict(own)


def _find_file(name: str, folder: Path, key: str) -> Path:
    path = folder / Path(name).expanduser()
    if path.is_file():
        return path
    if path.parent.is_dir():
        close = _suggest(path.name, lambda: [other.name for other in path.parent.iterdir()])
        problem = f"there is no such file in {path.parent.resolve()}{close}"
    else:
        problem = f"there is no folder {path.parent.resolve()}"
    hint = "" if Path(name).is_absolute() else "relative names start from data_args.dataset_dir, else from here"
    raise ConfigError(problem, key=key, value=name, hint=hint)


def _unknown_entry(name: str, folder: Path, key: str) -> ConfigError:
    """Return the error about an unknown entry, with a suggestion."""
    first, _, rest = name.replace("/", ":", 1).partition(":")
    scheme = get_close_matches(first, SCHEMES, 1, 0.75)
    if scheme and rest:
        problem = f"is no data, did you mean {f'{scheme[0]}:{rest}'!r}?"
    elif (folder / name).is_dir():
        problem = f"is a folder, did you mean 'hf:{name}'?"
    else:
        problem = f"is no data{_suggest(name, lambda: [*BUILT_IN, *(path.name for path in folder.iterdir())])}"
    return ConfigError(problem, key=key, value=name, hint=_HINT)


def _suggest(name: str, list_names: Callable[[], list[str]]) -> str:
    try:
        return suggest_close_match(name, list_names())
    except OSError:
        return ""
