"""Coverage of the source: which positions are taken, and which are to be given out (again).

Every position below `cursor` has exactly one group that is open or has ended for good, or it waits to be given out
again. So every task of an epoch is trained or dropped for a reason of its own exactly once, whatever was killed.
"""

import sqlite3
from collections.abc import Iterable

from headway.errors import LedgerError
from headway.types import DropReason

_GIVES_BACK = ", ".join(f"'{reason}'" for reason in DropReason if reason.regenerates)
_IS_TAKEN = f"(end IS NOT 'dropped' OR reason NOT IN ({_GIVES_BACK}))"


class TaskCoverage:
    """Positions that are taken and positions that wait, as the entries of the ledger change them."""

    def __init__(self, cursor: int = 0, waiting: Iterable[int] = ()) -> None:
        self.cursor = cursor
        """First position that was never started and that nothing behind it was."""
        self.waiting = set(waiting)
        """Positions below the cursor without a group: given back, or passed over when a later one started."""

    def take(self, position: int) -> None:
        """Note that a group of `position` starts. Raise `LedgerError` if it has one that counts."""
        if position >= self.cursor:
            self.waiting.update(range(self.cursor, position))
            self.cursor = position + 1
        elif position in self.waiting:
            self.waiting.remove(position)
        else:
            raise LedgerError(f"position {position} cannot start: it has a group that is open or has ended for good")

    def give_back(self, position: int) -> None:
        """Note that the group of `position` was dropped for a reason that regenerates."""
        self.waiting.add(position)

    def describe(self) -> str:
        """Return the state in words, to compare it with another one."""
        return f"first unread position {self.cursor}, waiting {sorted(self.waiting)}"


def read_coverage(db: sqlite3.Connection) -> TaskCoverage:
    """Return the coverage that follows from the groups in the file."""
    (cursor, started) = db.execute(
        "SELECT coalesce(max(position), -1) + 1, count(DISTINCT position) FROM groups"
    ).fetchone()
    given_back = db.execute(f"SELECT position FROM groups GROUP BY position HAVING NOT max({_IS_TAKEN})")
    waiting = {int(position) for (position,) in given_back}
    if started < cursor:
        waiting |= set(range(cursor)) - {int(position) for (position,) in db.execute("SELECT position FROM groups")}
    return TaskCoverage(cursor, waiting)


def find_coverage_problems(db: sqlite3.Connection) -> list[str]:
    """Return the positions that two groups have taken, in words."""
    twice = db.execute(
        f"SELECT position, group_concat(group_id, ' and ') FROM groups WHERE {_IS_TAKEN} "
        "GROUP BY position HAVING count(*) > 1"
    )
    return [f"position {position} has more than one group that counts: {groups}" for position, groups in twice]
