"""Staleness policies: what happens to groups near the staleness bound.

A policy answers three questions. `admit`: may a new group start? `select`: which groups make the next batch? `evict`:
which groups can no longer be used? All policies keep the hard bound; they differ in who pays for a straggler:

* `drop`: training goes on, and the prompt of the straggler is generated again.
* `wait`: every group that starts has a place in a batch before its deadline, and training waits for it there.
* `window`: groups are trained in the order in which they started, looking ahead over a bounded number of groups.

A policy of your own is a class with these three methods and a constructor that takes the `RunSettings`. Register it
with `headway.register_policy("name")`; subclassing `DropPolicy` saves most of the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from headway.registry import STALENESS_POLICIES
from headway.settings import RunSettings
from headway.user_code import raise_plugin_error


class CandidateGroup(Protocol):
    """A group as a policy sees it. Policies read it and change nothing."""

    @property
    def number(self) -> int:
        """Id of the group; ids grow in the order in which groups start."""

    @property
    def oldest(self) -> int:
        """Oldest version among the tokens of the group."""

    @property
    def is_ready(self) -> bool:
        """Whether the group is in the buffer and may be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """The numbers that a policy decides by, at one moment."""

    trained: int
    served: int
    stepping: bool
    """Whether a batch has been chosen and is being trained."""
    outstanding: int
    """Number of slots that are taken."""
    untrained: int
    """Number of groups with a slot that are in no batch yet."""
    slots: int
    """Number of slots that exist, spare ones included; fewer while the run is degraded."""
    bound: int
    """Largest lag at which a sample may be trained."""

    @property
    def earliest(self) -> int:
        """`trained` at the next batch that has not been chosen yet."""
        return self.trained + self.stepping

    def is_usable(self, oldest: int) -> bool:
        """Return whether a group whose oldest version is `oldest` can be part of that batch."""
        return self.earliest - oldest <= self.bound


class StalenessPolicy(Protocol):
    """The three questions that the module's docstring explains."""

    def admit(self, snapshot: SchedulerSnapshot) -> bool: ...
    def select(
        self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot
    ) -> Sequence[CandidateGroup] | None: ...
    def evict(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> Sequence[CandidateGroup]: ...


class DropPolicy:
    """Never makes training wait for a straggler: takes the first full batch that is fresh enough."""

    def __init__(self, settings: RunSettings) -> None:
        self._size = settings.groups_per_step
        self._sign = -1 if settings.selection_order == "freshest" else 1

    def admit(self, snapshot: SchedulerSnapshot) -> bool:
        return snapshot.outstanding < snapshot.slots and snapshot.is_usable(snapshot.served)

    def select(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> list[CandidateGroup] | None:
        ready = [group for group in groups if group.is_ready and snapshot.trained - group.oldest <= snapshot.bound]
        if len(ready) < self._size:
            return None
        return self.sort_by_freshness(ready)[: self._size]

    def evict(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> list[CandidateGroup]:
        return [group for group in groups if not snapshot.is_usable(group.oldest)]

    def sort_by_freshness(self, groups: Sequence[CandidateGroup]) -> list[CandidateGroup]:
        """Sort by freshness in the configured order, then by order of starting."""
        return sorted(groups, key=lambda group: (self._sign * group.oldest, group.number))


class WaitPolicy(DropPolicy):
    """Trains everything that it starts: each group has a place in a batch before its deadline, and training waits for
    a straggler only when no later batch can take it. Only as many groups as were started redundantly are given up."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._redundant = settings.additional_groups
        self._blocked_at: tuple[int, int] | None = None
        """Versions, trained and served, at which no batch could be made."""
        self._stragglers: frozenset[int] = frozenset()
        """Numbers of the groups that were not ready then, though a batch needs some of them."""
        self._may_remain = 0
        """Number of these groups without which a batch can be made."""

    def admit(self, snapshot: SchedulerSnapshot) -> bool:
        if snapshot.outstanding >= snapshot.slots or not snapshot.is_usable(snapshot.served):
            return False
        batches = snapshot.served + snapshot.bound - snapshot.earliest + 1  # that may still take a group started now
        return snapshot.untrained < batches * self._size + self._redundant

    def select(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> list[CandidateGroup] | None:
        if self._is_still_blocked(groups, snapshot):
            return None
        lags = sorted(((snapshot.trained - group.oldest, group) for group in groups), key=lambda pair: -pair[0])
        chosen: dict[int, CandidateGroup] = {}
        for later in range(snapshot.bound + 1):  # batches after this one that may take a group of this lag
            due = [group for lag, group in lags if snapshot.bound - later <= lag <= snapshot.bound]
            needed = min(len(due) - later * self._size - self._redundant, self._size) - len(chosen)
            if needed > 0:
                ready = [group for group in due if group.is_ready and group.number not in chosen]
                if len(ready) < needed:
                    self._stragglers = frozenset(group.number for group in due if not group.is_ready)
                    self._may_remain = len(self._stragglers) - (needed - len(ready))
                    self._blocked_at = (snapshot.trained, snapshot.served)
                    return None
                chosen.update((group.number, group) for group in ready[:needed])
        ready = [group for lag, group in lags if group.is_ready and lag <= snapshot.bound]
        others = self.sort_by_freshness([group for group in ready if group.number not in chosen])
        batch = [*chosen.values(), *others][: self._size]
        return batch if len(batch) == self._size else None

    def _is_still_blocked(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> bool:
        """Return whether too many of the stragglers that blocked the last choice are missing still.

        The question comes with every group that gets ready, and this answer costs much less than a new choice.
        """
        if self._blocked_at != (snapshot.trained, snapshot.served):
            return False
        missing = self._stragglers.intersection(group.number for group in groups if not group.is_ready)
        return len(missing) > self._may_remain


class WindowPolicy(DropPolicy):
    """Trains in the order of starting: a batch is chosen from the first `window` groups alone."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._window = settings.staleness_window

    def select(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> list[CandidateGroup] | None:
        usable = [group for group in groups if snapshot.trained - group.oldest <= snapshot.bound]
        ahead = sorted(usable, key=lambda group: group.number)[: self._window]
        ready = [group for group in ahead if group.is_ready][: self._size]
        return ready if len(ready) == self._size else None


STALENESS_POLICIES.register("drop", DropPolicy)
STALENESS_POLICIES.register("wait", WaitPolicy)
STALENESS_POLICIES.register("window", WindowPolicy)


class PluginPolicy:
    """A policy of a user, whose errors name it."""

    def __init__(self, name: str, policy: Any) -> None:
        self._name, self._policy = name, policy

    def __getattr__(self, attribute: str) -> Any:
        method = getattr(self._policy, attribute)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise_plugin_error("staleness policy", self._name, type(self._policy), error)

        return call if callable(method) else method


def make_policy(settings: RunSettings) -> StalenessPolicy:
    """Make the policy that the settings name."""
    policy: StalenessPolicy = STALENESS_POLICIES.get(settings.staleness_policy)(settings)
    is_ours = type(policy).__module__.split(".")[0] == "headway"
    return policy if is_ours else cast(StalenessPolicy, PluginPolicy(settings.staleness_policy, policy))
