"""What an entry of `file_name` means: a file by its ending, `scheme:name`, or the name of a built-in task.

Guarantees: an entry that means nothing is refused with what it may have been meant to be, before anything is read.
Does not look into the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from headway.config import DataArgs
from headway.data import dataset_hub, generated_tasks, reasoning_tasks
from headway.data.data_files import READERS, NumberedRows
from headway.errors import ConfigError

DatasetPart = Literal["all", "train", "held_out"]
"""Which rows of a generated task: built-in ones keep a fifth of theirs for validation."""

SCHEMES = ("hf", "reasoning_gym")
BUILT_IN = (*generated_tasks.ARITHMETIC_TASKS, generated_tasks.STRINGS_TASK)
"""Tasks that are made here."""
_KINDS = (
    f"a {', '.join(READERS)} file, {', '.join(f'{scheme}:name' for scheme in SCHEMES)}, "
    f"{', '.join(BUILT_IN[:-1])} or {BUILT_IN[-1]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEntry:
    """One entry, found and ready to be read."""

    name: str
    """As in `file_name`."""
    label: str
    """Domain of its rows where nothing else says one: a file's name without its ending, a task's name."""
    by_line: bool
    """Rows are numbered by the line of a text file."""
    rows: NumberedRows
    judged: bool = False
    """Its rows bring all that a reward of their own needs, an answer or something else."""

    def place(self, number: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.name}:{number}" if self.by_line else f"{self.name}, row {number}"


def open_entries(
    args: DataArgs, *, key: str, seed: int, part: DatasetPart, names: Sequence[str] | None = None
) -> Iterator[DataEntry]:
    """The entries of `file_name` in order, or only `names`. `key`: where `args` stand in the configuration."""
    if not args.file_name:
        raise ConfigError("names no data", key=f"{key}.file_name", value=[], hint=_KINDS)
    if args.options and all(map(is_file_entry, args.file_name)):
        raise ConfigError("files take no options", key=f"{key}.options", value=dict(args.options))
    for name in args.file_name if names is None else names:
        yield _open(name, args, key=key, seed=seed, part=part)


def has_held_out_rows(name: str) -> bool:
    """Whether an entry keeps rows for validation without being told."""
    return name in BUILT_IN


def is_file_entry(name: str) -> bool:
    """Whether an entry is read from a file, by the end of its name."""
    return Path(name).suffix.lower() in READERS and name.partition(":")[0] not in SCHEMES


def _open(name: str, args: DataArgs, *, key: str, seed: int, part: DatasetPart) -> DataEntry:
    folder = Path(args.dataset_dir or ".").expanduser()
    scheme, _, rest = name.partition(":")
    if is_file_entry(name):
        path = _found(name, folder, f"{key}.file_name")
        kind = path.suffix.lower()
        rows = READERS[kind](path, key=f"{key}.file_name")
        return DataEntry(name=str(path), label=path.stem, by_line=kind in (".jsonl", ".csv"), rows=rows)
    options = entry_options(name, args, key)
    columns = (args.prompt, args.answer or "answer")
    where = f"{key}.file_name"
    if scheme == "hf" and rest:
        rows = dataset_hub.read_dataset_rows(rest, options, folder=folder, key=where)
        return DataEntry(
            name=name, label=rest.rstrip("/").split("/")[min(1, rest.count("/"))], by_line=False, rows=rows
        )
    if scheme == "reasoning_gym" and rest:
        rows = reasoning_tasks.generate_reasoning_rows(
            rest, options, columns=columns, seed=seed, held_out=part == "held_out", key=where
        )
        return DataEntry(name=name, label=scheme, by_line=False, rows=rows, judged=True)
    if name in generated_tasks.ARITHMETIC_TASKS:
        rows = generated_tasks.generate_arithmetic_rows(
            name, options, columns=columns, seed=seed, part=part, key=f"{key}.options"
        )
        return DataEntry(name=name, label=name, by_line=False, rows=rows)
    if name == generated_tasks.STRINGS_TASK:
        rows = generated_tasks.generate_string_rows(
            options, columns=columns, seed=seed, part=part, key=f"{key}.options"
        )
        return DataEntry(name=name, label=name, by_line=False, rows=rows)
    raise _unknown(name, folder, where)


def entry_options(name: str, args: DataArgs, key: str) -> Mapping[str, Any]:
    """What `options` says for one entry: its own before those for all."""
    own = args.options.get(name, {})
    if not isinstance(own, Mapping):
        raise ConfigError("is not a mapping", key=f"{key}.options.{name}", value=own, hint="its options by name")
    return {option: value for option, value in args.options.items() if option not in args.file_name} | dict(own)


def _found(name: str, folder: Path, key: str) -> Path:
    path = folder / Path(name).expanduser()
    if path.is_file():
        return path
    near = _close(path.name, lambda: [other.name for other in path.parent.iterdir()])
    missing = f"there is no such file in {path.parent.resolve()}{near}"
    if not path.parent.is_dir():
        missing = f"there is no folder {path.parent.resolve()}"
    hint = "" if Path(name).is_absolute() else "relative names start from data_args.dataset_dir, else from here"
    raise ConfigError(missing, key=key, value=name, hint=hint)


def _unknown(name: str, folder: Path, key: str) -> ConfigError:
    """What a name that means nothing may have been meant to be."""
    first, _, rest = name.replace("/", ":", 1).partition(":")
    scheme = get_close_matches(first, SCHEMES, 1, 0.75)
    if scheme and rest:
        return ConfigError(f"is no data, did you mean {f'{scheme[0]}:{rest}'!r}?", key=key, value=name, hint=_KINDS)
    if (folder / name).is_dir():
        return ConfigError(f"is a folder, did you mean 'hf:{name}'?", key=key, value=name, hint=_KINDS)
    near = _close(name, lambda: [*BUILT_IN, *(path.name for path in folder.iterdir())])
    return ConfigError(f"is no data{near}", key=key, value=name, hint=_KINDS)


def _close(name: str, names: Callable[[], list[str]]) -> str:
    try:
        close = get_close_matches(name, names(), 1)
    except OSError:
        return ""
    return f", did you mean {close[0]!r}?" if close else ""
