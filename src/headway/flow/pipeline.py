"""What the stages of one pipeline share: staleness controller, hub, recorder, and the one way to drop a group.

A pipeline lives until the run ends or the trainer is lost. After a loss, a new pipeline continues from the ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from headway.cluster.base import DevicePools
from headway.data.task_sources import TaskCursor
from headway.errors import BackendError, TransferError
from headway.flow.backends import Backends, DropSink
from headway.flow.fruitless_drops import FruitlessDrops
from headway.flow.recovery import DegradationControl, DegradationLevel
from headway.flow.replica_supervisor import ReplicaSupervisor
from headway.flow.sample_recorder import SampleRecorder
from headway.flow.staleness_controller import GroupSlot, GroupState, Headway
from headway.flow.weight_updates import WeightUpdater
from headway.flow.zero_variance import ZeroVarianceFilter
from headway.ledger import Ledger, RestoredRun
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, SampleReopen, WeightsServed
from headway.monitor.wait_graph import WaitGraph
from headway.rollout.concurrency import Signal
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica
from headway.rollout.rollout_loop import RolloutLoop, RunningGroup
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.settings import RunSettings
from headway.types import Batch, DropReason, EpisodeGroup, Generation, SampleGroup, Task


class Pipeline:
    """Shared state of one incarnation of the flow. Stages read it; only its methods change it."""

    def __init__(
        self,
        *,
        settings: RunSettings,
        backends: Backends,
        events: EventLog,
        waits: WaitGraph,
        ledger: Ledger,
        restored: RestoredRun,
        hub: InferenceHub,
        devices: DevicePools,
        tasks: asyncio.TaskGroup,
        run_dir: Path,
        checkpoint_dir: Path,
        clock: Callable[[], float],
        on_trained: Callable[[Batch, int], None] | None = None,
        on_dropped: DropSink | None = None,
        on_validated: Callable[[int, Sequence[EvaluatedSample]], None] | None = None,
    ) -> None:
        """`on_trained`, `on_dropped` and `on_validated` get what `RunContext` says."""
        self.settings, self.backends, self.events, self.waits = settings, backends, events, waits
        self.hub, self.devices, self.tasks = hub, devices, tasks
        self.run_dir, self.checkpoint_dir, self._groups_given_up = run_dir, checkpoint_dir, 0
        self.recorder = SampleRecorder(ledger, events, restored.pending)
        self.headway = Headway(
            settings,
            trained=backends.trainer.version,
            on_evict=lambda slot, reason: self.drop(slot.number, reason, who="headway"),
        )
        self.cursor = TaskCursor(backends.tasks, restored.cursor, restored.pending)
        self.requeued = Signal()
        """Notified when the position of a task was put back into the source."""
        self.tasks_handed_out = 0
        """Number of tasks that have left the source and have not started yet."""
        self.exhausted = False
        """Whether the source is at its end and no position was put back."""
        self.next_group = restored.next_group_id
        self.capacity = settings.slots + settings.additional_groups + len(restored.groups) + 1
        """Largest number of groups in the pipeline at once. Channels are this large, so that none is ever full."""
        self.zero_variance = ZeroVarianceFilter(settings)
        self.fruitless_drops = FruitlessDrops(settings.groups_per_step, events)
        self.on_trained, self._on_dropped = on_trained or (lambda batch, trained: None), on_dropped
        self.on_validated = on_validated or (lambda trained, samples: None)
        self._deliver_generated: Callable[[EpisodeGroup], None] = lambda group: None
        self._take_back_tasks: Callable[[], list[Task]] = list
        self._start_validation: Callable[[int], Awaitable[None]] | None = None
        self.recovery = DegradationControl(settings.reliability, events=events, on_level=self._degrade)
        self.loop = self._rollout_loop()
        self.updater = self._weight_updater()
        self.supervisor = ReplicaSupervisor(
            hub,
            self.updater,
            self.recovery,
            settings.reliability,
            events=events,
            tasks=tasks,
            clock=clock,
            on_revived=self.versions_changed,
        )
        hub.begin_pipeline(on_failure=self._replica_failed)

    def _weight_updater(self) -> WeightUpdater:
        return WeightUpdater(
            self.backends.trainer,
            self.backends.transport,
            self.settings,
            events=self.events,
            waits=self.waits,
            on_flip=self._flipped,
            on_failure=self.hub.fail,
        )

    def _rollout_loop(self) -> RolloutLoop:
        return RolloutLoop(
            hub=self.hub,
            environments=self.backends.environments,
            reward=self.backends.reward,
            settings=self.settings,
            events=self.events,
            recorder=self.recorder,
            tasks=self.tasks,
            on_group=self._emit_generated,
            on_failed=self._failed,
            decode=self.backends.decode,
        )

    def deliver_generated_groups_to(self, deliver: Callable[[EpisodeGroup], None]) -> None:
        """Hand every group to `deliver` once all its episodes are over."""
        self._deliver_generated = deliver

    def take_back_tasks_from(self, take: Callable[[], list[Task]]) -> None:
        """Call `take` for the tasks that were read ahead, whenever a position is put back and comes before them."""
        self._take_back_tasks = take

    def validate_with(self, start: Callable[[int], Awaitable[None]]) -> None:
        """Call `start` with the trained version whenever a validation is due."""
        self._start_validation = start

    async def start_validation(self) -> None:
        """Validate the newest version beside training. Return when training can go on."""
        if self._start_validation is not None:
            await self._start_validation(self.headway.trained)

    # -- groups

    def start_group(self, task: Task) -> GroupSlot:
        """Take a slot and start a group of `task` in it."""
        number, self.next_group = self.next_group, self.next_group + 1
        self.tasks_handed_out -= 1
        slot = self.headway.open(number, task)
        self.recorder.start_group(number, task.position, self.headway.served)
        self._track_in_flight(slot, self.loop.start(number, task))
        return slot

    def restore_groups(self, restored: RestoredRun) -> None:
        """Continue every group of an earlier process that was neither trained nor dropped."""
        rescored = self.settings.rescores_restored
        if restored.damaged:
            message = f"records of groups {list(restored.damaged)} are damaged: their tasks are generated again"
            self.events.emit(ErrorReport(who="restore", error="LedgerError", message=message))
        for old in restored.groups:
            task = self.backends.tasks.task(old.position)
            if task is None:
                continue
            slot = self.headway.open(old.group_id, task, served_at_start=self.headway.trained)
            for sample_id in (*old.episodes, *old.open):
                self.events.emit(SampleReopen(who="restore", sample=sample_id))
            run = self.loop.restore(
                old.group_id,
                task,
                started=old.members_started,
                episodes=old.episodes,
                unfinished={sample_id: old.partials.get(sample_id) for sample_id in old.open},
                scores={} if rescored else {sample_id: score for sample_id, (score, _) in old.grades.items()},
            )
            self._track_in_flight(slot, run)
            if not self.headway.take_snapshot(self.settings.bound).is_usable(slot.oldest):
                self.drop(old.group_id, DropReason.LOST_LINEAGE, who="restore")

    def is_live(self, group_id: int) -> bool:
        slot = self.headway.group_slots.get(group_id)
        return slot is not None and slot.is_live

    def is_delivered(self, group_id: int) -> bool:
        """Return whether a group has left `generate`, has not reached the buffer, and no member is generated again."""
        slot, run = self.headway.group_slots.get(group_id), self.loop.runs.get(group_id)
        return slot is not None and slot.state is GroupState.IN_FLIGHT and (run is None or run.complete)

    def drop(self, group_id: int, reason: DropReason, *, who: str) -> None:
        """Drop a group wherever it is: stop its work, record the reason, release its slot, put its task back.

        Raise `RunStopped` if a stage has dropped one group after another for too long.
        """
        slot = self.headway.group_slots.get(group_id)
        if slot is None or not slot.is_live:
            return
        self._report_drop(slot, reason)
        self.loop.cancel(group_id)
        self.recorder.drop_group(group_id, slot.task.position, reason, who)
        self.zero_variance.forget(group_id)
        if reason.regenerates:
            self._put_back(slot.task)
        self.headway.drop(slot)
        self.fruitless_drops.group_dropped(who, reason)

    def _report_drop(self, slot: GroupSlot, reason: DropReason, sample_id: str | None = None) -> None:
        """Give what was finished of a group, or one of its members, to those who keep it."""
        if self._on_dropped is None:
            return
        run, graded = self.loop.runs.get(slot.number), () if slot.group is None else slot.group.samples
        episodes = list(run.episodes.values()) if run else [sample.episode for sample in graded]
        scores = {sample.sample_id: sample.score for sample in graded if sample.score is not None}
        scores |= {} if run is None else run.known_scores()
        chosen = tuple(episode for episode in episodes if sample_id in (None, episode.sample_id))
        if chosen:
            group = EpisodeGroup(group_id=slot.number, task=slot.task, episodes=chosen)
            self._on_dropped(group, scores, reason, self.headway.trained + 1)

    def _put_back(self, task: Task) -> None:
        """Put the position of a task back into the source, and those of tasks read ahead, which come after it."""
        unstarted = self._take_back_tasks()
        self.tasks_handed_out -= len(unstarted)
        for one in (task, *unstarted):
            self.cursor.requeue(one.position)
        self.exhausted = False
        self.requeued.notify()

    def replace_member(self, group_id: int, sample_id: str, reason: DropReason) -> None:
        """Generate another member in place of one that proved unusable after the group had left `generate`."""
        slot, run = self.headway.group_slots[group_id], self.loop.runs[group_id]
        slot.finished_at = -1
        self._report_drop(slot, reason, sample_id)
        self.loop.replace(run, sample_id, reason)

    def cannot_fill_batch(self) -> bool:
        """Return whether no batch can be made any more: the source is exhausted and the groups left are too few."""
        if not self.exhausted or self.tasks_handed_out:
            return False
        return not any(slot.state is GroupState.IN_FLIGHT for slot in self.headway.group_slots.values())

    def store_partials(self) -> None:
        """Write the partial sequences of running members to the ledger. The members go on."""
        self.recorder.ledger.store_partials(self.partials())

    def partials(self) -> dict[str, Generation]:
        """Return the partial sequences of running members by sample id."""
        return {key: value for run in self.loop.runs.values() for key, value in run.partials().items()}

    # -- versions

    def versions_changed(self) -> None:
        """Tell the hub which versions are still useful, and the staleness controller which version is served."""
        self.hub.require(self.headway.oldest_useful)
        if self.hub.served != self.headway.served:
            self.headway.serve(self.hub.served)

    def _flipped(self, replica: Replica) -> None:
        checksum, served = replica.checksum or None, (replica.version, self.headway.trained)
        self.events.emit(WeightsServed(who=replica.name, version=served[0], trained=served[1], checksum=checksum))
        self.hub.version_changed(replica)
        self.versions_changed()
        expected = self.updater.checksums.setdefault(replica.version, checksum) if checksum else None
        if checksum != expected:
            problem = f"{replica.name} serves version {replica.version} with checksum {checksum}, others {expected}"
            self.hub.fail(replica, TransferError(problem))

    def _replica_failed(self, replica: Replica, error: BaseException) -> None:
        self.recovery.failure(replica.name, error)
        self.supervisor.take(replica, error)
        self.versions_changed()
        self.headway.changed.notify()

    # -- internals

    def _track_in_flight(self, slot: GroupSlot, run: RunningGroup) -> None:
        slot.track_oldest(lambda: run.oldest(max(self.headway.served, slot.served_at_start)))

    def _emit_generated(self, run: RunningGroup) -> None:
        slot = self.headway.group_slots.get(run.group_id)
        if slot is not None:
            slot.finished_at = self.headway.trained
        episodes = tuple(run.episodes.values())
        self._deliver_generated(EpisodeGroup(group_id=run.group_id, task=run.task, episodes=episodes))

    def _failed(self, run: RunningGroup, reason: DropReason) -> None:
        """Drop a group that failed; degrade the run if one group after another fails."""
        self.drop(run.group_id, reason, who="generate")
        self._groups_given_up += 1
        fault = run.fault or str(reason)
        self.recovery.failure("generate", BackendError(f"group {run.group_id} given up: {fault}"))
        if self._groups_given_up % (2 * self.settings.groups_per_step) == 0:
            why = f"{self._groups_given_up} groups in a row were given up; the last one: {fault}"
            self.recovery.exhausted("generate", BackendError(why))

    def group_ready(self, group: SampleGroup) -> None:
        """Accept a group that has passed every stage before `train`."""
        self._groups_given_up = 0
        self.fruitless_drops.group_arrived()
        self.zero_variance.group_arrived(group.group_id)
        self.recovery.progress()
        self.headway.mark_ready(group)

    def _degrade(self, level: DegradationLevel) -> None:
        self.headway.degraded = level >= DegradationLevel.SYNCHRONOUS
        self.headway.changed.notify()
