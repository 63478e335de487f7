"""Notices that a stage drops every group, so that a run which trains nothing does not go on silently.

Other reasons for drops have limits of their own: groups with equal rewards fill batches or stop the run, and groups
whose members fail degrade it. Stale groups cannot be dropped without end, because only training makes groups stale.
"""

from headway.errors import RunStopped
from headway.flow.zero_variance import FRUITLESS_BATCHES
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport
from headway.types import DropReason

REPORTED_BATCHES = 2
"""The first report comes after this many batches' worth of groups in a row, the next at twice as many, and so on."""
_COUNTED_REASONS = frozenset({DropReason.FILTERED, DropReason.SCORING_FAILED})


class FruitlessDrops:
    """Counts the groups that stages have dropped since one last reached `train`."""

    def __init__(self, groups_per_step: int, events: EventLog) -> None:
        self._size, self._events = groups_per_step, events
        self._dropped, self._report_at = 0, REPORTED_BATCHES * groups_per_step

    def group_dropped(self, who: str, reason: DropReason) -> None:
        """Count a drop by stage `who`. Report a row of them; raise `RunStopped` at `FRUITLESS_BATCHES` batches."""
        if reason not in _COUNTED_REASONS:
            return
        self._dropped += 1
        what = f"{who} dropped the last {self._dropped} groups ({reason}), and none has reached train since"
        if self._dropped >= FRUITLESS_BATCHES * self._size:
            raise RunStopped(f"{what}: nothing is left to train on")
        if self._dropped >= self._report_at:
            self._report_at = 2 * self._dropped
            self._events.emit(ErrorReport(who=who, error="FruitlessDrops", message=what))

    def group_arrived(self) -> None:
        """Note that a group has reached `train`."""
        self._dropped, self._report_at = 0, REPORTED_BATCHES * self._size
