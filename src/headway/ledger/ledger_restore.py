"""Going back to a checkpoint: what a run goes on with after its process or its trainer was lost.

**Versions of a lost lineage.** A restore to `ancestor` makes a branch: versions are numbered on from `ancestor`, so
version 7 before and version 7 after it are different weights. An action made by version v > `ancestor` came from
weights that no longer exist. Its distance to any weights trained from now on goes through the common ancestor,
(v − ancestor) updates back and (trained − ancestor) forward. The action is therefore renumbered to 2·ancestor − v,
which makes `trained − version` exactly that distance: freshness is still judged by one subtraction, and the bound on
staleness stays provable. The number may be negative.

A record is renumbered once and for good: every stored record has the lineage in which it was recorded, and the restores
since then are applied on reading, never to the stored bytes. A second crash cannot renumber twice.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import LedgerError
from headway.ledger.ledger_records import decode_episode, decode_generation, decode_grades
from headway.ledger.ledger_store import read_maximum
from headway.ledger.task_coverage import TaskCoverage
from headway.types import (
    DropReason,
    Episode,
    Generation,
    PartialGeneration,
    Score,
    Turn,
    VersionRun,
    extend_runs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredGroup:
    """A group that was started and neither trained nor dropped."""

    group_id: int
    position: int
    episodes: dict[str, Episode]
    """Finished members, by sample id, in the order they were started."""
    grades: dict[str, tuple[Score, float]]
    """Score and advantage by sample id; empty when the group was not graded."""
    partials: dict[str, Generation]
    """Partial results of members that were being generated; a `PartialGeneration` beyond the first turn."""
    open: tuple[str, ...]
    """Members started and not finished."""
    members_started: int
    """Number of samples ever started in it, including dropped ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """Everything a run needs to go on from a checkpoint."""

    cursor: int
    """First position of the source that was never started and that nothing behind it was."""
    pending: tuple[int, ...]
    """Positions to be given out again, ascending: those below the cursor that no group has taken."""
    groups: tuple[RestoredGroup, ...]
    """Every open group, by group id."""
    next_group_id: int
    lineage: int
    """Number of restores until now."""
    damaged: tuple[int, ...] = ()
    """Groups that were dropped because a stored record of theirs was damaged."""


def rebase_version(version: int, *, ancestor: int, base: int | None = None) -> int:
    """Renumber `version` for the branch that goes on from `ancestor`; never closer than it really is.

    `base` is where the lineage of the record itself began, `None` for the first. Numbers below it came with a
    resumed partial and may be renumbered ones. They stay right unless this restore goes back beyond `base`; then
    they are moved by twice the difference, which is exact for renumbered ones and cautious for the others.
    """
    if base is None or version >= base:
        return version if version <= ancestor else 2 * ancestor - version
    return version if ancestor >= base else version - 2 * (base - ancestor)


def rebase_generation(generation: Generation, *, ancestor: int, base: int | None = None) -> Generation:
    """Return `generation` with its versions renumbered for the branch that goes on from `ancestor`."""
    runs: tuple[VersionRun, ...] = ()
    for run in generation.runs:
        runs = extend_runs(runs, rebase_version(run.version, ancestor=ancestor, base=base), run.count)
    return generation if runs == generation.runs else replace(generation, runs=runs)


def rewind(db: sqlite3.Connection, version: int) -> None:
    """Undo every end that is newer than the checkpoint `version`. Must run in one transaction."""
    lineage = read_maximum(db, "lineage", "restores", default=0) + 1
    db.execute("INSERT INTO restores VALUES (?, ?)", (lineage, version))
    undone = "(end = 'saved' OR trained_at > ?)"
    db.execute(
        f"INSERT INTO undone SELECT ?, row, end, trained_at FROM samples WHERE end IS NOT NULL AND {undone}",
        (lineage, version),
    )
    clear = "SET end = NULL, reason = NULL, trained_at = NULL WHERE"
    db.execute(f"UPDATE samples {clear} {undone}", (version,))
    db.execute(f"UPDATE groups {clear} trained_at > ?", (version,))
    db.execute("DELETE FROM checkpoints WHERE version > ?", (version,))
    _drop_unrecoverable(db, lineage)


def _drop_unrecoverable(db: sqlite3.Connection, lineage: int) -> None:
    """Drop groups whose payloads a newer checkpoint had pruned: they are generated again from their prompt.

    There are such groups only if the newest checkpoint is damaged and an older one is restored.
    """
    lost = db.execute(
        "SELECT DISTINCT group_id FROM undone JOIN samples USING (row) WHERE lineage = ? AND undone.end = 'trained' "
        "AND row NOT IN (SELECT row FROM payloads)",
        (lineage,),
    ).fetchall()
    drop_groups(db, [group_id for (group_id,) in lost], DropReason.LOST_LINEAGE)


def drop_groups(db: sqlite3.Connection, group_ids: Sequence[int], reason: DropReason) -> None:
    """Drop open groups with all that is stored of them. Must run in one transaction."""
    for group_id in group_ids:
        rows = db.execute("SELECT row FROM samples WHERE group_id = ? AND end IS NULL", (group_id,)).fetchall()
        for table in ("payloads", "partials"):
            db.executemany(f"DELETE FROM {table} WHERE row = ?", rows)
        for table in ("samples", "groups"):
            db.execute(
                f"UPDATE {table} SET end = 'dropped', reason = ? WHERE group_id = ? AND end IS NULL",
                (str(reason), group_id),
            )
        db.execute("DELETE FROM grades WHERE group_id = ?", (group_id,))


def find_damaged_groups(db: sqlite3.Connection) -> tuple[int, ...]:
    """Return the open groups that have a stored record which is not as it was written."""
    stored: tuple[tuple[str, Callable[[Any], object]], ...] = (
        (f"SELECT group_id, body FROM payloads WHERE {_IS_OPEN}", decode_episode),
        (f"SELECT group_id, body FROM partials JOIN samples USING (row) WHERE {_IS_OPEN}", decode_generation),
        ("SELECT group_id, body FROM grades JOIN groups USING (group_id) WHERE end IS NULL", decode_grades),
    )
    found = set[int]()
    for query, decode in stored:
        for group_id, body in db.execute(query):
            try:
                decode(body)
            except (LedgerError, ValueError, TypeError, LookupError, OverflowError):
                found.add(group_id)
    return tuple(sorted(found))


def read_restored(db: sqlite3.Connection, coverage: TaskCoverage, damaged: tuple[int, ...] = ()) -> RestoredRun:
    """Read what is still to be done."""
    restores: dict[int, int] = dict(db.execute("SELECT lineage, version FROM restores"))
    episodes = {
        row: _rebase_episode(decode_episode(body), lineage, restores)
        for row, lineage, body in db.execute(f"SELECT row, lineage, body FROM payloads WHERE {_IS_OPEN}")
    }
    partials = {
        row: _rebase_stored(decode_generation(body), lineage, restores)
        for row, lineage, body in db.execute(f"SELECT row, lineage, body FROM partials WHERE {_IS_OPEN}")
    }
    members: dict[int, list[tuple[int, str, bool]]] = {}
    in_open_groups = "group_id IN (SELECT group_id FROM groups WHERE end IS NULL)"
    for group_id, row, sample_id, ended in db.execute(
        f"SELECT group_id, row, sample_id, end IS NOT NULL FROM samples WHERE {in_open_groups} ORDER BY row"
    ):
        members.setdefault(group_id, []).append((row, sample_id, bool(ended)))
    grades = dict(db.execute(f"SELECT group_id, body FROM grades WHERE {in_open_groups}"))
    return RestoredRun(
        cursor=coverage.cursor,
        pending=tuple(sorted(coverage.waiting)),
        groups=tuple(
            _make_group(group_id, position, members.get(group_id, []), episodes, partials, grades.get(group_id, "[]"))
            for group_id, position in db.execute(
                "SELECT group_id, position FROM groups WHERE end IS NULL ORDER BY group_id"
            )
        ),
        next_group_id=read_maximum(db, "group_id", "groups", default=-1) + 1,
        lineage=max(restores, default=0),
        damaged=damaged,
    )


_IS_OPEN = "row IN (SELECT row FROM samples WHERE end IS NULL)"


def _make_group(
    group_id: int,
    position: int,
    members: Iterable[tuple[int, str, bool]],
    episodes: dict[int, Episode],
    partials: dict[int, Generation],
    grades: str,
) -> RestoredGroup:
    members = list(members)
    alive = [(row, sample_id) for row, sample_id, ended in members if not ended]
    ids = {sample_id for _, sample_id in alive}
    return RestoredGroup(
        group_id=group_id,
        position=position,
        episodes={sample_id: episodes[row] for row, sample_id in alive if row in episodes},
        grades={sample_id: grade for sample_id, grade in decode_grades(grades).items() if sample_id in ids},
        partials={sample_id: partials[row] for row, sample_id in alive if row in partials},
        open=tuple(sample_id for row, sample_id in alive if row not in episodes),
        members_started=len(members),
    )


def _rebase_episode(episode: Episode, lineage: int, restores: dict[int, int]) -> Episode:
    return replace(episode, turns=_rebase_turns(episode.turns, lineage, restores))


def _rebase_turns(turns: Iterable[Turn], lineage: int, restores: dict[int, int]) -> tuple[Turn, ...]:
    return tuple(replace(turn, generation=_rebase_stored(turn.generation, lineage, restores)) for turn in turns)


def _rebase_stored(generation: Generation, lineage: int, restores: dict[int, int]) -> Generation:
    since = [version for number, version in restores.items() if number > lineage]
    if not since:
        return generation
    if isinstance(generation, PartialGeneration):
        generation = replace(generation, before=_rebase_turns(generation.before, lineage, restores))
    return rebase_generation(generation, ancestor=min(since), base=restores.get(lineage))
