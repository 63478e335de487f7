"""Many tasks in little memory: rows as JSON in one buffer, tokens in one array, records made when they are read.

Guarantees: what was added comes back equal, as JSON values. A row without tokens is tokenized each time it is read, by
the function it was added with. Order and epochs are the matter of a source.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Protocol

from headway.types import Task

TokenizeRow = Callable[[Mapping[str, Any]], Sequence[int]]


class TaskSequence(Protocol):
    """Tasks by index: a list, or something smaller that behaves like one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Task: ...


class TaskTable:
    """Tasks in the order they were added."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._row_ends = array("Q", [0])
        self._tokens = array("I")
        self._token_ends = array("Q", [0])
        self._tokenizers: list[TokenizeRow] = []
        self._tokenizer = array("H")
        self._domain_numbers: dict[str, int] = {}
        self._domain_names: list[str] = []
        self._domain = array("H")
        self.identities = array("q")
        """A hash of each prompt, with which duplicates are found; valid in this process only."""
        self.lost_types: set[str] = set()
        """Types of values that JSON does not have; they became null."""

    def add(
        self, data: Mapping[str, Any], *, domain: str, identity: int, prompt: Sequence[int], tokenize: TokenizeRow
    ) -> None:
        """Add a task. An empty `prompt` is tokenized when it is needed."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=self._to_json)
        self._rows += text.encode("utf-8", "surrogatepass")
        self._row_ends.append(len(self._rows))
        self._tokens.extend(prompt)
        self._token_ends.append(len(self._tokens))
        if domain not in self._domain_numbers:
            self._domain_numbers[domain] = len(self._domain_names)
            self._domain_names.append(domain)
        self._domain.append(self._domain_numbers[domain])
        if not self._tokenizers or self._tokenizers[-1] is not tokenize:
            self._tokenizers.append(tokenize)
        self._tokenizer.append(len(self._tokenizers) - 1)
        self.identities.append(identity)

    def __len__(self) -> int:
        return len(self._domain)

    def __getitem__(self, index: int, /) -> Task:
        return Task(position=index, domain=self.domain(index), prompt=tuple(self.prompt(index)), data=self.data(index))

    def data(self, index: int) -> dict[str, Any]:
        """Return the row of a task."""
        row = self._rows[self._row_ends[index] : self._row_ends[index + 1]]
        found: dict[str, Any] = json.loads(row.decode("utf-8", "surrogatepass"))
        return found

    def prompt(self, index: int) -> Sequence[int]:
        """Return the tokens of a task's prompt."""
        stored = self._tokens[self._token_ends[index] : self._token_ends[index + 1]]
        return stored or self._tokenizers[self._tokenizer[index]](self.data(index))

    def domain(self, index: int) -> str:
        """Return the domain of a task."""
        return self._domain_names[self._domain[index]]

    def digest(self) -> bytes:
        """Hash rows, domains and tokens; of rows without tokens, the first shows how they are tokenized."""
        found = blake2b(self._rows, digest_size=16)
        for part in (self._row_ends, self._tokens, self._token_ends, self._domain):
            found.update(memoryview(part))
        found.update("\0".join(self._domain_names).encode())
        for number in range(len(self._tokenizers)):
            found.update(array("I", self.prompt(self._tokenizer.index(number))).tobytes())
        return found.digest()

    def nbytes(self) -> int:
        """Return the memory that the tasks take."""
        arrays = (self._row_ends, self._tokens, self._token_ends, self._domain, self._tokenizer, self.identities)
        return len(self._rows) + sum(len(part) * part.itemsize for part in arrays)

    def _to_json(self, value: Any) -> Any:
        if isinstance(value, datetime | date | time):
            return value.isoformat()
        if isinstance(value, Decimal):
            return str(value)
        self.lost_types.add(type(value).__name__)
        return None

    def lost_types_note(self, key: str) -> list[str]:
        """Return a note about values that became null, if there are any. `key` is the place of the data."""
        if not self.lost_types:
            return []
        types = ", ".join(sorted(self.lost_types))
        return [f"{key}: values of type {types} are null in the tasks' data, which is JSON"]


class TaskSelection:
    """Some tasks of a table, by their indices."""

    def __init__(self, table: TaskTable, indices: Iterable[int]) -> None:
        self._table = table
        self._indices = array("L", indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Task:
        return self._table[self._indices[index]]

    def select(self, places: Iterable[int]) -> TaskSelection:
        """Return the tasks at some places of this selection."""
        return TaskSelection(self._table, (self._indices[place] for place in places))

    def by_domain(self) -> dict[str, TaskSelection]:
        """Return the tasks of each domain."""
        found: dict[str, list[int]] = {}
        for index in self._indices:
            found.setdefault(self._table.domain(index), []).append(index)
        return {domain: TaskSelection(self._table, indices) for domain, indices in found.items()}

    def digest(self) -> bytes:
        """Hash the table and the selection."""
        return blake2b(self._table.digest() + self._indices.tobytes(), digest_size=16).digest()
