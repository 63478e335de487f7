"""The staleness controller: the one place that decides how far rollout runs ahead of training.

A *slot* is taken when a group starts. It is released when the group was trained and the weights made from it are
served, or when the group was dropped. A sample is trained only while `trained − oldest ≤ ⌈α⌉`, judged against
`trained` at the moment of consumption; `begin_step` refuses anything else, whatever a policy chose.

The controller knows numbers and order only. It touches no back end and no clock, and uses asyncio only to wake its
waiters.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from headway.errors import InvariantBroken
from headway.flow.staleness_policies import CandidateGroup, SchedulerSnapshot, make_policy
from headway.rollout.concurrency import Signal
from headway.settings import RunSettings
from headway.types import DropReason, SampleGroup, Task


class GroupState(StrEnum):
    """How far a group has come."""

    IN_FLIGHT = "in flight"
    """It is being generated, or is on its way through the stages before `train`."""
    READY = "ready"
    """It is in the buffer and waits for a batch."""
    TRAINING = "training"
    TRAINED = "trained"
    """It was trained; its slot waits until the weights made from it are served."""
    RELEASED = "released"


class GroupSlot:
    """One taken slot and the group that holds it."""

    __slots__ = (
        "_in_flight_oldest", "finished_at", "group", "number", "served_at_start", "state", "task", "trained_version",
    )  # fmt: skip

    def __init__(self, number: int, task: Task, *, served_at_start: int) -> None:
        self.number = number
        """Id of the group; ids grow in the order in which groups start."""
        self.task = task
        self.served_at_start = served_at_start
        """Version that was served when the group started."""
        self.state = GroupState.IN_FLIGHT
        self.group: SampleGroup | None = None
        self.finished_at = -1
        """`trained` when the last member was finished; −1 until then."""
        self.trained_version = -1
        """Version that the group helped to make; −1 until it was trained."""
        self._in_flight_oldest: Callable[[], int] = lambda: served_at_start

    @property
    def is_ready(self) -> bool:
        return self.state is GroupState.READY

    @property
    def is_live(self) -> bool:
        """Whether the group may still be trained."""
        return self.state in (GroupState.IN_FLIGHT, GroupState.READY)

    @property
    def oldest(self) -> int:
        """Oldest version among the tokens of the group, as far as it is known."""
        return self.group.oldest if self.group is not None else self._in_flight_oldest()

    def track_oldest(self, oldest: Callable[[], int]) -> None:
        """Ask `oldest` for the oldest version while the group is being generated."""
        self._in_flight_oldest = oldest


class Headway:
    """Holds slots, versions and the staleness policy. Calls `on_evict(slot, reason)` for every group that must go."""

    def __init__(
        self, settings: RunSettings, *, on_evict: Callable[[GroupSlot, DropReason], None], trained: int = 0
    ) -> None:
        self.settings = settings
        self.policy = make_policy(settings)
        self.trained = trained
        self.served = -1
        self.stepping = False
        """Whether a training step is under way."""
        self.degraded = False
        """Whether the run behaves as if alpha were 0. Groups that are under way keep their bound."""
        self.paused = False
        """Whether no group may start because validation has the engines for itself."""
        self.stopping = False
        """Whether the run is about to stop: no group starts and no further batch is chosen."""
        self.group_slots: dict[int, GroupSlot] = {}
        self.changed = Signal()
        self.in_flight = 0
        """Number of groups on their way to the buffer."""
        self.ready_count = 0
        """Number of groups in the buffer."""
        self._on_evict = on_evict
        self._surplus = 0
        """Groups that the batch under way may still leave behind because they were started redundantly."""

    # -- queries

    @property
    def outstanding(self) -> int:
        """Number of slots that are taken."""
        return len(self.group_slots)

    @property
    def slots(self) -> int:
        """Number of slots that exist now, spare ones included."""
        ordinary = self.settings.groups_per_step if self.degraded else self.settings.slots
        return ordinary + self.settings.additional_groups

    @property
    def oldest_useful(self) -> int:
        """Oldest version that can still be part of a batch."""
        return self.trained + self.stepping - self.settings.bound

    def take_snapshot(self, bound: int) -> SchedulerSnapshot:
        """Return the numbers that a policy decides by."""
        return SchedulerSnapshot(
            trained=self.trained,
            served=self.served,
            stepping=self.stepping,
            outstanding=self.outstanding,
            untrained=self.in_flight + self.ready_count,
            slots=self.slots,
            bound=bound,
        )

    def may_start(self) -> bool:
        if self.paused or self.stopping or self.served < 0:
            return False
        return self.policy.admit(self.take_snapshot(0 if self.degraded else self.settings.bound))

    # -- life of a slot

    def open(self, number: int, task: Task, *, served_at_start: int | None = None) -> GroupSlot:
        """Take a slot for the group `number`."""
        version = self.served if served_at_start is None else served_at_start
        slot = GroupSlot(number, task, served_at_start=version)
        self.group_slots[number] = slot
        self.in_flight += 1
        return slot

    def mark_ready(self, group: SampleGroup) -> None:
        """Put a group that has passed all stages into the buffer."""
        slot = self.group_slots[group.group_id]
        slot.group = group
        slot.state = GroupState.READY
        self.in_flight -= 1
        self.ready_count += 1
        self._evict([slot])
        self.changed.notify()

    def drop(self, slot: GroupSlot) -> None:
        """Release a slot whose group is not trained."""
        if slot.state is GroupState.IN_FLIGHT:
            self.in_flight -= 1
        elif slot.state is GroupState.READY:
            self.ready_count -= 1
        else:
            raise InvariantBroken(f"group {slot.number} dropped while {slot.state}")
        slot.state = GroupState.RELEASED
        del self.group_slots[slot.number]
        self.changed.notify()

    def choose_batch(self) -> list[GroupSlot] | None:
        """Return the slots of the next batch, or `None` if no batch is ready."""
        if self.stopping or self.ready_count < self.settings.groups_per_step:
            return None
        chosen = self.policy.select(self._live(), self.take_snapshot(self.settings.bound))
        return None if chosen is None else [self.group_slots[candidate.number] for candidate in chosen]

    def begin_step(self, batch: Iterable[GroupSlot]) -> None:
        """Consume a batch. This is the moment at which freshness is judged."""
        if self.stepping:
            raise InvariantBroken("a training step began before the last one ended")
        for slot in batch:
            lag, newest = self.trained - slot.oldest, slot.group.newest if slot.group is not None else 0
            if lag > self.settings.bound or newest > self.trained or not slot.is_ready:
                raise InvariantBroken(
                    f"group {slot.number} ({slot.state}) of versions {slot.oldest} to {newest} has lag {lag} "
                    f"at trained = {self.trained}, alpha = {self.settings.async_generation_ratio}"
                )
            slot.state = GroupState.TRAINING
            self.ready_count -= 1
        self.stepping = True
        self._surplus = self.settings.additional_groups
        self.evict()
        self.changed.notify()

    def end_step(self, batch: Iterable[GroupSlot]) -> None:
        """Count the optimizer update that `batch` made."""
        self.stepping = False
        self.trained += 1
        for slot in batch:
            slot.state = GroupState.TRAINED
            slot.trained_version = self.trained
        self.release()
        self.changed.notify()

    def serve(self, version: int) -> None:
        """Note that all replicas in service answer with at least `version`."""
        self.served = version
        self.release()
        self.changed.notify()

    def release(self) -> None:
        """Release the slots of groups whose weights are served."""
        slots = self.group_slots.values()
        for slot in [s for s in slots if s.state is GroupState.TRAINED and s.trained_version <= self.served]:
            self.group_slots.pop(slot.number).state = GroupState.RELEASED

    def evict(self) -> None:
        """Evict every group that can be part of no batch any more."""
        self._evict(self._live())

    def _evict(self, groups: list[CandidateGroup]) -> None:
        for candidate in self.policy.evict(groups, self.take_snapshot(self.settings.bound)):
            slot = self.group_slots.get(candidate.number)
            if slot is not None and slot.is_live:
                self._on_evict(slot, self._get_eviction_reason(slot))

    def _get_eviction_reason(self, slot: GroupSlot) -> DropReason:
        if self._surplus > 0:
            self._surplus -= 1
            return DropReason.SURPLUS_GROUP
        return DropReason.STALE_IN_FLIGHT if slot.finished_at < 0 else DropReason.STALE_IN_QUEUE

    def _live(self) -> list[CandidateGroup]:
        return [slot for slot in self.group_slots.values() if slot.is_live]
