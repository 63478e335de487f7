"""The state of the ledger in memory: samples and groups without an end, and what a checkpoint may prune.

It mirrors the file plus the writes that wait in the journal; a restore reads it anew. Rules are checked against it, so
that a broken rule raises at the call that broke it, without a query. `find_problems` checks the file itself.
"""

from __future__ import annotations

import sqlite3

from headway.ledger.ledger_store import read_maximum
from headway.ledger.task_coverage import find_coverage_problems, read_coverage


class OpenSample:
    """A sample without an end."""

    __slots__ = ("finished", "group", "has_partial", "row")

    def __init__(self, row: int, group: OpenGroup) -> None:
        self.row = row
        self.group = group
        self.finished = False
        self.has_partial = False


class OpenGroup:
    """A group without an end."""

    __slots__ = ("dropped", "first_row", "graded", "group_id", "last_row", "open", "position")

    def __init__(self, group_id: int, position: int) -> None:
        self.group_id, self.position = group_id, position
        self.open: dict[str, OpenSample] = {}
        self.dropped: set[str] = set()
        """Ids of members that have ended, so that none is used twice."""
        self.first_row = 0
        self.last_row = -1
        """Rows from the first to the last hold its members, and perhaps those of other groups."""
        self.graded = False

    def add(self, sample_id: str, row: int) -> OpenSample:
        """Add a member. Rows grow."""
        if not self.first_row:
            self.first_row = row
        self.last_row = row
        sample = self.open[sample_id] = OpenSample(row, self)
        return sample

    @property
    def members(self) -> tuple[int, int, int]:
        """First row, last row and group id, by which statements find its members."""
        return (self.first_row, self.last_row, self.group_id)


class LedgerState:
    """All samples and groups of the file that have no end yet."""

    def __init__(self, db: sqlite3.Connection) -> None:
        found = db.execute(f"SELECT group_id, position {_OPEN_GROUPS}")
        self.groups = {group_id: OpenGroup(group_id, position) for group_id, position in found}
        self.samples: dict[str, OpenSample] = {}
        self._read_members(db)
        for (group_id,) in db.execute("SELECT group_id FROM grades"):
            if group_id in self.groups:
                self.groups[group_id].graded = True
        self.next_row = read_maximum(db, "row", "samples", default=0) + 1
        self.next_group_id = read_maximum(db, "group_id", "groups", default=-1) + 1
        self.coverage = read_coverage(db)
        self.lineage = read_maximum(db, "lineage", "restores", default=0)
        self.checkpointed = read_maximum(db, "version", "checkpoints", default=-1)
        self.unpruned = _read_unpruned(db)
        """Groups whose payloads and grades are still in the file, by the version that they were trained for."""
        self.ends = count_ends(db)
        """Number of samples by how they ended."""
        self.ends.pop("open", None)

    def _read_members(self, db: sqlite3.Connection) -> None:
        finished = {row for (row,) in db.execute("SELECT row FROM payloads")}
        with_partial = {row for (row,) in db.execute("SELECT row FROM partials")}
        members = (
            f"SELECT row, sample_id, group_id, end FROM samples WHERE group_id IN (SELECT group_id {_OPEN_GROUPS})"
        )
        for row, sample_id, group_id, end in db.execute(f"{members} ORDER BY row"):
            group = self.groups[group_id]
            if end is not None:
                group.dropped.add(sample_id)
                continue
            sample = self.samples[sample_id] = group.add(sample_id, row)
            sample.finished, sample.has_partial = row in finished, row in with_partial

    def add_ends(self, state: str, count: int) -> None:
        """Count samples that ended as `state`."""
        if count:
            self.ends[state] = self.ends.get(state, 0) + count


_OPEN_GROUPS = "FROM groups WHERE end IS NULL"


def count_ends(db: sqlite3.Connection) -> dict[str, int]:
    """Count the samples in the file by state: `trained`, `saved`, `open` and `dropped:<reason>`."""
    found = db.execute("SELECT end, reason, count(*) FROM samples GROUP BY end, reason")
    return {f"dropped:{reason}" if end == "dropped" else end or "open": count for end, reason, count in found}


def _read_unpruned(db: sqlite3.Connection) -> dict[int, list[tuple[int, int, int]]]:
    unpruned: dict[int, list[tuple[int, int, int]]] = {}
    for version, *members in db.execute(
        "SELECT trained_at, min(row), max(row), group_id FROM payloads JOIN groups USING (group_id) "
        "WHERE end = 'trained' GROUP BY group_id"
    ):
        first_row, last_row, group_id = members
        unpruned.setdefault(version, []).append((first_row, last_row, group_id))
    return unpruned


_MUST_BE_EMPTY: tuple[tuple[str, str], ...] = (
    (
        "sample {} was started {} times",
        "SELECT sample_id, count(*) FROM samples GROUP BY sample_id HAVING count(*) > 1",
    ),
    (
        "sample {} belongs to group {}, which was never started",
        "SELECT sample_id, group_id FROM samples WHERE group_id NOT IN (SELECT group_id FROM groups)",
    ),
    (
        "sample {} has an end that is not one: {}, reason {}, trained at {}",
        "SELECT sample_id, end, reason, trained_at FROM samples WHERE NOT ("
        "  (end IS NULL OR end = 'saved') AND reason IS NULL AND trained_at IS NULL"
        "  OR end IS 'trained' AND reason IS NULL AND trained_at IS NOT NULL"
        "  OR end IS 'dropped' AND reason IS NOT NULL AND trained_at IS NULL)",
    ),
    (
        "group {} was trained partly: its sample {} is {}",
        "SELECT group_id, sample_id, coalesce(samples.end, 'open') FROM samples JOIN groups USING (group_id) "
        "WHERE groups.end = 'trained' AND NOT (samples.end IS 'dropped' "
        "  OR samples.end IS 'trained' AND samples.trained_at IS groups.trained_at)",
    ),
    (
        "group {} was trained without a sample",
        "SELECT group_id FROM groups WHERE end = 'trained' "
        "AND group_id NOT IN (SELECT group_id FROM samples WHERE end = 'trained')",
    ),
    (
        "sample {} was trained, its group {} was not",
        "SELECT sample_id, group_id FROM samples JOIN groups USING (group_id) "
        "WHERE samples.end = 'trained' AND groups.end IS NOT 'trained'",
    ),
    (
        "group {} was dropped, its sample {} is {}",
        "SELECT group_id, sample_id, coalesce(samples.end, 'open') FROM samples JOIN groups USING (group_id) "
        "WHERE groups.end = 'dropped' AND samples.end IS NOT 'dropped'",
    ),
    (
        "sample {} was trained for version {}, which is in no checkpoint, and its payload is gone",
        "SELECT sample_id, trained_at FROM samples WHERE end = 'trained' "
        "AND trained_at > (SELECT coalesce(max(version), -1) FROM checkpoints) "
        "AND row NOT IN (SELECT row FROM payloads)",
    ),
    (
        "row {} has a payload and no sample that could use it",
        "SELECT row FROM payloads WHERE row NOT IN (SELECT row FROM samples WHERE end IS NOT 'dropped')",
    ),
    (
        "row {} has a partial sequence and no unfinished sample",
        "SELECT row FROM partials WHERE row IN (SELECT row FROM payloads) "
        "OR row NOT IN (SELECT row FROM samples WHERE end IS NULL OR end = 'saved')",
    ),
    (
        "restore {} took back an end of row {}, which was never started",
        "SELECT lineage, row FROM undone WHERE row NOT IN (SELECT row FROM samples)",
    ),
)


def check_intact(db: sqlite3.Connection) -> None:
    """Raise `ValueError` with the first problem of the file: its pages, then what the guarantees say about its rows."""
    (answer,) = db.execute("PRAGMA quick_check(1)").fetchone()
    problems = [str(answer)] if answer != "ok" else find_problems(db)
    if problems:
        raise ValueError(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def find_problems(db: sqlite3.Connection) -> list[str]:
    """Return every broken guarantee in the file, in words."""
    found = [problem.format(*row) for problem, query in _MUST_BE_EMPTY for row in db.execute(query)]
    return found + find_coverage_problems(db)
