"""Many tasks in little memory: rows as JSON in one buffer, tokens in one array, records made when asked for.

Guarantees: what was added comes back equal, as JSON values. A row without tokens is tokenised each time it is asked
for, by the function it was added with. Does not know about order or epochs; a source does.
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
    """What a source reads from: a list of tasks, or something smaller that looks like one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Task: ...


class TaskTable:
    """Tasks in the order they were added."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._row_ends = array("Q", [0])
        self._tokens = array("I")
        self._token_ends = array("Q", [0])
        self._makers: list[TokenizeRow] = []
        self._maker = array("H")
        self._domains: dict[str, int] = {}
        self._names: list[str] = []
        self._domain = array("H")
        self.identities = array("q")
        """A hash of each prompt, to find twins; of this process only."""
        self.lost: set[str] = set()
        """Types of values that JSON does not know; they became null."""

    def add(
        self, data: Mapping[str, Any], *, domain: str, identity: int, prompt: Sequence[int], tokenise: TokenizeRow
    ) -> None:
        """One more task. `prompt`: its tokens, or none to have them made when they are needed."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=self._plain)
        self._rows += text.encode("utf-8", "surrogatepass")
        self._row_ends.append(len(self._rows))
        self._tokens.extend(prompt)
        self._token_ends.append(len(self._tokens))
        self._domain.append(self._number_of(domain))
        if not self._makers or self._makers[-1] is not tokenise:
            self._makers.append(tokenise)
        self._maker.append(len(self._makers) - 1)
        self.identities.append(identity)

    def __len__(self) -> int:
        return len(self._domain)

    def __getitem__(self, index: int, /) -> Task:
        return Task(position=index, domain=self.domain(index), prompt=tuple(self.prompt(index)), data=self.data(index))

    def data(self, index: int) -> dict[str, Any]:
        """The row."""
        row = self._rows[self._row_ends[index] : self._row_ends[index + 1]]
        found: dict[str, Any] = json.loads(row.decode("utf-8", "surrogatepass"))
        return found

    def prompt(self, index: int) -> Sequence[int]:
        """The tokens."""
        held = self._tokens[self._token_ends[index] : self._token_ends[index + 1]]
        return held or self._makers[self._maker[index]](self.data(index))

    def domain(self, index: int) -> str:
        """The domain."""
        return self._names[self._domain[index]]

    def digest(self) -> bytes:
        """Of rows, domains and tokens; of rows without tokens, the first ones stand for how they are made."""
        found = blake2b(self._rows, digest_size=16)
        for part in (self._row_ends, self._tokens, self._token_ends, self._domain):
            found.update(memoryview(part))
        found.update("\0".join(self._names).encode())
        for maker in range(len(self._makers)):
            found.update(array("I", self.prompt(self._maker.index(maker))).tobytes())
        return found.digest()

    def nbytes(self) -> int:
        """Memory that the tasks take."""
        arrays = (self._row_ends, self._tokens, self._token_ends, self._domain, self._maker, self.identities)
        return len(self._rows) + sum(len(part) * part.itemsize for part in arrays)

    def _number_of(self, domain: str) -> int:
        if domain not in self._domains:
            self._domains[domain] = len(self._names)
            self._names.append(domain)
        return self._domains[domain]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, datetime | date | time):
            return value.isoformat()
        if isinstance(value, Decimal):
            return str(value)
        self.lost.add(type(value).__name__)
        return None


class TaskSelection:
    """Some tasks of a table, by their indices."""

    def __init__(self, table: TaskTable, indices: Iterable[int]) -> None:
        self._table = table
        self._indices = array("L", indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> Task:
        return self._table[self._indices[index]]

    def domains(self) -> tuple[str, ...]:
        """Every domain among them."""
        return tuple(dict.fromkeys(self._table.domain(index) for index in self._indices))

    def of_domain(self, domain: str) -> TaskSelection:
        """Those of one domain."""
        return TaskSelection(self._table, (index for index in self._indices if self._table.domain(index) == domain))

    def digest(self) -> bytes:
        """Of the table and of what was selected."""
        return blake2b(self._table.digest() + self._indices.tobytes(), digest_size=16).digest()
