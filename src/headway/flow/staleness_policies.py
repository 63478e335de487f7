"""What happens to samples near the staleness bound: three verbs, three policies.

`admit`: may a new group start? `select`: which groups make the next batch? `evict`: which can no longer be used?

All three keep the hard bound; they differ in who pays for a straggler. `drop` lets training go on and regenerates
the straggler's prompt; `wait` starts only what can be trained in time and makes training wait for it; `window`
trains in the order of starting, looking ahead over a bounded number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.settings import RunSettings


class CandidateGroup(Protocol):
    """A group as a policy sees it. Attributes only: policies move nothing."""

    @property
    def number(self) -> int:
        """Order of starting."""
        ...

    @property
    def oldest(self) -> int:
        """Oldest version at work in it."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it may be trained."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """The line at one moment."""

    trained: int
    served: int
    stepping: bool
    """A batch has been chosen and is being trained."""
    outstanding: int
    """Slots taken."""
    untrained: int
    """Of those, groups not yet in a batch."""
    slots: int
    """Slots there are, spares included; fewer while the run is degraded."""
    bound: int

    @property
    def earliest(self) -> int:
        """`trained` at the next batch that has not been chosen yet."""
        return self.trained + self.stepping

    def usable(self, oldest: int) -> bool:
        """Whether something this old can be in that batch."""
        return self.earliest - oldest <= self.bound


class StalenessPolicy(Protocol):
    """See the module's docstring."""

    def admit(self, view: SchedulerSnapshot) -> bool: ...
    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup] | None: ...
    def evict(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup]: ...


class DropPolicy:
    """Training never waits for a straggler: it takes the first full batch that is fresh enough."""

    def __init__(self, settings: RunSettings) -> None:
        self._size = settings.groups_per_step
        self._sign = -1 if settings.selection_order == "freshest" else 1

    def admit(self, view: SchedulerSnapshot) -> bool:
        return view.outstanding < view.slots and view.usable(view.served)

    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup] | None:
        ready = [group for group in groups if group.is_ready and view.trained - group.oldest <= view.bound]
        if len(ready) < self._size:
            return None
        return self.ordered(ready)[: self._size]

    def evict(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup]:
        return [group for group in groups if not view.usable(group.oldest)]

    def ordered(self, groups: Sequence[CandidateGroup]) -> list[CandidateGroup]:
        """By freshness as configured, then by order of starting."""
        return sorted(groups, key=lambda group: (self._sign * group.oldest, group.number))


class WaitPolicy(DropPolicy):
    """Training waits for groups at their deadline; only what fits before its deadline is started."""

    def admit(self, view: SchedulerSnapshot) -> bool:
        if view.outstanding >= view.slots or not view.usable(view.served):
            return False
        batches = view.served + view.bound - view.earliest + 1  # that may still take a group started now
        return view.untrained < batches * self._size

    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup] | None:
        due = [group for group in groups if view.trained - group.oldest == view.bound]
        if not all(group.is_ready for group in due):
            return None
        rest = [group for group in groups if group.is_ready and view.trained - group.oldest < view.bound]
        chosen = [*sorted(due, key=lambda group: group.number), *self.ordered(rest)][: self._size]
        return chosen if len(chosen) == self._size else None


class WindowPolicy(DropPolicy):
    """First started, first trained, with a look-ahead: a batch is chosen from the oldest `window` groups alone."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._window = settings.staleness_window

    def select(self, groups: Sequence[CandidateGroup], view: SchedulerSnapshot) -> list[CandidateGroup] | None:
        usable = [group for group in groups if view.trained - group.oldest <= view.bound]
        ahead = sorted(usable, key=lambda group: group.number)[: self._window]
        ready = [group for group in ahead if group.is_ready][: self._size]
        return ready if len(ready) == self._size else None


STALENESS_POLICIES: dict[str, type[DropPolicy]] = {"drop": DropPolicy, "wait": WaitPolicy, "window": WindowPolicy}
