"""Rows of data files as starting states of environments: a row is an episode's `data`, without a prompt.

Guarantees: every row belongs to a tag of the run. An invalid row is a `ConfigError` that names its place, before
anything starts. A row that is held out is never trained. Where no file is named there are no rows, and episodes start
from seeds alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import DataArgs, ResolvedConfig
from headway.data.data_entries import DataEntry, DatasetPart, open_entries
from headway.data.task_sources import ListSource
from headway.data.task_table import TaskTable
from headway.data.training_data import resolve_validation_args, split_train_and_validation
from headway.errors import ConfigError

_DATA_KEY = "actor_train.data_args"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingRows:
    """Rows by tag. Episodes of a tag without rows start from seeds."""

    train: Mapping[str, ListSource]
    """Repeated without end."""
    held_out: Mapping[str, ListSource]
    """Given out once each."""
    notes: tuple[str, ...] = ()


def read_starting_rows(
    resolved: ResolvedConfig, tags: Sequence[str], *, seed_key: str, reserved_key: str
) -> StartingRows:
    """Read the rows that `data_args` of training and validation name. Raises `ConfigError`.

    `seed_key` is a column that must be a whole number; `reserved_key` is one that no row may have.
    """
    args, seed, notes = resolved.config.actor_train.data_args, resolved.config.seed, list[str]()
    if not args.file_name:
        _check_no_validation_rows(resolved)
        return StartingRows(train={}, held_out={})
    if args.domain_interleave_probs:
        key, shares = f"{_DATA_KEY}.domain_interleave_probs", dict(args.domain_interleave_probs)
        hint = "train_env_manager.num_groups_partition"
        raise ConfigError("is not for environments", key=key, value=shares, hint=hint)

    def read(args: DataArgs, key: str, part: DatasetPart, names: Sequence[str] | None) -> TaskTable:
        table = TaskTable()
        for entry in open_entries(args, key=key, seed=seed, part=part, names=names):
            before = len(table)
            for number, row in entry.rows:
                _check_row(row, entry.place(number), seed_key, reserved_key)
                identity = hash(json.dumps(row, sort_keys=True, default=str))
                tag = _find_tag(row, entry, number, tuple(dict.fromkeys(tags)))
                table.add(row, domain=tag, identity=identity, prompt=(), tokenize=lambda row: ())
            if len(table) == before:
                raise ConfigError("has no rows", key=f"{key}.file_name", value=entry.name)
        notes.extend(table.lost_types_note(key))
        return table

    train, held_out = split_train_and_validation(resolved, read, notes)
    shuffle = resolve_validation_args(resolved).shuffle
    held_out_by_tag = {} if held_out is None else held_out.by_domain()
    return StartingRows(
        train={
            tag: ListSource(rows, seed=seed, epochs=None, shuffle=args.shuffle)
            for tag, rows in train.by_domain().items()
        },
        held_out={tag: ListSource(rows, seed=seed, shuffle=shuffle) for tag, rows in held_out_by_tag.items()},
        notes=tuple(dict.fromkeys(notes)),
    )


def _check_no_validation_rows(resolved: ResolvedConfig) -> None:
    """Reject rows for validation where there are none for training."""
    named = resolved.config.validation.data_args.file_name
    if named:
        problem, key = "rows to validate on and none to train on", "validation.data_args.file_name"
        hint = f"{_DATA_KEY}.file_name, or no data: then both are played from seeds"
        raise ConfigError(problem, key=key, value=list(named), hint=hint)


def _find_tag(row: Mapping[str, Any], entry: DataEntry, number: int, tags: Sequence[str]) -> str:
    """Return the row's own `domain` or `tag`, else the name of its file if that is a tag, else the only tag."""
    tag = row.get("domain") or row.get("tag")
    if tag is None:
        tag = entry.label if entry.label in tags or len(tags) > 1 else tags[0]
    if tag not in tags:
        problem = f"{entry.place(number)}: belongs to {tag!r}, and the run plays {', '.join(tags)}"
        raise ConfigError(problem, hint="a column `tag`, or a file with the name of a tag")
    return str(tag)


def _check_row(row: Mapping[str, Any], place: str, seed_key: str, reserved_key: str) -> None:
    if reserved_key in row:
        raise ConfigError(f"{place}: the column {reserved_key!r} is the run's own", hint="call it something else")
    seed = row.get(seed_key, 0)
    if isinstance(seed, float) or not str(seed).lstrip("-").isdigit():
        raise ConfigError(f"{place}: {seed_key} {seed!r} is no whole number")
