"""The data of a run, from its configuration: what is trained on, what is held out, in which order.

Guarantees: everything that can be wrong with the data is a `ConfigError` here, before anything starts; a prompt that
is held out by us is never trained; the same configuration and files give the same task at the same position in every
process. Does not import torch or a tokenizer: it is given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Protocol

from headway.config import DataArgs, ResolvedConfig, TrainingDataArgs
from headway.data.data_entries import (
    DatasetPart,
    entry_options,
    has_held_out_rows,
    is_file_entry,
    open_entries,
)
from headway.data.prompts import PromptTokenizer
from headway.data.task_reading import TaskReader
from headway.data.task_sources import InterleavedSource, ListSource, SizedSource
from headway.data.task_table import TaskSelection, TaskTable
from headway.errors import ConfigError
from headway.seeding import make_rng

_TRAIN, _VALIDATION = "actor_train.data_args", "validation.data_args"
_OWN = frozenset({"file_name", "options"})
"""Options that validation does not take over from training as they are."""
_SMALLEST_SHARE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSources:
    """What a run reads."""

    train: SizedSource
    """Without end."""
    validation: SizedSource | None
    """Ends after its last task; `len` says how many there are. `None`: nothing is held out."""
    notes: tuple[str, ...] = ()
    """One line each: prompts left out, twins, columns that are not JSON."""


def make_sources(resolved: ResolvedConfig, tokenizer: PromptTokenizer) -> DataSources:
    """The sources of a configuration: `actor_train.data_args`, and what validation reads."""
    notes: list[str] = []
    args, seed = resolved.config.actor_train.data_args, resolved.config.seed
    train, held_out = split_train_and_validation(resolved, _Reader(resolved, tokenizer, notes), notes)
    shuffled = resolve_validation_args(resolved).shuffle
    return DataSources(
        train=_ordered(train, args, seed),
        validation=None if held_out is None else ListSource(held_out, seed=seed, shuffle=shuffled),
        notes=tuple(dict.fromkeys(notes)),
    )


class TableReader(Protocol):
    """Reads entries of `file_name`, all of them or only `names`, into a table."""

    def __call__(
        self, args: DataArgs, key: str, part: DatasetPart, names: Sequence[str] | None = None
    ) -> TaskTable: ...


def split_train_and_validation(
    resolved: ResolvedConfig, read: TableReader, notes: list[str]
) -> tuple[TaskSelection, TaskSelection | None]:
    """Rows to train on and rows held out, if any are."""
    args, validation = resolved.config.actor_train.data_args, resolve_validation_args(resolved)
    table = read(args, _TRAIN, "train" if args.holdout is None else "all")
    every = TaskSelection(table, range(len(table)))
    if validation.file_name:
        other = read(validation, _VALIDATION, "held_out")
        _note_twins(table, other, notes)
        return every, TaskSelection(other, range(len(other)))
    if args.holdout:
        return _split(table, args.holdout, resolved.config.seed, notes)
    own = [name for name in args.file_name if has_held_out_rows(name)] if args.holdout is None else []
    if not own:
        return every, None
    other = read(args, _TRAIN, "held_out", own)
    return _without_twins(table, other, notes), TaskSelection(other, range(len(other)))


def fingerprint(source: SizedSource) -> str:
    """A hash of what a source gives out and in which order, so that a resumed run notices other data."""
    return source.fingerprint()


class _Reader:
    """Reads with what is the same for training and validation."""

    def __init__(self, resolved: ResolvedConfig, tokenizer: PromptTokenizer, notes: list[str]) -> None:
        self._resolved, self._tokenizer, self._notes = resolved, tokenizer, notes

    def __call__(self, args: DataArgs, key: str, part: DatasetPart, names: Sequence[str] | None = None) -> TaskTable:
        config, limit = self._resolved.config, self._resolved.derived.prompt_length
        reading = TaskReader(args, self._tokenizer, config.rewards, key=key, limit=limit)
        table = reading.read(open_entries(args, key=key, seed=config.seed, part=part, names=names))
        self._notes += reading.notes()
        return table


def resolve_validation_args(resolved: ResolvedConfig) -> DataArgs:
    """`validation.data_args`, with what is not said there as in training."""
    train, given = resolved.config.actor_train.data_args, resolved.config.validation.data_args
    if given.file_name and train.holdout:
        problem = f"validation has data of its own: {', '.join(given.file_name)}"
        raise ConfigError(problem, key=f"{_TRAIN}.holdout", value=train.holdout, hint="one of the two")
    said = {name for name in _names() if resolved.provenance.get(f"{_VALIDATION}.{name}", "default") != "default"}
    taken = {name: getattr(train, name) for name in _names() - said - _OWN}
    if "options" not in said:
        shared = [name for name in given.file_name if name in train.file_name and not is_file_entry(name)]
        taken["options"] = {name: entry_options(name, train, _TRAIN) for name in shared}
    return replace(given, **taken)


def _names() -> set[str]:
    return {field.name for field in fields(DataArgs)}


def _split(table: TaskTable, holdout: float, seed: int, notes: list[str]) -> tuple[TaskSelection, TaskSelection]:
    """Rows to train on and rows held out; twins of the latter are in neither."""
    key, rows = f"{_TRAIN}.holdout", len(table)
    if holdout >= 1 and holdout != int(holdout):
        raise ConfigError("is neither a number of rows nor a share", key=key, value=holdout, hint="such as 200 or 0.1")
    count = int(holdout) if holdout >= 1 else max(1, round(holdout * rows))
    order = list(range(rows))
    make_rng(seed, "data", "holdout").shuffle(order)
    held_out = sorted(order[:count])
    hidden = {table.identities[index] for index in held_out}
    kept = [index for index in range(rows) if table.identities[index] not in hidden]
    if not kept:
        raise ConfigError(
            f"{rows} rows − {count} held out and their twins leave none to train on", key=key, value=holdout
        )
    _note_left_out(rows - count - len(kept), notes)
    return TaskSelection(table, kept), TaskSelection(table, held_out)


def _without_twins(table: TaskTable, held_out: TaskTable, notes: list[str]) -> TaskSelection:
    hidden = set(held_out.identities)
    kept = [index for index in range(len(table)) if table.identities[index] not in hidden]
    if not kept:
        raise ConfigError("every prompt is held out, none is left to train on", key=f"{_TRAIN}.file_name")
    _note_left_out(len(table) - len(kept), notes)
    return TaskSelection(table, kept)


def _note_left_out(twins: int, notes: list[str]) -> None:
    if twins:
        notes.append(f"{_TRAIN}: {twins} rows have the prompt of a held-out one and are not trained")


def _note_twins(table: TaskTable, validation: TaskTable, notes: list[str]) -> None:
    trained = set(table.identities)
    twins = sum(identity in trained for identity in validation.identities)
    if twins:
        notes.append(f"{_VALIDATION}: {twins} of {len(validation)} prompts are also trained on")


def _ordered(tasks: TaskSelection, args: TrainingDataArgs, seed: int) -> SizedSource:
    shares = args.domain_interleave_probs
    if not shares:
        return ListSource(tasks, seed=seed, epochs=None, shuffle=args.shuffle)
    domains = tasks.domains()
    _check_shares(args, domains)
    sources = {
        name: ListSource(tasks.of_domain(name), seed=seed, epochs=None, shuffle=args.shuffle) for name in domains
    }
    return InterleavedSource(sources, shares)


def _check_shares(args: TrainingDataArgs, domains: Sequence[str]) -> None:
    key, shares = f"{_TRAIN}.domain_interleave_probs", args.domain_interleave_probs
    for name in sorted(shares.keys() - set(domains)):
        close = get_close_matches(name, domains, 1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        hint = f"the data has {', '.join(sorted(domains))}"
        raise ConfigError(f"the data has no domain {name!r}{meant}", key=key, value=dict(shares), hint=hint)
    for name in sorted(set(domains) - shares.keys()):
        raise ConfigError(f"no share for the domain {name!r}", key=key, value=dict(shares), hint="0 leaves it out")
    total = sum(shares.values())
    if abs(total - 1) > _SMALLEST_SHARE:
        raise ConfigError(f"shares add up to {total:g}, not to 1", key=key, value=dict(shares))
    for name, share in shares.items():
        if 0 < share < _SMALLEST_SHARE:
            raise ConfigError(f"the share of {name!r} is below {_SMALLEST_SHARE}", key=key, value=dict(shares))
