"""Reads entries into a table of tasks, and checks each row on the way.

Guarantees: a problem with a row is a `ConfigError` that names its place. After reading, no prompt is longer than the
limit, and a note counts what was left out. Prompts that fit for certain are tokenized when they are needed, so that a
million rows cost seconds; only the others are tokenized here, in batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from headway.config import DataArgs, RewardConfig, TrainingDataArgs
from headway.config.roles import EVERY_TASK
from headway.data.data_entries import DataEntry
from headway.data.prompts import MISSING, Message, PromptBuilder, PromptTokenizer, get_column
from headway.data.task_table import TaskTable
from headway.errors import ConfigError

T = TypeVar("T")

FALLBACK_DOMAIN = "default"
"""Domain of rows about which nothing is known; the reward of that name scores every task that no other claims."""
_BATCH = 1024


class TaskReader:
    """Reads the entries of one `data_args` into `table`."""

    def __init__(
        self, args: DataArgs, tokenizer: PromptTokenizer, rewards: Mapping[str, RewardConfig], *, key: str, limit: int
    ) -> None:
        self.table = TaskTable()
        self._prompts = PromptBuilder(tokenizer, args, key=key)
        self._tokenize_row = self._prompts.tokenize_row
        self._args, self._key, self._limit = args, key, limit
        self._rewards = rewards
        labels = {label for name, reward in rewards.items() for label in reward.tag_included or (name,)}
        self._rewarded = labels - {EVERY_TASK}
        """Domains and tags that some reward scores. Empty: no rewards, or each of them scores every task."""
        shares = args.domain_interleave_probs if isinstance(args, TrainingDataArgs) else {}
        self._domain_of_tag = {tag: name for name in shares if name in rewards for tag in rewards[name].tag_included}
        """Where shares are given by reward, the reward to which a tag belongs."""
        self._labels: set[tuple[str, str]] = set()
        self._seen = 0
        self._too_long: list[tuple[int, str]] = []
        """Length and place of the prompts that are too long."""
        self._notes: list[str] = []

    def read(self, entries: Iterable[DataEntry]) -> TaskTable:
        """Read all of `entries`."""
        for entry in entries:
            self._read_entry(entry)
        self._check_lengths()
        self._check_rewards()
        return self.table

    def notes(self) -> list[str]:
        """Return what the user should know about the data."""
        return self._prompts.notes() + self.table.lost_types_note(self._key) + self._notes

    def _read_entry(self, entry: DataEntry) -> None:
        before, unanswered, columns, answer = self._seen, 0, list[str](), self._args.answer
        for batch in _batches(entry.rows):
            messages = [self._prompts.make_messages(row, entry.place(number)) for number, row in batch]
            prompts = self._tokenize(entry, batch, messages)
            for (number, row), conversation, prompt in zip(batch, messages, prompts, strict=True):
                self._seen += 1
                columns = list(row)
                if answer is not None:
                    value = get_column(row, answer)
                    if value is MISSING or value is None:
                        unanswered += "test_cases" not in row  # the answer to a task of code is what passes its tests
                    elif answer not in row:
                        row = {**row, answer: value}
                if prompt is not None:
                    self._add(row, conversation, prompt, entry, number)
        count = self._seen - before
        if not count:
            raise ConfigError("has no rows", key=f"{self._key}.file_name", value=entry.name)
        if unanswered == count and not entry.has_own_reward:
            hint = f"give one of its columns: {', '.join(columns)}; or null where no reward compares with an answer"
            raise ConfigError(f"no row of {entry.name} has it", key=f"{self._key}.answer", value=answer, hint=hint)
        if unanswered and not entry.has_own_reward:
            self._notes.append(f"{entry.name}: {unanswered} of {count} rows have no {answer!r}")

    def _tokenize(
        self, entry: DataEntry, batch: Sequence[tuple[int, Any]], messages: Sequence[list[Message]]
    ) -> list[Sequence[int] | None]:
        """Return the tokens of each row: none if they can wait, `None` if the row is left out."""
        found: list[Sequence[int] | None] = [()] * len(batch)
        places = [entry.place(number) for number, _ in batch]
        lengths = [self._prompts.max_length(*row) for row in zip(messages, places, strict=True)]
        doubtful = [which for which, length in enumerate(lengths) if length > self._limit]
        texts = [self._prompts.render(messages[which], places[which]) for which in doubtful]
        for which, tokens in zip(doubtful, self._prompts.tokenize(texts) if texts else (), strict=True):
            found[which] = tokens
            if len(tokens) > self._limit:
                self._too_long.append((len(tokens), places[which]))
                found[which] = tokens[-self._limit :] if self._args.too_long == "truncate" else None
        return found

    def _add(
        self, row: dict[str, Any], messages: list[Message], prompt: Sequence[int], entry: DataEntry, number: int
    ) -> None:
        domain, tag = self._find_domain(row, entry, number), row.get("tag")
        self._labels.add((domain, tag if isinstance(tag, str) else domain))
        asked = tuple((message["role"], message["content"]) for message in messages if message["role"] != "system")
        self.table.add(row, domain=domain, identity=hash(asked), prompt=prompt, tokenize=self._tokenize_row)

    def _find_domain(self, row: Mapping[str, Any], entry: DataEntry, number: int) -> str:
        shares = self._args.domain_interleave_probs if isinstance(self._args, TrainingDataArgs) else {}
        for column in ("domain", "tag"):
            value = row.get(column)
            if isinstance(value, str):
                return value if value in shares else self._domain_of_tag.get(value, value)
            if value is not None and column == "domain":
                raise ConfigError(f"{entry.place(number)}: domain {value!r} is not a text")
        if entry.label in self._rewarded or entry.label in shares:
            return entry.label
        return next(iter(self._rewarded)) if len(self._rewarded) == 1 else FALLBACK_DOMAIN

    def _check_lengths(self) -> None:
        if not self._too_long:
            return
        longest, place = max(self._too_long)
        what = f"{len(self._too_long)} of {self._seen} prompts are longer than prompt_length = {self._limit} tokens"
        most = f"the longest has {longest} ({place})"
        key, hint = f"{self._key}.too_long", f"prompt_length: {longest} holds all of them"
        if self._args.too_long == "error":
            raise ConfigError(f"{what}; {most}", key=key, value="error", hint=hint)
        if not len(self.table):
            problem = f"{what}, so none is left; the shortest has {min(self._too_long)[0]}, {most}"
            raise ConfigError(problem, key=key, value="drop", hint=hint)
        done = "cut to their end" if self._args.too_long == "truncate" else "left out"
        self._notes.append(f"{self._key}: {what} and {done}; {most}")

    def _check_rewards(self) -> None:
        if not self._rewarded or FALLBACK_DOMAIN in self._rewards:
            return
        for domain, tag in sorted(self._labels):
            if not self._rewarded & {domain, tag}:
                hint = 'name it in rewards.<name>.tag_included, where ["*"] is every task, or call a reward default'
                known = ", ".join(sorted(self._rewarded))
                raise ConfigError(f"no reward judges the domain {domain!r} of {self._key}, only: {known}", hint=hint)


def _batches(rows: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch
