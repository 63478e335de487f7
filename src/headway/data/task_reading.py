"""Entries read into a table of tasks, each row checked on the way.

Guarantees: whatever is wrong with a row is a `ConfigError` that names its place; after reading, no prompt is longer
than the limit, and what was left out has been counted in a note. Prompts that fit for certain are tokenised when they
are asked for, so that a million rows cost seconds; only the others are tokenised here, in batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from headway.config import DataArgs, RewardConfig, TrainingDataArgs
from headway.data.data_entries import DataEntry
from headway.data.prompts import MISSING, Message, PromptBuilder, PromptTokenizer, get_column
from headway.data.task_table import TaskTable
from headway.errors import ConfigError

T = TypeVar("T")

FALLBACK_DOMAIN = "default"
"""Domain of rows about which nothing is known; the reward of that name takes every task that no other claims."""
_BATCH = 1024


class TaskReader:
    """Entries of one `data_args` on their way into `table`."""

    def __init__(
        self, args: DataArgs, tokenizer: PromptTokenizer, rewards: Mapping[str, RewardConfig], *, key: str, limit: int
    ) -> None:
        self.table = TaskTable()
        self._prompts = PromptBuilder(tokenizer, args, key=key)
        self._args, self._key, self._limit = args, key, limit
        self._rewards = rewards
        self._claimed = rewarded_domains(rewards)
        self._labels: set[tuple[str, str]] = set()
        self._seen = 0
        self._long: list[tuple[int, str]] = []
        """Tokens and place of the prompts that are too long."""
        self._notes: list[str] = []

    def read(self, entries: Iterable[DataEntry]) -> TaskTable:
        """Everything in `entries`."""
        for entry in entries:
            self._read(entry)
        self._judge_lengths()
        self._judge_rewards()
        return self.table

    def notes(self) -> list[str]:
        """What the user should know about what was read."""
        found = [note for note in (self._prompts.note(),) if note is not None]
        if self.table.lost:
            kinds = ", ".join(sorted(self.table.lost))
            found.append(f"{self._key}: values of type {kinds} are null in the tasks' data, which is JSON")
        return found + self._notes

    def _read(self, entry: DataEntry) -> None:
        before, without, columns = self._seen, 0, []
        for batch in _batches(entry.rows):
            messages = [self._prompts.conversation(row, entry.place(number)) for number, row in batch]
            tokens = self._tokens(entry, batch, messages)
            for (number, row), conversation, prompt in zip(batch, messages, tokens, strict=True):
                self._seen += 1
                columns = list(row)
                row, answered = self._with_answer(row)
                without += not answered
                if prompt is not None:
                    self._add(row, conversation, prompt, entry, number)
        count = self._seen - before
        if not count:
            raise ConfigError("has no rows", key=f"{self._key}.file_name", value=entry.name)
        if without == count and not entry.judged:
            hint = f"its columns: {', '.join(columns)}; null where no reward compares with an answer"
            raise ConfigError(
                f"no row of {entry.name} has it", key=f"{self._key}.answer", value=self._args.answer, hint=hint
            )
        if without and not entry.judged:
            self._notes.append(f"{entry.name}: {without} of {count} rows have no {self._args.answer!r}")

    def _tokens(
        self, entry: DataEntry, batch: Sequence[tuple[int, Any]], messages: Sequence[list[Message]]
    ) -> list[Sequence[int] | None]:
        """For each row its tokens, none where they can wait, `None` where the row is left out."""
        found: list[Sequence[int] | None] = [()] * len(batch)
        places = [entry.place(number) for number, _ in batch]
        doubtful = [
            which
            for which, found_in in enumerate(places)
            if self._prompts.longest(messages[which], found_in) > self._limit
        ]
        texts = [self._prompts.text(messages[which], places[which]) for which in doubtful]
        for which, tokens in zip(doubtful, self._prompts.tokens(texts) if texts else (), strict=True):
            found[which] = tokens
            if len(tokens) > self._limit:
                self._long.append((len(tokens), places[which]))
                found[which] = tokens[-self._limit :] if self._args.too_long == "truncate" else None
        return found

    def _with_answer(self, row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The row with the answer under its own name, and whether it needs no more than it has."""
        name = self._args.answer
        if name is None:
            return row, True
        value = get_column(row, name)
        if value is MISSING or value is None:
            return row, False
        return (row if name in row else {**row, name: value}), True

    def _add(
        self, row: dict[str, Any], messages: list[Message], prompt: Sequence[int], entry: DataEntry, number: int
    ) -> None:
        domain = self._domain(row, entry, number)
        tag = row.get("tag")
        self._labels.add((domain, tag if isinstance(tag, str) else domain))
        asked = tuple((message["role"], message["content"]) for message in messages if message["role"] != "system")
        self.table.add(row, domain=domain, identity=hash(asked), prompt=prompt, tokenise=self._prompts.of_row)

    def _domain(self, row: Mapping[str, Any], entry: DataEntry, number: int) -> str:
        for column in ("domain", "tag"):
            value = row.get(column)
            if isinstance(value, str):
                return value
            if value is not None and column == "domain":
                raise ConfigError(f"{entry.place(number)}: domain {value!r} is not a text")
        shares = self._args.domain_interleave_probs if isinstance(self._args, TrainingDataArgs) else {}
        if entry.label in self._claimed or entry.label in shares:
            return entry.label
        return next(iter(self._claimed)) if len(self._claimed) == 1 else FALLBACK_DOMAIN

    def _judge_lengths(self) -> None:
        if not self._long:
            return
        longest, place = max(self._long)
        what = f"{len(self._long)} of {self._seen} prompts are longer than prompt_length = {self._limit} tokens"
        most = f"the longest has {longest} ({place})"
        key, hint = f"{self._key}.too_long", f"prompt_length: {longest} holds all of them"
        if self._args.too_long == "error":
            raise ConfigError(f"{what}; {most}", key=key, value="error", hint=hint)
        if not len(self.table):
            shortest = min(self._long)[0]
            raise ConfigError(
                f"{what}, so none is left; the shortest has {shortest}, {most}", key=key, value="drop", hint=hint
            )
        done = "cut to their end" if self._args.too_long == "truncate" else "left out"
        self._notes.append(f"{self._key}: {what} and {done}; {most}")

    def _judge_rewards(self) -> None:
        if not self._rewards or FALLBACK_DOMAIN in self._rewards:
            return
        for domain, tag in sorted(self._labels):
            if not self._claimed & {domain, tag}:
                hint = "name it in rewards.<name>.tag_included, or call a reward default"
                judged = ", ".join(sorted(self._claimed))
                raise ConfigError(f"no reward judges the domain {domain!r} of {self._key}, only: {judged}", hint=hint)


def rewarded_domains(rewards: Mapping[str, RewardConfig]) -> frozenset[str]:
    """Domains and tags that some reward judges."""
    return frozenset(label for name, reward in rewards.items() for label in reward.tag_included or (name,))


def _batches(rows: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch
