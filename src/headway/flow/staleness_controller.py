"""The staleness controller: versions, slots and the bound. The one place that decides how far rollout runs ahead.

A *slot* is taken when a group starts and given back when the group was trained and the weights made from it are
served, or when it was dropped. A sample is trained only while `trained − oldest ≤ alpha`, judged against
`trained` at the moment of consumption; `begin_step` refuses anything else, whatever a policy chose.

Knows numbers and order only: no back end, no clock, no asyncio but the wake-up of its waiters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from headway.errors import InvariantBroken
from headway.flow.staleness_policies import (
    STALENESS_POLICIES,
    CandidateGroup,
    SchedulerSnapshot,
    StalenessPolicy,
)
from headway.rollout.concurrency import Signal
from headway.settings import RunSettings
from headway.types import DropReason, SampleGroup, Task


class GroupState(StrEnum):
    """Where a group is in its life."""

    FLYING = "flying"
    """Being generated, or on its way down the line."""
    READY = "ready"
    """In the buffer, waiting for a batch."""
    TRAINING = "training"
    TRAINED = "trained"
    """Trained; its slot waits for the weights to be served."""
    GONE = "gone"


class GroupSlot:
    """One taken slot."""

    __slots__ = ("_flying_oldest", "born", "finished_at", "group", "made", "number", "place", "spare", "task")

    def __init__(self, number: int, task: Task, *, born: int, spare: bool) -> None:
        self.number = number
        """The group's id, and its order of starting."""
        self.task = task
        self.born = born
        """`served` when it started."""
        self.spare = spare
        """Taken beyond the ordinary slots."""
        self.place = GroupState.FLYING
        self.group: SampleGroup | None = None
        self.finished_at = -1
        """`trained` when its last member came in."""
        self.made = -1
        """The version that it helped to make, once trained."""
        self._flying_oldest: Callable[[], int] = lambda: born

    @property
    def is_ready(self) -> bool:
        return self.place is GroupState.READY

    @property
    def is_live(self) -> bool:
        """Still on its way to being trained."""
        return self.place in (GroupState.FLYING, GroupState.READY)

    @property
    def oldest(self) -> int:
        """Oldest version in it, as far as it is known."""
        return self.group.oldest if self.group is not None else self._flying_oldest()

    def watch(self, oldest: Callable[[], int]) -> None:
        """Ask `oldest` while the group is being generated."""
        self._flying_oldest = oldest


class Headway:
    """Tickets, versions and the policy. `on_evict(ticket, reason)` is called for every group that must go."""

    def __init__(self, settings: RunSettings, *, trained: int = 0) -> None:
        self.settings = settings
        self.policy: StalenessPolicy = STALENESS_POLICIES[settings.staleness_policy](settings)
        self.trained = trained
        self.served = -1
        self.stepping = False
        self.degraded = False
        """Runs as if alpha were 0: nothing starts ahead. What is already in the line keeps its bound."""
        self.paused = False
        """Nothing starts: validation wants the engines for itself."""
        self.stopping = False
        """Nothing starts and no further batch is chosen: the run is about to stop."""
        self.tickets: dict[int, GroupSlot] = {}
        self.changed = Signal()
        self.on_evict: Callable[[GroupSlot, DropReason], None] = lambda ticket, reason: None
        self.flying = 0
        """Groups on their way to the buffer."""
        self.ready_count = 0
        """Groups in the buffer."""

    # -- what can be asked

    @property
    def outstanding(self) -> int:
        return len(self.tickets)

    @property
    def slots(self) -> int:
        """Slots there are now, spares included."""
        ordinary = self.settings.groups_per_step if self.degraded else self.settings.slots
        return ordinary + self.settings.additional_groups

    @property
    def oldest_useful(self) -> int:
        """Whatever is older than this can be in no batch any more."""
        return self.trained + self.stepping - self.settings.bound

    def view(self, bound: int) -> SchedulerSnapshot:
        """The line now."""
        return SchedulerSnapshot(
            trained=self.trained,
            served=self.served,
            stepping=self.stepping,
            outstanding=self.outstanding,
            untrained=self.flying + self.ready_count,
            slots=self.slots,
            bound=bound,
        )

    def may_start(self) -> bool:
        """Whether a new group may start now."""
        if self.paused or self.stopping or self.served < 0:
            return False
        return self.policy.admit(self.view(0 if self.degraded else self.settings.bound))

    # -- the life of a slot

    def open(self, number: int, task: Task, *, born: int | None = None) -> GroupSlot:
        """Take a slot."""
        ordinary = self.slots - self.settings.additional_groups
        ticket = GroupSlot(number, task, born=self.served if born is None else born, spare=self.outstanding >= ordinary)
        self.tickets[number] = ticket
        self.flying += 1
        return ticket

    def ready(self, group: SampleGroup) -> None:
        """A group has come down the line and may be trained."""
        ticket = self.tickets[group.group_id]
        ticket.group = group
        ticket.place = GroupState.READY
        self.flying -= 1
        self.ready_count += 1
        self._evict([ticket])
        self.changed.notify()

    def drop(self, ticket: GroupSlot) -> None:
        """Give a slot back without training."""
        if ticket.place is GroupState.FLYING:
            self.flying -= 1
        elif ticket.place is GroupState.READY:
            self.ready_count -= 1
        else:
            raise InvariantBroken(f"group {ticket.number} dropped while {ticket.place}")
        ticket.place = GroupState.GONE
        del self.tickets[ticket.number]
        self.changed.notify()

    def choose(self) -> list[GroupSlot] | None:
        """The next batch, if there is one now."""
        if self.stopping or self.ready_count < self.settings.groups_per_step:
            return None
        chosen = self.policy.select(self._live(), self.view(self.settings.bound))
        return None if chosen is None else [self.tickets[candidate.number] for candidate in chosen]

    def begin_step(self, batch: Iterable[GroupSlot]) -> None:
        """Consume a batch: the moment at which freshness is judged."""
        if self.stepping:
            raise InvariantBroken("a training step began before the last one ended")
        for ticket in batch:
            lag, newest = self.trained - ticket.oldest, ticket.group.newest if ticket.group is not None else 0
            if lag > self.settings.async_generation_ratio or newest > self.trained or not ticket.is_ready:
                raise InvariantBroken(
                    f"group {ticket.number} ({ticket.place}) of versions {ticket.oldest} to {newest} has lag {lag} "
                    f"at trained = {self.trained}, alpha = {self.settings.async_generation_ratio}"
                )
            ticket.place = GroupState.TRAINING
            self.ready_count -= 1
        self.stepping = True
        self.evict()
        self.changed.notify()

    def end_step(self, batch: Iterable[GroupSlot]) -> None:
        """The update is done."""
        self.stepping = False
        self.trained += 1
        for ticket in batch:
            ticket.place = GroupState.TRAINED
            ticket.made = self.trained
        self.release()
        self.changed.notify()

    def serve(self, version: int) -> None:
        """All replicas in service answer with at least `version`."""
        self.served = version
        self.release()
        self.changed.notify()

    def release(self) -> None:
        """Give back the slots of groups whose weights are served."""
        done = [t.number for t in self.tickets.values() if t.place is GroupState.TRAINED and t.made <= self.served]
        for number in done:
            self.tickets.pop(number).place = GroupState.GONE

    def evict(self) -> None:
        """Let go of everything that can be in no batch any more."""
        self._evict(self._live())

    def _evict(self, groups: list[CandidateGroup]) -> None:
        for candidate in self.policy.evict(groups, self.view(self.settings.bound)):
            ticket = self.tickets.get(candidate.number)
            if ticket is not None and ticket.is_live:
                self.on_evict(ticket, _eviction_reason(ticket))

    def _live(self) -> list[CandidateGroup]:
        return [ticket for ticket in self.tickets.values() if ticket.is_live]


def _eviction_reason(ticket: GroupSlot) -> DropReason:
    if ticket.spare:
        return DropReason.SURPLUS_GROUP
    return DropReason.STALE_IN_FLIGHT if ticket.finished_at < 0 else DropReason.STALE_IN_QUEUE
