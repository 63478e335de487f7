"""Rows of data files as starting states of environments: a row is an episode's `data`, no prompt is made of it.

Guarantees: every row belongs to a tag of the run; whatever is wrong with one is a `ConfigError` that names its place,
before anything starts; a row that is held out is never trained. Where no file is named there are no rows, and seeds say
everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import DataArgs, Resolved
from headway.data.entries import Entry, Part, open_entries
from headway.data.making import split_rows, validation_args
from headway.data.sources import ListSource
from headway.data.table import Selection, TaskTable
from headway.environments.episode import HELD_OUT, SEED
from headway.errors import ConfigError

_DATA = "actor_train.data_args"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Rows by tag. A tag without any is played from seeds."""

    train: Mapping[str, ListSource]
    """Without end."""
    held_out: Mapping[str, ListSource]
    """Each once."""
    notes: tuple[str, ...] = ()


def make_starts(resolved: Resolved, tags: Sequence[str]) -> Starts:
    """The rows that `data_args` of training and of validation name. Raises `ConfigError`."""
    args, seed, notes = resolved.config.actor_train.data_args, resolved.config.seed, list[str]()
    if not args.file_name:
        _refuse_validation_alone(resolved)
        return Starts(train={}, held_out={})
    if args.domain_interleave_probs:
        hint = "train_env_manager.num_groups_partition"
        shares = dict(args.domain_interleave_probs)
        raise ConfigError("is not for environments", key=f"{_DATA}.domain_interleave_probs", value=shares, hint=hint)
    train, held_out = split_rows(resolved, _RowReader(tags, seed, notes), notes)
    shuffled = validation_args(resolved).shuffle
    return Starts(
        train={
            tag: ListSource(rows, seed=seed, epochs=None, shuffle=args.shuffle) for tag, rows in _by_tag(train).items()
        },
        held_out={tag: ListSource(rows, seed=seed, shuffle=shuffled) for tag, rows in _by_tag(held_out).items()},
        notes=tuple(dict.fromkeys(notes)),
    )


def _refuse_validation_alone(resolved: Resolved) -> None:
    named = resolved.config.validation.data_args.file_name
    if named:
        hint = f"{_DATA}.file_name, or no data: then both are played from seeds"
        raise ConfigError(
            "rows to validate on and none to train on",
            key="validation.data_args.file_name",
            value=list(named),
            hint=hint,
        )


def _by_tag(rows: Selection | None) -> dict[str, Selection]:
    return {} if rows is None else {tag: rows.of_domain(tag) for tag in rows.domains()}


class _RowReader:
    """Reads rows as they are."""

    def __init__(self, tags: Sequence[str], seed: int, notes: list[str]) -> None:
        self._tags, self._seed, self._notes = tuple(dict.fromkeys(tags)), seed, notes

    def __call__(self, args: DataArgs, key: str, part: Part, names: Sequence[str] | None = None) -> TaskTable:
        table = TaskTable()
        for entry in open_entries(args, key=key, seed=self._seed, part=part, names=names):
            before = len(table)
            for number, row in entry.rows:
                _check(row, entry.place(number))
                identity = hash(json.dumps(row, sort_keys=True, default=str))
                tag = self._tag(row, entry, number)
                table.add(row, domain=tag, identity=identity, prompt=(), tokenise=_no_prompt)
            if len(table) == before:
                raise ConfigError("has no rows", key=f"{key}.file_name", value=entry.name)
        if table.lost:
            kinds = ", ".join(sorted(table.lost))
            self._notes.append(f"{key}: values of type {kinds} are null in the tasks' data, which is JSON")
        return table

    def _tag(self, row: Mapping[str, Any], entry: Entry, number: int) -> str:
        """A row's own `domain` or `tag`, else the name of its file where that is a tag, else the only tag there is."""
        said = row.get("domain") or row.get("tag")
        if said is None:
            said = entry.label if entry.label in self._tags or len(self._tags) > 1 else self._tags[0]
        if said not in self._tags:
            hint = "a column `tag`, or a file with the name of a tag"
            raise ConfigError(
                f"{entry.place(number)}: belongs to {said!r}, and the run plays {', '.join(self._tags)}", hint=hint
            )
        return str(said)


def _check(row: Mapping[str, Any], place: str) -> None:
    if HELD_OUT in row:
        raise ConfigError(f"{place}: the column {HELD_OUT!r} is the run's own", hint="call it something else")
    seed = row.get(SEED, 0)
    if isinstance(seed, float) or not str(seed).lstrip("-").isdigit():
        raise ConfigError(f"{place}: {SEED} {seed!r} is no whole number")


def _no_prompt(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The environment makes the first observation."""
    return ()
