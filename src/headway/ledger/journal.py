"""Buffered writes: many entries, one transaction.

Guarantees: a flush is atomic (after a crash all of its writes are there, or none), later flushes never become
visible without earlier ones, and a flush that fails keeps everything for the next one. The kinds of one flush are
written in the order below, which is the order of a sample's life, so a sample may start and end in one flush.
Does not check what the entries say: that is the ledger's part.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import LedgerError

_END = "end = ?, reason = ?, trained_at = ?"


class Journal:
    """The connection and the writes that are not in it yet."""

    def __init__(
        self, db: sqlite3.Connection, path: Path | str, defer: Callable[[Callable[[], None]], object] | None
    ) -> None:
        self.db = db
        self._path = path
        self._defer = defer
        self._scheduled = False
        self._failed = False
        self.groups: list[tuple[int, int]] = []
        self.samples: list[tuple[int, str, int]] = []
        self.payloads: list[tuple[int, int, bytes]] = []
        self.grades: list[tuple[int, str]] = []
        self.partials: list[tuple[int, int, bytes]] = []
        self.sample_ends: list[tuple[str, str | None, int | None, int]] = []
        self.group_ends: list[tuple[str, str | None, int | None, int]] = []
        self.spent_partials: list[tuple[int]] = []
        self.spent_payloads: list[tuple[int]] = []
        self.spent_grades: list[tuple[int]] = []
        self.checkpoints: list[tuple[int, str]] = []
        # (rows, statement, whether each row must change exactly one row of the file)
        self._writes: tuple[tuple[list[Any], str, bool], ...] = (
            (self.groups, "INSERT INTO groups (group_id, position) VALUES (?, ?)", True),
            (self.samples, "INSERT INTO samples (row, sample_id, group_id) VALUES (?, ?, ?)", True),
            (self.payloads, "INSERT INTO payloads VALUES (?, ?, ?)", True),
            (self.grades, "INSERT OR REPLACE INTO grades VALUES (?, ?)", False),
            (self.partials, "INSERT OR REPLACE INTO partials VALUES (?, ?, ?)", False),
            (self.sample_ends, f"UPDATE samples SET {_END} WHERE row = ? AND end IS NULL", True),
            (self.group_ends, f"UPDATE groups SET {_END} WHERE group_id = ? AND end IS NULL", True),
            (self.spent_partials, "DELETE FROM partials WHERE row = ?", False),
            (self.spent_payloads, "DELETE FROM payloads WHERE row = ?", False),
            (self.spent_grades, "DELETE FROM grades WHERE group_id = ?", False),
            (self.checkpoints, "INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", False),
        )

    def changed(self) -> None:
        """Something was buffered: see to it that it is written.

        A deferred flush that failed has nobody to raise to, so the next entry tries again and raises in its place.
        """
        if self._defer is None or self._failed:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._defer(self._flush_deferred)

    def _flush_deferred(self) -> None:
        if not self._scheduled:  # flushed by hand in the meantime
            return
        try:
            self.flush()
        except LedgerError:
            self._failed = True

    def flush(self) -> None:
        """Write everything buffered in one transaction."""
        self._scheduled = False
        if any(rows for rows, _, _ in self._writes):
            self.transact(self._write)
            for rows, _, _ in self._writes:
                rows.clear()
        self._failed = False

    def _write(self, db: sqlite3.Connection) -> None:
        for rows, statement, exact in self._writes:
            if rows:
                changed = db.executemany(statement, rows).rowcount
                if exact and changed != len(rows):
                    raise LedgerError(f"{self._path}: {statement!r} changed {changed} rows instead of {len(rows)}")

    def transact(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """`write` in a transaction of its own: all of it, or nothing and a `LedgerError`."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
            write(self.db)
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise LedgerError(
                    f"{self._path}: {error}; nothing of this write was made and nothing is lost: "
                    "free space or fix the disk, then flush again"
                ) from error
            raise

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        self.db.close()
