"""The filter of zero-variance groups, whose members all got the same reward: they are replaced, but not without end.

What is said here of zero-variance groups holds for those that `query_filter_config` rejects, too.

One step may cost at most `max_num_gen_batches` batches' worth of groups. Up to that limit a zero-variance group is
dropped and another prompt takes its slot. Beyond it, the group fills the batch that waits, with the advantages that the
estimator gives it: zero where members are compared with each other. So a batch always has B groups, and slots, bound,
policies, ledger and resume treat such a group like any other. Smaller batches would need another rule in each of them.

While a full batch is ready, training does not wait, and zero-variance groups are replaced without limit.
"""

from collections.abc import Iterable

from headway.errors import RunStopped
from headway.settings import RunSettings

FRUITLESS_BATCHES = 100
"""A run is stopped after this many batches' worth of zero-variance groups in a row."""


class ZeroVarianceFilter:
    """Decides which zero-variance groups are kept, by what happened since the last batch was taken."""

    def __init__(self, settings: RunSettings) -> None:
        self._size = settings.groups_per_step
        most = settings.max_num_gen_batches
        self._most = (most - 1) * self._size if most else None
        self._replaced = self._fruitless = 0
        self._fillers: set[int] = set()
        """Zero-variance groups that were kept and are in no batch yet."""
        self._coming: set[int] = set()
        """Those among them that have not reached the buffer yet."""

    def keep(self, group_id: int, ready: int) -> bool:
        """Return whether a zero-variance group is kept to fill a batch. `ready` groups are in the buffer."""
        self._fruitless += 1  # some such groups are normal; a run in which all teach nothing is stopped
        if self._fruitless >= FRUITLESS_BATCHES * self._size:
            raise RunStopped(
                f"the last {self._fruitless} groups had equal rewards throughout, or were rejected by "
                "query_filter_config: nothing to learn from"
            )
        full = ready + len(self._coming) >= self._size
        if full or self._most is None or self._replaced < self._most:
            self._replaced += 1
            return False
        self._fillers.add(group_id)
        self._coming.add(group_id)
        return True

    def group_arrived(self, group_id: int) -> None:
        """Note that a group is in the buffer. One with different rewards shows that the run makes progress."""
        self._coming.discard(group_id)
        if group_id not in self._fillers:
            self._fruitless = 0

    def batch_taken(self, group_ids: Iterable[int]) -> dict[str, int]:
        """Note that a batch was taken. Return how many groups were replaced for it, and how many of it are fillers."""
        filled = self._fillers.intersection(group_ids)
        self._fillers -= filled
        counts = {"replaced": self._replaced, "filled": len(filled)}
        self._replaced = 0
        return counts

    def forget(self, group_id: int) -> None:
        self._fillers.discard(group_id)
        self._coming.discard(group_id)
