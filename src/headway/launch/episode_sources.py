"""Rows of data files as starting states of environments: a row is an episode's `data`, no prompt is made of it.

Guarantees: every row belongs to a tag of the run; whatever is wrong with one is a `ConfigError` that names its place,
before anything starts; a row that is held out is never trained. Where no file is named there are no rows, and seeds say
everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from headway.config import DataArgs, ResolvedConfig
from headway.data import SizedSource
from headway.data.data_entries import DataEntry, DatasetPart, open_entries
from headway.data.task_sources import ListSource
from headway.data.task_table import TaskSelection, TaskTable
from headway.data.training_data import resolve_validation_args, split_train_and_validation
from headway.environments.text_episode import HELD_OUT_KEY, SEED_KEY
from headway.errors import ConfigError
from headway.seeding import make_rng
from headway.types import Task

_DATA = "actor_train.data_args"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingRows:
    """Rows by tag. A tag without any is played from seeds."""

    train: Mapping[str, ListSource]
    """Without end."""
    held_out: Mapping[str, ListSource]
    """Each once."""
    notes: tuple[str, ...] = ()


def read_starting_rows(resolved: ResolvedConfig, tags: Sequence[str]) -> StartingRows:
    """The rows that `data_args` of training and of validation name. Raises `ConfigError`."""
    args, seed, notes = resolved.config.actor_train.data_args, resolved.config.seed, list[str]()
    if not args.file_name:
        _check_training_rows(resolved)
        return StartingRows(train={}, held_out={})
    if args.domain_interleave_probs:
        hint = "train_env_manager.num_groups_partition"
        shares = dict(args.domain_interleave_probs)
        raise ConfigError("is not for environments", key=f"{_DATA}.domain_interleave_probs", value=shares, hint=hint)
    train, held_out = split_train_and_validation(resolved, _StartingRowReader(tags, seed, notes), notes)
    shuffled = resolve_validation_args(resolved).shuffle
    return StartingRows(
        train={
            tag: ListSource(rows, seed=seed, epochs=None, shuffle=args.shuffle)
            for tag, rows in _group_by_tag(train).items()
        },
        held_out={tag: ListSource(rows, seed=seed, shuffle=shuffled) for tag, rows in _group_by_tag(held_out).items()},
        notes=tuple(dict.fromkeys(notes)),
    )


def _check_training_rows(resolved: ResolvedConfig) -> None:
    named = resolved.config.validation.data_args.file_name
    if named:
        hint = f"{_DATA}.file_name, or no data: then both are played from seeds"
        raise ConfigError(
            "rows to validate on and none to train on",
            key="validation.data_args.file_name",
            value=list(named),
            hint=hint,
        )


def _group_by_tag(rows: TaskSelection | None) -> dict[str, TaskSelection]:
    return {} if rows is None else {tag: rows.of_domain(tag) for tag in rows.domains()}


class _StartingRowReader:
    """Reads rows as they are."""

    def __init__(self, tags: Sequence[str], seed: int, notes: list[str]) -> None:
        self._tags, self._seed, self._notes = tuple(dict.fromkeys(tags)), seed, notes

    def __call__(self, args: DataArgs, key: str, part: DatasetPart, names: Sequence[str] | None = None) -> TaskTable:
        table = TaskTable()
        for entry in open_entries(args, key=key, seed=self._seed, part=part, names=names):
            before = len(table)
            for number, row in entry.rows:
                _check_row(row, entry.place(number))
                identity = hash(json.dumps(row, sort_keys=True, default=str))
                tag = self._tag(row, entry, number)
                table.add(row, domain=tag, identity=identity, prompt=(), tokenise=_no_prompt)
            if len(table) == before:
                raise ConfigError("has no rows", key=f"{key}.file_name", value=entry.name)
        if table.lost:
            kinds = ", ".join(sorted(table.lost))
            self._notes.append(f"{key}: values of type {kinds} are null in the tasks' data, which is JSON")
        return table

    def _tag(self, row: Mapping[str, Any], entry: DataEntry, number: int) -> str:
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


def _check_row(row: Mapping[str, Any], place: str) -> None:
    if HELD_OUT_KEY in row:
        raise ConfigError(f"{place}: the column {HELD_OUT_KEY!r} is the run's own", hint="call it something else")
    seed = row.get(SEED_KEY, 0)
    if isinstance(seed, float) or not str(seed).lstrip("-").isdigit():
        raise ConfigError(f"{place}: {SEED_KEY} {seed!r} is no whole number")


def _no_prompt(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The environment makes the first observation."""
    return ()


_NOMINAL_LENGTH = 1000
"""What a source without end says of its length."""


class EpisodeSource:
    """One kind of environment. `identity`: what else decides what an episode is; `size`: `None` for no end."""

    def __init__(
        self,
        tag: str,
        *,
        seed: int,
        identity: Any,
        size: int | None = None,
        data: Mapping[str, Any] | None = None,
        rows: SizedSource | None = None,
    ) -> None:
        self._tag, self._seed, self._identity, self._size = tag, seed, identity, size
        self._data, self._rows = dict(data or {}), rows
        self._stream = "episodes" if size is None else "held-out episodes"

    def __len__(self) -> int:
        return _NOMINAL_LENGTH if self._size is None else self._size

    def task(self, position: int) -> Task | None:
        """The task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if self._size is not None and position >= self._size:
            return None
        number = make_rng(self._seed, self._stream, self._tag, position).randrange(0, 2**31)
        row = self._rows.task(position) if self._rows is not None else None
        given = {} if row is None else row.data
        return Task(position=position, domain=self._tag, data={SEED_KEY: number, **given, **self._data})

    def fingerprint(self) -> str:
        """Of the environment, its options, the seed and the rows."""
        parts = [self._tag, self._seed, self._stream, self._identity]
        parts += [] if self._rows is None else [self._rows.fingerprint()]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class ValidationEpisodeSource:
    """Several sources that end, one after another by the share of each that was given out; every task once."""

    def __init__(self, sources: Sequence[SizedSource]) -> None:
        self._sources = sources
        places = [(which, index) for which, source in enumerate(sources) for index in range(len(source))]
        self._order = sorted(places, key=lambda place: ((place[1] + 0.5) / len(sources[place[0]]), place[0]))

    def __len__(self) -> int:
        return len(self._order)

    def task(self, position: int) -> Task | None:
        """The task at `position`; `None` past the end."""
        if position < 0:
            raise IndexError(f"position {position} is before the first task")
        if position >= len(self._order):
            return None
        which, index = self._order[position]
        found = self._sources[which].task(index)
        return None if found is None else replace(found, position=position)

    def fingerprint(self) -> str:
        """Of all of them."""
        return blake2b("\0".join(source.fingerprint() for source in self._sources).encode(), digest_size=16).hexdigest()
