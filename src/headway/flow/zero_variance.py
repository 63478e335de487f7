"""Groups without spread, whose members all got the same reward: replaced, but not without end.

A step waits for at most `max_num_gen_batches` batches' worth of groups. Up to there a group without spread is dropped and
another prompt takes its slot; from there on it fills the batch that waits, with the advantages that the estimator
gives it: zero where members are compared with each other. So a batch is always B groups, and slots, bound, policies,
ledger and resume need not know: such a group is trained like any other, once, inside the bound. A smaller batch would
need another rule for each of them, and could come to no groups at all.

While a full batch is ready nothing waits, and groups without spread are replaced however many there were.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.errors import RunStopped
from headway.settings import RunSettings

FRUITLESS_BATCHES = 100
"""Batches' worth of groups with equal rewards, one after the other, after which a run is stopped."""


class ZeroVarianceFilter:
    """What has come of the groups since the last batch was taken."""

    def __init__(self, settings: RunSettings) -> None:
        self._size = settings.groups_per_step
        most = settings.max_num_gen_batches
        self._most = (most - 1) * self._size if most else None
        self._replaced = self._fruitless = 0
        self._fillers: set[int] = set()
        """Groups that were kept without spread and are in no batch yet."""
        self._coming: set[int] = set()
        """Of those, the ones that are still on their way to the buffer."""

    def wants(self, group_id: int, ready: int) -> bool:
        """Whether a group without spread fills the batch that waits, or is replaced. `ready` are in the buffer."""
        self._count_fruitless()
        full = ready + len(self._coming) >= self._size
        if full or self._most is None or self._replaced < self._most:
            self._replaced += 1
            return False
        self._fillers.add(group_id)
        self._coming.add(group_id)
        return True

    def arrived(self, group_id: int) -> None:
        """A group is in the buffer: if it has spread, the run goes somewhere."""
        self._coming.discard(group_id)
        if group_id not in self._fillers:
            self._fruitless = 0

    def take(self, group_ids: Iterable[int]) -> dict[str, int]:
        """A batch is taken: how many were replaced for it, and how many of it have no spread."""
        filled = self._fillers.intersection(group_ids)
        self._fillers -= filled
        counts = {"replaced": self._replaced, "filled": len(filled)}
        self._replaced = 0
        return counts

    def forget(self, group_id: int) -> None:
        """A group was dropped."""
        self._fillers.discard(group_id)
        self._coming.discard(group_id)

    def _count_fruitless(self) -> None:
        """Groups that teach nothing are normal; nothing but such groups is a run that goes nowhere."""
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_BATCHES * self._size:
            raise RunStopped(f"the last {self._fruitless} groups had equal rewards throughout: nothing to learn from")
