"""The ledger's promises, asked of the file itself: each one is a query that must find nothing."""

from __future__ import annotations

import sqlite3

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
        "position {} was trained by {} groups",
        "SELECT position, count(*) FROM groups WHERE end = 'trained' GROUP BY position HAVING count(*) > 1",
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


def find_problems(db: sqlite3.Connection) -> list[str]:
    """Every broken promise in the file, in words."""
    return [problem.format(*row) for problem, query in _MUST_BE_EMPTY for row in db.execute(query)]
