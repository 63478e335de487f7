"""The file of the ledger: opening, locking and checking it, and writing to it in transactions.

Guarantees: one live process owns a run's ledger (the kernel releases the lock on `kill -9`). A file that is not a
ledger, or was written by a newer Headway, is refused untouched with advice. Other processes may read the file at any
time.

The journal buffers writes. A flush is atomic (after a crash all of its writes are there, or none), later flushes never
become visible without earlier ones, and a flush that fails keeps everything for the next one. The kinds of one flush
are written in the order of a sample's life, so that a sample may start and end in one flush. What the entries say is
checked by the ledger.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headway.errors import LedgerError

SCHEMA = 1
"""Grows with every change of the tables."""
_APPLICATION_ID = 0x48445759  # "HDWY": tells a ledger from any other SQLite file

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, position INTEGER NOT NULL, end TEXT, reason TEXT, trained_at INTEGER);
CREATE TABLE samples (
    row INTEGER PRIMARY KEY, sample_id TEXT NOT NULL, group_id INTEGER NOT NULL,
    end TEXT, reason TEXT, trained_at INTEGER);
CREATE TABLE payloads (
    row INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, lineage INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE partials (row INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE grades (group_id INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE checkpoints (version INTEGER PRIMARY KEY, directory TEXT NOT NULL);
CREATE TABLE restores (lineage INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE undone (
    lineage INTEGER NOT NULL, row INTEGER NOT NULL, end TEXT NOT NULL, trained_at INTEGER,
    PRIMARY KEY (lineage, row)) WITHOUT ROWID;
"""
# samples.row is numbered by the ledger in the order of starting. Updates and payloads go by it, a whole group at a
# time as the range from its first row to its last; sample ids need no index.
# undone keeps the ends that restore `lineage` took back, so that the file tells its whole history.


def open_store(path: Path | str) -> tuple[sqlite3.Connection, RunLock | None]:
    """Open or make the ledger at `path` (`:memory:` for none). Returns the connection and its lock."""
    if str(path) == ":memory:":
        return _connect(path), None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path.with_name(path.name + ".lock"), owner_of=path)
    try:
        return _connect(path), lock
    except BaseException:
        lock.release()
        raise


def _connect(path: Path | str) -> sqlite3.Connection:
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None)
        # Some builds overwrite deleted rows with zeros, which costs tenfold; pruned payloads are no secret.
        db.execute("PRAGMA secure_delete = OFF")
        _check(db, path)
        # NORMAL survives the death of the process at any point; only a power cut may cost the last commits.
        db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 4000;")
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        hint = "it is not a ledger: move it away or choose another run directory"
        if isinstance(error, sqlite3.OperationalError):
            hint = "check that the directory is writable and has space"
        raise LedgerError(f"{path}: {error}; {hint}") from error
    except BaseException:
        if db is not None:
            db.close()
        raise
    return db


def _check(db: sqlite3.Connection, path: Path | str) -> None:
    """Make the tables of a new file, and refuse a file that is not a ledger or not of this schema."""
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != _APPLICATION_ID:
        if tables or application_id:
            raise LedgerError(f"{path}: a database of another program; move it away or choose another run directory")
        db.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {_APPLICATION_ID}; {_TABLES}"
            f"INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;"
        )
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    schema = int(row[0]) if row and str(row[0]).isdigit() else 0
    if schema > SCHEMA:
        raise LedgerError(
            f"{path}: schema {schema} was written by a newer Headway, this one reads up to {SCHEMA}; "
            "upgrade Headway or choose another run directory"
        )
    if schema < SCHEMA:
        raise LedgerError(f"{path}: schema {schema} is not known to this Headway; choose another run directory")
    if db.execute("SELECT 1 FROM meta WHERE key = 'run'").fetchone() is None:
        db.execute("INSERT INTO meta VALUES ('run', ?)", (uuid.uuid4().hex,))


@contextmanager
def report_damage(path: Path | str) -> Iterator[None]:
    """Raise `LedgerError` with advice for whatever reading a damaged file raises."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError, LookupError, OverflowError) as error:
        hint = "put it back from a copy, or begin a new run with resume=CHECKPOINT"
        raise LedgerError(f"{path} is damaged: {error}; {hint}") from error


def list_recorded_checkpoints(path: Path) -> list[tuple[int, str]]:
    """Return version and directory of the checkpoints in the ledger at `path`, which may be in use; newest first."""
    return [(int(version), str(name)) for version, name in _query(path, f"{_CHECKPOINTS} ORDER BY version DESC")]


def is_unused_ledger(path: Path) -> bool:
    """Return whether no run has written anything to the ledger at `path`; there may be none."""
    return not _query(path, f"SELECT 1 FROM (SELECT group_id, position FROM groups UNION ALL {_CHECKPOINTS}) LIMIT 1")


_CHECKPOINTS = "SELECT version, directory FROM checkpoints"


def _query(path: Path, statement: str) -> list[Any]:
    if not path.exists():
        return []
    db = _open_to_read(path)
    try:
        has_tables = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'checkpoints'").fetchone()
        return db.execute(statement).fetchall() if has_tables else []
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: {error}; it is not a ledger") from error
    finally:
        db.close()


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Open a ledger whose directory may be read-only; SQLite otherwise needs to write beside it, even to read."""
    if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
        return sqlite3.connect(path)
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


class RunLock:
    """An exclusive lock on a file beside the ledger, held while its owner lives."""

    def __init__(self, path: Path, *, owner_of: Path) -> None:
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise LedgerError(
                f"{owner_of}: in use by process {owner}; wait for that run to end, stop it, "
                "or choose another run directory"
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        # A forked child shares the lock and may outlive a killed parent: it closes its copy at once.
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_copy(itself()))

    def release(self) -> None:
        """Release the lock. Idempotent. The file stays, because removing it would race with the next owner."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for copies that a fork has not closed yet
            self._file.close()

    def close_copy(self) -> None:
        """Close a forked copy. The lock itself stays with the parent."""
        self._file.close()


def _close_copy(lock: RunLock | None) -> None:
    if lock is not None:
        lock.close_copy()


def read_maximum(db: sqlite3.Connection, column: str, table: str, *, default: int) -> int:
    """Return the largest value of a column, or `default` for an empty table."""
    (value,) = db.execute(f"SELECT max({column}) FROM {table}").fetchone()
    return default if value is None else int(value)


_END = "end = ?, reason = ?, trained_at = ?"
_MEMBERS = "row BETWEEN ? AND ? AND group_id = ?"


class Journal:
    """The connection, and the writes that are not in the file yet."""

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
        """Ends of all members of a group that have none yet: one statement for each group instead of each sample."""
        self.members_ended = 0
        """Number of samples that `member_ends` must change."""
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

    def schedule_flush(self) -> None:
        """Make sure that what was buffered is written.

        A deferred flush that failed has no caller to raise to, so the next entry tries again and raises in its place.
        """
        if self._defer is None or self._failed:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._defer(self._flush_deferred)

    def _flush_deferred(self) -> None:
        if not self._scheduled:  # flushed directly in the meantime
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
        """Call `write` in a transaction of its own. If it fails, nothing is written and `LedgerError` is raised."""
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
        """Flush and close the file."""
        self.flush()
        self.db.close()
