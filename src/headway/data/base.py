"""A source of tasks with random access, so that a cursor is a number and any position can be given out again."""

from __future__ import annotations

from typing import Protocol

from headway.types import Task


class TaskSource(Protocol):
    """Tasks by position: the same position gives the same task in every process of a run."""

    def task(self, position: int) -> Task | None:
        """The task at `position`, shuffled and repeated over epochs as configured; `None` past the end."""
        ...


class SizedSource(TaskSource, Protocol):
    """A source that knows how much data it has, and which."""

    def __len__(self) -> int:
        """Tasks in one epoch."""
        ...

    def fingerprint(self) -> str:
        """Differs where the tasks or their order do; the same in every process."""
        ...
