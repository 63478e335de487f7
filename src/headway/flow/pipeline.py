"""What the stages of one line share: the controller, the hub, the books, and the one way to drop a group.

A line lives from its start to its end or to the loss of the trainer; a new one then goes on from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.cluster.base import DevicePools
from headway.data.task_sources import TaskCursor
from headway.errors import BackendError
from headway.flow.backends import Backends
from headway.flow.recovery import DegradationControl, DegradationLevel
from headway.flow.replica_supervisor import ReplicaSupervisor
from headway.flow.sample_recorder import SampleRecorder
from headway.flow.staleness_controller import GroupSlot, GroupState, Headway
from headway.flow.weight_updates import WeightUpdater
from headway.flow.zero_variance import ZeroVarianceFilter
from headway.ledger import Ledger, RestoredRun
from headway.monitor.event_log import EventLog
from headway.monitor.events import SampleReopen, WeightsServed
from headway.monitor.wait_graph import WaitGraph
from headway.rollout.concurrency import Signal
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica
from headway.rollout.rollout_loop import RolloutLoop, RunningGroup
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.settings import RunSettings
from headway.types import Batch, DropReason, EpisodeGroup, Generation, SampleGroup, Task


class Pipeline:
    """The shared state of one incarnation of the flow. Stages read it; only its methods change it."""

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
    ) -> None:
        self.settings, self.backends, self.events, self.waits = settings, backends, events, waits
        self.hub, self.devices, self.tasks = hub, devices, tasks
        self.run_dir, self.checkpoint_dir = run_dir, checkpoint_dir
        self.books = SampleRecorder(ledger, events)
        self.headway = Headway(settings, trained=backends.trainer.version)
        self.headway.on_evict = lambda ticket, reason: self.drop(ticket.number, reason, who="headway")
        self.cursor = TaskCursor(backends.tasks, restored.cursor, restored.pending)
        self.requeued = Signal()
        """Notified when a position was put back."""
        self.given_out = 0
        """Tasks that have left the source and not started yet."""
        self.exhausted = False
        """The source is at its end and nothing was put back."""
        self.next_group = restored.next_group_id
        self.capacity = settings.slots + settings.additional_groups + len(restored.groups) + 1
        """Groups that can be in the line at once: no channel of groups is ever full."""
        self.spread = ZeroVarianceFilter(settings)
        """Which groups without spread are replaced."""
        self._given_up = 0
        self.on_generated: Callable[[EpisodeGroup], None] = lambda group: None
        """Set by the generate stage: where finished groups go."""
        self.on_validate: Callable[[int], None] = lambda trained: None
        """Set by the flow: start a validation of this version beside training."""
        self.on_trained: Callable[[Batch, int], None] = lambda batch, trained: None
        """Set by the flow: told of every batch that was trained, and of the version it made."""
        self.on_validated: Callable[[int, Sequence[EvaluatedSample]], None] = lambda trained, judged: None
        """Set by the flow: told what came of a validation."""
        self.recovery = DegradationControl(settings.reliability, events=events, on_level=self._degrade)
        self.loop = self._rollout_loop()
        self.updater = WeightUpdater(
            backends.trainer, backends.transport, settings, events=events, on_flip=self._flipped, on_failure=hub.fail
        )
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
        hub.on_failure = self._replica_failed

    def _rollout_loop(self) -> RolloutLoop:
        return RolloutLoop(
            hub=self.hub,
            environments=self.backends.environments,
            reward=self.backends.reward,
            settings=self.settings,
            events=self.events,
            book=self.books,
            tasks=self.tasks,
            on_group=self._generated,
            on_failed=self._failed,
            decode=self.backends.decode,
        )

    # -- groups

    def start_group(self, task: Task) -> GroupSlot:
        """Take a slot and let a new group begin."""
        number, self.next_group = self.next_group, self.next_group + 1
        self.given_out -= 1
        ticket = self.headway.open(number, task)
        self.books.start_group(number, task.position, self.headway.served)
        self._fly(ticket, self.loop.start(number, task))
        return ticket

    def restore_groups(self, restored: RestoredRun) -> None:
        """Take up every group of an earlier process that was neither trained nor dropped."""
        for old in restored.groups:
            task = self.backends.tasks.task(old.position)
            if task is None:
                continue
            ticket = self.headway.open(old.group_id, task, born=self.headway.trained)
            for sample_id in (*old.episodes, *old.open):
                self.events.emit(SampleReopen(who="restore", sample=sample_id))
            run = self.loop.restore(
                old.group_id,
                task,
                started=old.members_started,
                episodes=old.episodes,
                unfinished={sample_id: old.partials.get(sample_id) for sample_id in old.open},
                scores={sample_id: score for sample_id, (score, _) in old.grades.items()},
            )
            self._fly(ticket, run)
            if not self.headway.view(self.settings.bound).usable(ticket.oldest):
                self.drop(old.group_id, DropReason.LOST_LINEAGE, who="restore")

    def is_live(self, group_id: int) -> bool:
        """Whether a group is still wanted."""
        ticket = self.headway.tickets.get(group_id)
        return ticket is not None and ticket.is_live

    def drop(self, group_id: int, reason: DropReason, *, who: str) -> None:
        """Let a group go, wherever it is: stop its work, record it, free its slot, give its prompt back."""
        ticket = self.headway.tickets.get(group_id)
        if ticket is None or not ticket.is_live:
            return
        self.loop.cancel(group_id)
        self.books.drop_group(group_id, reason, who)
        self.spread.forget(group_id)
        if reason.regenerates:
            self.cursor.requeue(ticket.task.position)
            self.requeued.notify()
        self.headway.drop(ticket)

    def replace_member(self, group_id: int, sample_id: str, reason: DropReason) -> None:
        """A member turned out to be unusable after the group was handed over: it flies again with another."""
        ticket, run = self.headway.tickets[group_id], self.loop.runs[group_id]
        ticket.finished_at = -1
        self.loop.replace(run, sample_id, reason)

    def stuck_for_good(self) -> bool:
        """No further batch can ever be made: the source is exhausted and what is left does not fill one."""
        if not self.exhausted or self.given_out:
            return False
        return not any(ticket.place is GroupState.FLYING for ticket in self.headway.tickets.values())

    def store_partials(self) -> None:
        """Keep what members still playing have made, without ending them."""
        self.books.ledger.store_partials(self.partials())

    def partials(self) -> dict[str, Generation]:
        """What members still playing have made so far."""
        return {key: value for run in self.loop.runs.values() for key, value in run.partials().items()}

    # -- versions

    def versions_changed(self) -> None:
        """Tell the hub what is still useful and the controller what is served."""
        self.hub.require(self.headway.oldest_useful)
        if self.hub.served != self.headway.served:
            self.headway.serve(self.hub.served)

    def _flipped(self, replica: Replica) -> None:
        self.events.emit(WeightsServed(who=replica.name, version=replica.version, trained=self.headway.trained))
        self.hub.version_changed(replica)
        self.versions_changed()

    def _replica_failed(self, replica: Replica, error: BaseException) -> None:
        self.recovery.failure(replica.name, error)
        self.supervisor.take(replica, error)
        self.versions_changed()

    # -- inside

    def _fly(self, ticket: GroupSlot, run: RunningGroup) -> None:
        ticket.watch(lambda: run.oldest(max(self.headway.served, ticket.born)))

    def _generated(self, run: RunningGroup) -> None:
        ticket = self.headway.tickets.get(run.group_id)
        if ticket is not None:
            ticket.finished_at = self.headway.trained
        episodes = tuple(run.episodes.values())
        self.on_generated(EpisodeGroup(group_id=run.group_id, task=run.task, episodes=episodes))

    def _failed(self, run: RunningGroup, reason: DropReason) -> None:
        """A group was given up; when that happens to one after another, it is not the groups."""
        self.drop(run.group_id, reason, who="generate")
        self._given_up += 1
        fault = run.fault or str(reason)
        self.recovery.failure("generate", BackendError(f"group {run.group_id} given up: {fault}"))
        if self._given_up % (2 * self.settings.groups_per_step) == 0:
            why = f"{self._given_up} groups in a row were given up; the last one: {fault}"
            self.recovery.exhausted("generate", BackendError(why))

    def group_ready(self, group: SampleGroup) -> None:
        """A group has come down the whole line."""
        self._given_up = 0
        self.spread.arrived(group.group_id)
        self.recovery.progress()
        self.headway.ready(group)

    def _degrade(self, level: DegradationLevel) -> None:
        self.headway.degraded = level >= DegradationLevel.SYNCHRONOUS
        self.headway.changed.notify()
