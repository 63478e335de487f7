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
_MEMBERS = "row BETWEEN ? AND ? AND group_id = ?"


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
        self.payloads: list[tuple[int, int, int, bytes]] = []
        self.grades: list[tuple[int, str]] = []
        self.partials: list[tuple[int, int, bytes]] = []
        self.sample_ends: list[tuple[str, str | None, int]] = []
        self.member_ends: list[tuple[str, str | None, int | None, int, int, int]] = []
        """The end of all members of a group that have none yet: a statement for each group, not for each sample."""
        self.members_ended = 0
        """How many samples `member_ends` must change."""
        self.group_ends: list[tuple[str, str | None, int | None, int]] = []
        self.spent_partials: list[tuple[int]] = []
        self.spent_payloads: list[tuple[int]] = []
        self.spent_groups: list[tuple[int, int, int]] = []
        self.spent_grades: list[tuple[int]] = []
        self.checkpoints: list[tuple[int, str]] = []
        self.forgotten: list[tuple[int]] = []
        self._writes: tuple[tuple[list[Any], str], ...] = (
            (self.groups, "INSERT INTO groups (group_id, position) VALUES (?, ?)"),
            (self.samples, "INSERT INTO samples (row, sample_id, group_id) VALUES (?, ?, ?)"),
            (self.payloads, "INSERT INTO payloads VALUES (?, ?, ?, ?)"),
            (self.grades, "INSERT OR REPLACE INTO grades VALUES (?, ?)"),
            (self.partials, "INSERT OR REPLACE INTO partials VALUES (?, ?, ?)"),
            (self.sample_ends, "UPDATE samples SET end = ?, reason = ? WHERE row = ? AND end IS NULL"),
            (self.member_ends, f"UPDATE samples SET {_END} WHERE {_MEMBERS} AND end IS NULL"),
            (self.group_ends, f"UPDATE groups SET {_END} WHERE group_id = ? AND end IS NULL"),
            (self.spent_partials, "DELETE FROM partials WHERE row = ?"),
            (self.spent_payloads, "DELETE FROM payloads WHERE row = ?"),
            (self.spent_groups, f"DELETE FROM payloads WHERE {_MEMBERS}"),
            (self.spent_grades, "DELETE FROM grades WHERE group_id = ?"),
            (self.checkpoints, "INSERT OR REPLACE INTO checkpoints VALUES (?, ?)"),
            (self.forgotten, "DELETE FROM checkpoints WHERE version = ?"),
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
        if any(rows for rows, _ in self._writes):
            self.transact(self._write)
            for rows, _ in self._writes:
                rows.clear()
            self.members_ended = 0
        self._failed = False

    def _write(self, db: sqlite3.Connection) -> None:
        for rows, statement in self._writes:
            if rows:
                changed = db.executemany(statement, rows).rowcount
                expected = self.members_ended if rows is self.member_ends else len(rows)
                if changed != expected and statement.startswith("UPDATE"):
                    raise LedgerError(
                        f"{self._path}: {changed} ends written instead of {expected}; "
                        "the file was changed by something else, go on from a copy or start a new run"
                    )

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
                    "free space or fix the disk, then go on"
                ) from error
            raise

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        self.db.close()
