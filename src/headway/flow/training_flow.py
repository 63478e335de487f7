"""AsyncTrainingFlow: builds the line, runs it, and goes on when part of it is lost.

    dataloader → generate → rollout → logp → ref_logp → reward → train → param_update
                    ↑                                                        │
                    └──────────── served policy version, freed slots ────────┘

One way of going on serves every case: a new line is built from the ledger and the trainer's last checkpoint,
whether the process was killed, was asked to stop, or only its trainer was lost.

Guarantees: when `run` returns or raises, every started sample is trained, dropped with a reason, or saved, and
every slot is free or belongs to a saved group. Does not make back ends; does not know which clock it runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.cluster.base import DevicePools
from headway.errors import (
    BackendError,
    ConfigError,
    HeadwayError,
    InvariantBroken,
    RunStopped,
    Stalled,
    TrainerCrashed,
    TrainerError,
)
from headway.flow import stages as _stages
from headway.flow.backends import Backends
from headway.flow.channel import Channel
from headway.flow.checkpointing import save_checkpoint
from headway.flow.engine_fleet import DeviceLending, EngineFleet
from headway.flow.pipeline import Pipeline
from headway.flow.stage import STAGES, Stage, create_role_state_machine
from headway.flow.validation_flow import ValidationFlow
from headway.flow.watchdog import ProgressWatch, check_replicas, watch_for_stalls
from headway.ledger import Ledger
from headway.monitor.event_log import EventLog
from headway.monitor.events import BackendRestart, BackendUp, ErrorReport, SampleEnd
from headway.monitor.wait_graph import WaitGraph
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import ReplicaHealth
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.settings import RunSettings
from headway.types import Batch, Generation

ROLES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")
"""The line as it stands; `critic` goes before `train` where there is one."""
assert _stages  # imported for the roles that it registers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended."""

    trained: int
    finished: bool
    """All steps were done; otherwise `reason` says why not."""
    reason: str = ""
    restarts: int = 0
    """How often the line was rebuilt."""


class PipelineEnded(HeadwayError):
    """Raised inside the line's task group to end it: there is nothing left to do."""


class AsyncTrainingFlow:
    """One run. `insert` puts stages of one's own into the line: role → the role it stands behind."""

    def __init__(
        self,
        *,
        backends: Backends,
        settings: RunSettings,
        events: EventLog,
        run_dir: Path,
        clock: Callable[[], float],
        checkpoint_dir: Path | None = None,
        on_trained: Callable[[Batch, int], None] | None = None,
        on_validated: Callable[[int, Sequence[EvaluatedSample]], None] | None = None,
        insert: Mapping[str, str] | None = None,
        enable_async_rl: bool = True,
    ) -> None:
        if not backends.engines:
            raise ConfigError("there is no engine to generate with", key="actor_infer", value=[])
        self.settings = (
            settings if enable_async_rl else replace(settings, async_generation_ratio=0.0, pipeline_depth=None)
        )
        self.backends, self.events, self.run_dir = backends, events, run_dir
        self.checkpoint_dir = checkpoint_dir or run_dir / "checkpoints"
        self.roles = order_stages(insert or {}, critic=backends.critic is not None)
        self.waits = WaitGraph(clock)
        self._on_trained, self._on_validated = on_trained, on_validated
        self.line: Pipeline | None = None
        """The line that runs now."""
        self.fleet: EngineFleet | None = None
        """The engines of the run, once it has begun."""
        self.stages: dict[str, Stage[Any, Any]] = {}
        self._clock = clock
        self._stop: asyncio.Event = asyncio.Event()
        self._stop_reason = ""
        self._restarts = 0
        self._reached = -1
        """The furthest version at which the trainer was lost."""
        self._losses = 0
        """How often it was lost without getting further."""
        self._progress = ProgressWatch()
        events.attach(self._progress)

    def stop(self, reason: str = "asked to stop") -> None:
        """End the run cleanly at the next opportunity, with a checkpoint."""
        self._stop_reason = reason
        self._stop.set()

    async def run(self) -> RunSummary:
        """Train until the last step. Returns when done or cleanly stopped, raises when something is broken."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        call_soon = asyncio.get_running_loop().call_soon
        ledger = Ledger(self.run_dir / "ledger.sqlite", defer=lambda flush: call_soon(flush))
        reliability = self.settings.reliability
        engines, lent = self.backends.engines, self.backends.lent
        hub = InferenceHub(engines, lent=lent, events=self.events, reliability=reliability, clock=self._clock)
        self.fleet = EngineFleet(hub, self.backends.reserve, events=self.events)
        self.waits.report_with(hub.waits)
        try:
            lost = await self._load_trainer(ledger)
            while True:
                if lost is not None:
                    await self._revive_trainer(ledger, lost)
                failure = await self._run_line(ledger, hub)
                if not isinstance(failure, TrainerCrashed):
                    return self._summary(failure, self.backends.trainer.version)
                lost = failure
        except RunStopped as stopped:
            self._end_open(ledger, {})
            return self._summary(stopped, (ledger.last_checkpoint() or (0, ""))[0])
        finally:
            ledger.close()

    # -- one line

    async def _run_line(self, ledger: Ledger, hub: InferenceHub) -> BaseException | None:
        """From the ledger to the end of the line, and what ended it. State is saved whatever that was."""
        failure: BaseException | None = None
        line: Pipeline | None = None
        try:
            async with OrderedTaskGroup() as tasks:
                line = self.line = self._build(ledger, hub, tasks)
                tasks.create_task(self._conduct(line), name="conductor")
        except* PipelineEnded:
            pass
        except* BaseException as group:
            failure = root_cause(group)
        if line is None:
            raise failure or InvariantBroken("a line ended before it was built")
        line.recovery.close()
        if self.fleet is not None:
            self.fleet.end_line()
        await self._save(line, failure)
        if failure is not None and not isinstance(failure, TrainerCrashed | RunStopped | Stalled):
            raise failure
        return failure

    def _build(self, ledger: Ledger, hub: InferenceHub, tasks: asyncio.TaskGroup) -> Pipeline:
        """A line with its stages and channels, going on from what the ledger holds."""
        restored = ledger.restore(self.backends.trainer.version)
        hub.begin_line()
        line = Pipeline(
            settings=self.settings,
            backends=self.backends,
            events=self.events,
            waits=self.waits,
            ledger=ledger,
            restored=restored,
            hub=hub,
            devices=DevicePools(self.backends.devices, waits=self.waits, clock=self._clock),
            tasks=tasks,
            run_dir=self.run_dir,
            checkpoint_dir=self.checkpoint_dir,
            clock=self._clock,
        )
        line.on_trained = self._on_trained or line.on_trained
        line.on_validated = self._on_validated or line.on_validated
        if line.devices.shared("train", "generate"):
            lock = line.devices.locks["train"]
            lock.on_busy, lock.on_free = hub.halt_engines, hub.continue_engines
        elif self.backends.lent:
            DeviceLending(hub, line.devices.locks["train"], line.versions_changed)
        self.stages = {role: create_role_state_machine(role, pipeline=line) for role in self.roles}
        connect_stages(list(self.stages.values()), line)
        line.restore_groups(restored)
        if self.fleet is not None:
            self.fleet.begin_line(line.supervisor, tasks, line.versions_changed)
        return line

    async def _conduct(self, line: Pipeline) -> None:
        """Seed the engines, start the stages, and end the line when training is done or a stop is asked for."""
        await line.hub.continue_engines()
        await self._seed(line)
        line.tasks.create_task(watch_for_stalls(line, self._progress, self.events), name="watchdog")
        line.tasks.create_task(check_replicas(line), name="health")
        stop = line.tasks.create_task(self._wait_for_stop(), name="stop")
        validation = self._validation(line)
        if validation is not None and self.settings.eval_at_start and not line.headway.trained:
            await self._unless_stopped(line, stop, line.tasks.create_task(validation.first(), name="validate"))
        running = [line.tasks.create_task(stage.run(), name=role) for role, stage in self.stages.items()]
        await self._unless_stopped(line, stop, running[-1])  # ends when train does, after the last version is served
        if validation is not None:
            await validation.done.until(lambda: validation.running == 0)
        if line.headway.trained < self.settings.max_steps:
            raise RunStopped(f"the tasks ran out after {line.headway.trained} of {self.settings.max_steps} steps")
        raise PipelineEnded

    async def _unless_stopped(self, line: Pipeline, stop: asyncio.Task[None], work: asyncio.Task[None]) -> None:
        """Wait for `work`. Raises `RunStopped` where a stop comes first; a step is not cut in two."""
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            line.headway.stopping = True
            await line.headway.changed.until(lambda: not line.headway.stepping)
            raise RunStopped(self._stop_reason)

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()

    async def _seed(self, line: Pipeline) -> None:
        """Every replica that is up gets the trainer's version before anything starts; the others are revived."""
        down = [replica for replica in line.hub.replicas if replica.health is not ReplicaHealth.UP]
        for replica in down:
            if replica.health is ReplicaHealth.LOST:
                line.recovery.replica_lost(replica.name)
            line.supervisor.take(replica, BackendError("was down when the line started"))
        healthy = [replica for replica in line.hub.replicas if replica.health is ReplicaHealth.UP]
        try:
            await line.updater.push(self.backends.trainer.version, healthy)
        except BackendError as error:
            raise TrainerCrashed(f"its weights cannot be had: {error}") from error
        line.versions_changed()

    def _validation(self, line: Pipeline) -> ValidationFlow | None:
        tasks = self.backends.validation_tasks
        if tasks is None or not self.settings.eval_steps or not self.settings.val_batch_size:
            return None
        validation = ValidationFlow(line, tasks)
        line.on_validate = validation.start
        return validation

    # -- ends

    async def _save(self, line: Pipeline, failure: BaseException | None) -> None:
        """Nothing is lost: partial sequences go to the ledger, the trainer to a checkpoint if it is alive."""
        ledger = line.books.ledger
        if isinstance(failure, TrainerCrashed):
            ledger.store_partials(line.partials())
            return
        try:
            if not isinstance(failure, asyncio.CancelledError):
                await save_checkpoint(line)
        except BackendError as error:  # a dead trainer cannot be saved; its last checkpoint stands
            self.events.emit(ErrorReport.from_exception("trainer", error))
        finally:  # also for who does not want to wait for the checkpoint
            self._end_open(ledger, line.partials())

    def _end_open(self, ledger: Ledger, partials: Mapping[str, Generation]) -> None:
        for sample_id in ledger.save_open(partials):
            self.events.emit(SampleEnd(who="flow", sample=sample_id, end="saved"))

    def _summary(self, failure: BaseException | None, trained: int) -> RunSummary:
        reason = "" if failure is None else str(failure)
        return RunSummary(trained=trained, finished=failure is None, reason=reason, restarts=self._restarts)

    # -- the trainer

    async def _load_trainer(self, ledger: Ledger) -> TrainerCrashed | None:
        """Go on from the newest checkpoint that can be read. Returns what went wrong with the trainer itself."""
        limit, damaged = self.settings.reliability.train_timeout_s, ""
        for version, directory in ledger.checkpoints():
            try:
                async with asyncio.timeout(limit):
                    await self.backends.trainer.load(self.run_dir / directory)
                return None
            except TrainerCrashed as error:
                return error
            except TimeoutError:
                return TrainerCrashed(f"{directory}: not loaded after {limit} s")
            except TrainerError as error:
                damaged = damaged or str(error)
                message = f"the checkpoint of step {version} cannot be read and is passed over: {error}"
                self.events.emit(ErrorReport(who="trainer", error="TrainerError", message=message))
        if damaged:
            raise RunStopped(
                f"none of its checkpoints can be read; the newest: {damaged}. Put one back from a copy, or begin anew "
                "in another output_dir"
            )
        return None

    async def _revive_trainer(self, ledger: Ledger, failure: TrainerCrashed) -> None:
        """A lost trainer comes back with its last checkpoint. Raises `RunStopped` when it does not, or when it is
        lost again and again without getting any further."""
        reliability = self.settings.reliability
        reached = self.line.headway.trained if self.line is not None else 0
        self._losses = self._losses + 1 if reached <= self._reached else 1
        self._reached = max(reached, self._reached)
        self._restarts += 1
        error: BaseException = failure
        for attempt in range(reliability.replica_restarts + 1):
            if self._losses > reliability.replica_restarts + 1:
                break
            self.events.emit(BackendRestart(who="trainer", attempt=attempt + 1))
            try:
                async with asyncio.timeout(reliability.train_timeout_s):
                    await self.backends.trainer.restart()
                    error = await self._load_trainer(ledger) or failure
                if error is failure:
                    self.events.emit(BackendUp(who="trainer", version=self.backends.trainer.version))
                    return
            except BackendError as again:
                error = again
            except TimeoutError:
                error = TrainerCrashed(f"not restarted and loaded after {reliability.train_timeout_s} s")
            self.events.emit(ErrorReport.from_exception("trainer", error))
            await asyncio.sleep(reliability.restart_backoff_s * float(2**attempt))
        raise RunStopped(f"the trainer does not come back: {error}; the run can be resumed from its last checkpoint")


# -- putting a line together


def order_stages(insert: Mapping[str, str], *, critic: bool) -> list[str]:
    """The roles of a line in order, with the user's own stages behind the ones they name."""
    roles = list(ROLES)
    if critic:
        roles.insert(roles.index("train"), "critic")
    for role, behind in insert.items():
        if role not in STAGES:
            raise ConfigError("no such stage is registered", key="insert", value=role, hint=f"known: {sorted(STAGES)}")
        if behind not in roles or behind == roles[-1]:
            raise ConfigError(
                f"{role!r} cannot stand behind it", key="insert", value=behind, hint=f"one of {roles[:-1]}"
            )
        roles.insert(roles.index(behind) + 1, role)
    for left, right in pairwise(roles):
        made, wanted = STAGES[left].produces, STAGES[right].consumes
        if made is not wanted:
            raise ConfigError(f"{right} consumes {wanted.__name__}, but {left} produces {made.__name__}", key="insert")
    return roles


def connect_stages(line_stages: list[Stage[Any, Any]], line: Pipeline) -> None:
    """Channels between neighbours. Tasks are read ahead by a few; groups always have room."""
    capacity = {"dataloader": min(64, line.capacity), "train": 4}
    for left, right in pairwise(line_stages):
        channel: Channel[Any] = Channel(
            f"{left.role} → {right.role}",
            left.produces,
            capacity.get(left.role, line.capacity),
            producer=left.role,
            consumer=right.role,
            waits=line.waits,
        )
        left.outbound = right.inbound = channel


def root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that matters most: what is broken before what was stopped, and both before what was lost."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(root_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    order = (TrainerCrashed, RunStopped, Stalled)
    return max(leaves, key=lambda leaf: 1 if isinstance(leaf, order) else 2)
