"""The data of a run, from its configuration: what is trained on, what is held out, and in which order.

Guarantees: every problem with the data is a `ConfigError` here, before anything starts. A prompt that is held out here
is never trained. The same configuration and files give the same task at the same position in every process. Neither
torch nor a tokenizer is imported: the caller passes a tokenizer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from headway.config import DataArgs, ResolvedConfig, TrainingDataArgs
from headway.data.data_entries import BUILT_IN, DatasetPart, entry_options, is_file_entry, open_entries
from headway.data.prompts import PromptTokenizer
from headway.data.task_reading import TaskReader
from headway.data.task_sources import InterleavedSource, ListSource, SizedSource
from headway.data.task_table import TaskSelection, TaskTable
from headway.errors import ConfigError, suggest_close_match
from headway.seeding import make_rng

_TRAIN_KEY, _VALIDATION_KEY = "actor_train.data_args", "validation.data_args"
_NOT_INHERITED = frozenset({"file_name", "options"})
"""Keys of `data_args` that validation does not take over from training."""
_SMALLEST_SHARE = 0.001
TableReader = Callable[[DataArgs, str, DatasetPart, Sequence[str] | None], TaskTable]
"""Reads entries of `file_name`, all of them or only those named, into a table: `read(args, key, part, names)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSources:
    """The sources of a run."""

    train: SizedSource
    """Never ends."""
    validation: SizedSource | None
    """Ends after its last task; `len` is the number of tasks. `None` if nothing is held out."""
    rows: int | None
    """Tasks of one pass over the data of training. `None` if it has no end."""
    notes: tuple[str, ...] = ()
    """One line each about prompts left out, duplicates, or columns that are not JSON."""


def make_sources(resolved: ResolvedConfig, tokenizer: PromptTokenizer) -> DataSources:
    """Read the data of `actor_train.data_args` and of validation."""
    notes: list[str] = []
    config, limit = resolved.config, resolved.derived.prompt_length

    def read(args: DataArgs, key: str, part: DatasetPart, names: Sequence[str] | None) -> TaskTable:
        reader = TaskReader(args, tokenizer, config.rewards, key=key, limit=limit)
        table = reader.read(open_entries(args, key=key, seed=config.seed, part=part, names=names))
        notes.extend(reader.notes())
        return table

    train, held_out = split_train_and_validation(resolved, read, notes)
    shuffle = resolve_validation_args(resolved).shuffle
    return DataSources(
        train=_order_tasks(train, config.actor_train.data_args, config.seed),
        validation=None if held_out is None else ListSource(held_out, seed=config.seed, shuffle=shuffle),
        rows=len(train),
        notes=tuple(dict.fromkeys(notes)),
    )


def split_train_and_validation(
    resolved: ResolvedConfig, read: TableReader, notes: list[str]
) -> tuple[TaskSelection, TaskSelection | None]:
    """Return the rows to train on, at most `max_rows` of them, and the rows held out, if there are any."""
    args, (train, held_out) = resolved.config.actor_train.data_args, _split(resolved, read, notes)
    if args.max_rows is not None and args.max_rows < len(train):
        order = list(range(len(train)))
        if args.shuffle:
            make_rng(resolved.config.seed, "data", "max_rows").shuffle(order)
        notes.append(f"{_TRAIN_KEY}.max_rows: {args.max_rows} of {len(train)} rows are trained")
        train = train.select(sorted(order[: args.max_rows]))
    return train, held_out


def _split(resolved: ResolvedConfig, read: TableReader, notes: list[str]) -> tuple[TaskSelection, TaskSelection | None]:
    args, validation = resolved.config.actor_train.data_args, resolve_validation_args(resolved)
    table = read(args, _TRAIN_KEY, "train" if args.holdout is None else "all", None)
    everything = TaskSelection(table, range(len(table)))
    if validation.file_name:
        other = read(validation, _VALIDATION_KEY, "held_out", None)
        trained = set(table.identities)
        twins = sum(identity in trained for identity in other.identities)
        if twins:
            notes.append(f"{_VALIDATION_KEY}: {twins} of {len(other)} prompts are also trained on")
        return everything, TaskSelection(other, range(len(other)))
    if args.holdout:
        return _hold_out(table, args.holdout, resolved.config.seed, notes)
    generated = [name for name in args.file_name if name in BUILT_IN] if args.holdout is None else []
    if not generated:
        return everything, None
    other = read(args, _TRAIN_KEY, "held_out", generated)
    kept = _without_duplicates(table, other.identities)
    if not kept:
        raise ConfigError("every prompt is held out, none is left to train on", key=f"{_TRAIN_KEY}.file_name")
    _note_left_out(len(table) - len(kept), notes)
    return TaskSelection(table, kept), TaskSelection(other, range(len(other)))


def resolve_validation_args(resolved: ResolvedConfig) -> DataArgs:
    """Return `validation.data_args`; what is not given there is as in training."""
    train, given = resolved.config.actor_train.data_args, resolved.config.validation.data_args
    if given.file_name and train.holdout:
        problem = f"validation has data of its own: {', '.join(given.file_name)}"
        raise ConfigError(problem, key=f"{_TRAIN_KEY}.holdout", value=train.holdout, hint="one of the two")
    names = {field.name for field in fields(DataArgs)}
    explicit = {name for name in names if resolved.provenance.get(f"{_VALIDATION_KEY}.{name}", "default") != "default"}
    inherited = {name: getattr(train, name) for name in names - explicit - _NOT_INHERITED}
    if "options" not in explicit:
        shared = [name for name in given.file_name if name in train.file_name and not is_file_entry(name)]
        inherited["options"] = {name: entry_options(name, train, _TRAIN_KEY) for name in shared}
    return replace(given, **inherited)


def _hold_out(table: TaskTable, holdout: float, seed: int, notes: list[str]) -> tuple[TaskSelection, TaskSelection]:
    """Draw the rows to hold out. Rows with the same prompt as a held-out one are in neither selection."""
    key, rows = f"{_TRAIN_KEY}.holdout", len(table)
    if holdout >= 1 and holdout != int(holdout):
        raise ConfigError("is neither a number of rows nor a share", key=key, value=holdout, hint="such as 200 or 0.1")
    count = int(holdout) if holdout >= 1 else max(1, round(holdout * rows))
    order = list(range(rows))
    make_rng(seed, "data", "holdout").shuffle(order)
    held_out = sorted(order[:count])
    kept = _without_duplicates(table, (table.identities[index] for index in held_out))
    if not kept:
        problem = f"{rows} rows − {count} held out and their twins leave none to train on"
        raise ConfigError(problem, key=key, value=holdout)
    _note_left_out(rows - count - len(kept), notes)
    return TaskSelection(table, kept), TaskSelection(table, held_out)


def _without_duplicates(table: TaskTable, held_out: Iterable[int]) -> list[int]:
    """Return the rows of `table` whose identity is not held out."""
    hidden = set(held_out)
    return [index for index in range(len(table)) if table.identities[index] not in hidden]


def _note_left_out(count: int, notes: list[str]) -> None:
    if count:
        notes.append(f"{_TRAIN_KEY}: {count} rows have the prompt of a held-out one and are not trained")


def _order_tasks(tasks: TaskSelection, args: TrainingDataArgs, seed: int) -> SizedSource:
    shares = args.domain_interleave_probs
    if not shares:
        return ListSource(tasks, seed=seed, epochs=None, shuffle=args.shuffle)
    by_domain = tasks.by_domain()
    _check_shares(args, tuple(by_domain))
    sources = {name: ListSource(rows, seed=seed, epochs=None, shuffle=args.shuffle) for name, rows in by_domain.items()}
    return InterleavedSource(sources, shares)


def _check_shares(args: TrainingDataArgs, domains: Sequence[str]) -> None:
    key, shares = f"{_TRAIN_KEY}.domain_interleave_probs", args.domain_interleave_probs

    def refuse(problem: str, hint: str = "") -> None:
        raise ConfigError(problem, key=key, value=dict(shares), hint=hint)

    for name in sorted(shares.keys() - set(domains)):
        hint = f"the data has {', '.join(sorted(domains))}"
        refuse(f"the data has no domain {name!r}{suggest_close_match(name, domains)}", hint)
    for name in sorted(set(domains) - shares.keys()):
        refuse(f"no share for the domain {name!r}", "0 leaves it out")
    total = sum(shares.values())
    if abs(total - 1) > _SMALLEST_SHARE:
        refuse(f"shares add up to {total:g}, not to 1")
    for name, share in shares.items():
        if 0 < share < _SMALLEST_SHARE:
            refuse(f"the share of {name!r} is below {_SMALLEST_SHARE}")
