"""AsyncTrainingFlow: builds the pipeline, runs it, and continues when part of it is lost.

    dataloader → generate → rollout → logp → ref_logp → reward → train → param_update
                    ↑                                                        │
                    └──────────── served policy version, freed slots ────────┘

There is one way to continue: a new pipeline is built from the ledger and the trainer's last checkpoint, whether the
process was killed, was asked to stop, or only lost its trainer.

Guarantees: when `run` returns or raises, every started sample is trained, dropped with a reason, or saved, and every
slot is free or belongs to a saved group. The flow does not make back ends and does not know which clock it runs on.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from headway.cluster.base import DevicePools
from headway.config import StageConfig
from headway.errors import BackendError, ConfigError, RunStopped, Stalled, TrainerCrashed, TrainerError
from headway.flow import stages as _stages
from headway.flow.backends import RunContext
from headway.flow.channel import Channel
from headway.flow.checkpointing import save_checkpoint
from headway.flow.device_turns import DeviceTurns
from headway.flow.engine_fleet import DeviceLending, EngineFleet
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, create_role_state_machine
from headway.flow.stages.dataloader_stage import TASKS_READ_AHEAD, DataloaderStage
from headway.flow.stages.generate_stage import GenerateStage
from headway.flow.validation_flow import ValidationFlow
from headway.flow.watchdog import ProgressWatch, check_replicas, watch_for_stalls
from headway.ledger import Ledger
from headway.monitor.events import BackendRestart, BackendUp, ErrorReport, SampleEnd
from headway.monitor.wait_graph import WaitEdge, WaitGraph, WaitingBackend
from headway.registry import STAGES
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import ReplicaHealth
from headway.types import Generation, Snapshot, Task

ROLES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")
"""The built-in stages in order; `critic` stands before `train` where there is one."""
assert _stages  # imported for the roles that it registers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended."""

    trained: int
    finished: bool
    """Whether all steps were done; `reason` says why not."""
    reason: str = ""
    restarts: int = 0
    """How often the pipeline was rebuilt because the trainer was lost."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Mean reward of what each step was trained on, by step; filled by `headway.train` from the whole event log."""
    held_out: Mapping[int, float] = field(default_factory=dict)
    """Mean reward of held-out answers, by the step that was validated; filled like `rewards`."""


class PipelineEnded(Exception):
    """Raised inside the task group of a pipeline to end it when all work is done."""


class AsyncTrainingFlow:
    """One run. `trainer` has its back ends, settings and directory; `headway.open_run` makes it from a configuration.

    `enable_async_rl=False` trains synchronously, whatever α the settings have.
    """

    def __init__(self, *, trainer: RunContext, enable_async_rl: bool = True) -> None:
        backends, settings = trainer.backends, trainer.settings
        if not backends.engines:
            raise ConfigError("there is no engine to generate with", key="actor_infer", value=[])
        self.context = trainer
        if not enable_async_rl:
            settings = replace(settings, async_generation_ratio=0.0, pipeline_depth=None, updates_per_sync=1)
        self.settings = settings
        self.backends, self.events, self.run_dir = backends, trainer.events, trainer.run_dir
        self.checkpoint_dir = trainer.checkpoint_dir or trainer.run_dir / "checkpoints"
        self.roles = order_stages(trainer.stages, critic=backends.critic is not None)
        self.waits = WaitGraph(trainer.clock)
        self.pipeline: Pipeline | None = None
        """The pipeline that runs now."""
        self.fleet: EngineFleet | None = None
        """Adds and removes engines, once the run has begun."""
        self.stages: dict[str, Stage[Any, Any]] = {}
        self._clock = trainer.clock
        self._stop = trainer.stop_request
        self._restarts = 0
        self._reached = -1
        """Highest version at which the trainer was lost."""
        self._losses = 0
        """How often the trainer was lost without getting further."""
        self.progress = ProgressWatch(trainer.clock)
        self.events.attach(self.progress)

    def stop(self, reason: str = "asked to stop") -> None:
        """End the run cleanly at the next opportunity, with a checkpoint."""
        self._stop.make(reason)

    async def run(self) -> RunSummary:
        """Train until the last step. Return when done or cleanly stopped; raise when something is broken."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        call_soon = asyncio.get_running_loop().call_soon
        ledger = Ledger(self.run_dir / "ledger.sqlite", defer=lambda flush: call_soon(flush))
        reliability = self.settings.reliability
        engines, lent = self.backends.engines, self.backends.lent
        hub = InferenceHub(engines, lent=lent, events=self.events, reliability=reliability, clock=self._clock)
        self.fleet = EngineFleet(hub, self.backends.reserve, events=self.events)
        self.waits.add_reporter(hub.waits)
        self.waits.add_reporter(self._report_waits)
        try:
            lost = await self._load_trainer(ledger)
            while True:
                if lost is not None:
                    await self._revive_trainer(ledger, lost)
                failure = await self._run_pipeline(ledger, hub)
                if not isinstance(failure, TrainerCrashed):
                    return self._summary(failure, self.backends.trainer.version)
                lost = failure
        except RunStopped as stopped:
            self._end_open(ledger, {})
            return self._summary(stopped, (ledger.last_checkpoint() or (0, ""))[0])
        finally:
            ledger.close()

    # -- one pipeline

    async def _run_pipeline(self, ledger: Ledger, hub: InferenceHub) -> BaseException | None:
        """Run one pipeline to its end and save its state. Return what ended it early, if anything did."""
        failure: BaseException | None = None
        pipeline: Pipeline | None = None
        try:
            async with OrderedTaskGroup() as tasks:
                pipeline = self.pipeline = self._build(ledger, hub, tasks)
                tasks.create_task(self._conduct(pipeline), name="conductor")
        except* PipelineEnded:
            pass
        except* BaseException as group:
            failure = root_cause(group)
        if pipeline is None:
            assert failure is not None, "only an error keeps a pipeline from being built"
            raise failure
        pipeline.recovery.close()
        if self.fleet is not None:
            self.fleet.end_pipeline()
        await self._save(pipeline, failure)
        if failure is not None and not isinstance(failure, TrainerCrashed | RunStopped | Stalled):
            raise failure
        return failure

    def _build(self, ledger: Ledger, hub: InferenceHub, tasks: asyncio.TaskGroup) -> Pipeline:
        """Build a pipeline with its stages and channels that continues from what the ledger holds."""
        restored = ledger.restore(self.backends.trainer.version)
        pipeline = Pipeline(
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
            on_trained=self.context.on_trained,
            on_dropped=self.context.on_dropped,
            on_validated=self.context.on_validated,
        )
        if pipeline.devices.are_shared("train", "generate"):
            DeviceTurns(pipeline, engines_sleep=self.backends.engines_sleep)
        elif self.backends.lent:
            DeviceLending(hub, pipeline.devices.locks["train"], pipeline.versions_changed)
        args = {stage.name: stage.args for stage in self.context.stages}
        self.stages = {
            role: create_role_state_machine(role, pipeline=pipeline, **args.get(role, {})) for role in self.roles
        }
        connect_stages(list(self.stages.values()), pipeline)
        pipeline.restore_groups(restored)
        if self.fleet is not None:
            self.fleet.begin_pipeline(pipeline.supervisor, tasks, pipeline.versions_changed)
        return pipeline

    def _report_waits(self) -> list[WaitEdge]:
        """Return the waits of the pipeline that runs now."""
        found = [] if self.pipeline is None else self.pipeline.loop.waits()
        if isinstance(self.backends.trainer, WaitingBackend):
            found += self.backends.trainer.waits()
        return [*found, *(edge for stage in self.stages.values() for edge in stage.waits())]

    async def _conduct(self, pipeline: Pipeline) -> None:
        """Seed the engines, start the stages, and end the pipeline when training is done or a stop is requested."""
        await pipeline.hub.continue_engines()
        pipeline.tasks.create_task(watch_for_stalls(pipeline, self.progress), name="watchdog")
        await self._seed(pipeline)
        pipeline.tasks.create_task(check_replicas(pipeline), name="health")
        stop = pipeline.tasks.create_task(self._stop.wait(), name="stop")
        validation = self._validation(pipeline)
        if validation is not None and self.settings.eval_at_start and not pipeline.headway.trained:
            first = pipeline.tasks.create_task(validation.validate_start(), name="validate")
            await self._unless_stopped(pipeline, stop, first)
        running = [pipeline.tasks.create_task(stage.run(), name=role) for role, stage in self.stages.items()]
        # the last stage ends when train does, after the last version is served
        await self._unless_stopped(pipeline, stop, running[-1])
        if validation is not None:
            with self.waits.waiting("flow", f"the end of {validation.running} validations", "validate"):
                await validation.done.until(lambda: validation.running == 0)
        if pipeline.headway.trained < self.settings.max_steps:
            raise RunStopped(f"the tasks ran out after {pipeline.headway.trained} of {self.settings.max_steps} steps")
        raise PipelineEnded

    async def _unless_stopped(self, pipeline: Pipeline, stop: asyncio.Task[None], work: asyncio.Task[None]) -> None:
        """Wait for `work`. Raise `RunStopped` if a stop is requested first, after the current training step."""
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_made:
            pipeline.headway.stopping = True
            await pipeline.headway.changed.until(lambda: not pipeline.headway.stepping)
            raise RunStopped(self._stop.reason)

    async def _seed(self, pipeline: Pipeline) -> None:
        """Give every healthy replica the trainer's weights before anything starts, and revive the others."""
        down = [replica for replica in pipeline.hub.replicas if replica.health is not ReplicaHealth.UP]
        for replica in down:
            if replica.health is ReplicaHealth.LOST:
                pipeline.recovery.replica_lost(replica.name)
            pipeline.supervisor.take(replica, BackendError("was down when the pipeline started"))
        healthy = [replica for replica in pipeline.hub.replicas if replica.health is ReplicaHealth.UP]
        try:
            await pipeline.updater.push(self.backends.trainer.version, healthy)
        except BackendError as error:
            raise TrainerCrashed(f"its weights cannot be read: {error}") from error
        pipeline.versions_changed()

    def _validation(self, pipeline: Pipeline) -> ValidationFlow | None:
        tasks = self.backends.validation_tasks
        if tasks is None or not self.settings.eval_steps or not self.settings.val_batch_size:
            return None
        validation = ValidationFlow(pipeline, tasks)
        pipeline.validate_with(validation.start)
        return validation

    # -- ending

    async def _save(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        """Save partial sequences to the ledger, and a checkpoint if the trainer is alive."""
        ledger = pipeline.recorder.ledger
        if isinstance(failure, TrainerCrashed):
            ledger.store_partials(pipeline.partials())
            return
        try:
            if not isinstance(failure, asyncio.CancelledError):
                await save_checkpoint(pipeline)
        except BackendError as error:  # a dead trainer cannot be saved; its last checkpoint remains
            self.events.emit(ErrorReport.from_exception("trainer", error))
        finally:  # also when the checkpoint was cancelled
            self._end_open(ledger, pipeline.partials())

    def _end_open(self, ledger: Ledger, partials: Mapping[str, Generation]) -> None:
        for sample_id in ledger.save_open(partials):
            self.events.emit(SampleEnd(who="flow", sample=sample_id, end="saved"))

    def _summary(self, failure: BaseException | None, trained: int) -> RunSummary:
        reason = "" if failure is None else str(failure)
        return RunSummary(trained=trained, finished=failure is None, reason=reason, restarts=self._restarts)

    # -- the trainer

    async def _load_trainer(self, ledger: Ledger) -> TrainerCrashed | None:
        """Load the newest readable checkpoint. Return the error if the trainer itself failed."""
        limit, damaged = self.settings.reliability.train_timeout_s, ""
        for version, directory in ledger.checkpoints():
            try:
                with self.waits.waiting("flow", f"load of {directory}", "trainer"):
                    async with asyncio.timeout(limit):
                        notes = await self.backends.trainer.load(self.run_dir / directory)
                for note in notes or ():
                    self.events.emit(ErrorReport(who="trainer", error="CheckpointNote", message=note))
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
            hint = "Put one back from a copy, or begin anew in another output_dir"
            raise RunStopped(f"none of its checkpoints can be read; the newest: {damaged}. {hint}")
        return None

    async def _revive_trainer(self, ledger: Ledger, failure: TrainerCrashed) -> None:
        """Restart a lost trainer with its last checkpoint. Raise `RunStopped` if it does not come back, or if it is
        lost again and again without getting any further."""
        reliability = self.settings.reliability
        reached = self.pipeline.headway.trained if self.pipeline is not None else 0
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
                    with self.waits.waiting("flow", f"restart, attempt {attempt + 1}", "trainer"):
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


# -- putting a pipeline together


def order_stages(stages: Sequence[StageConfig], *, critic: bool) -> list[str]:
    """Return the roles of a pipeline in order, with the user's own stages behind the ones they name."""
    roles = list(ROLES)
    if critic:
        roles.insert(roles.index("train"), "critic")
    for stage in stages:
        if stage.name not in STAGES:
            hint = STAGES.hint(stage.name)
            raise ConfigError("no such stage is registered", key="stages", value=stage.name, hint=hint)
        if stage.after not in roles or stage.after == roles[-1]:
            problem, hint = f"{stage.name!r} cannot stand behind it", f"one of {roles[:-1]}"
            raise ConfigError(problem, key="stages", value=stage.after, hint=hint)
        _check_arguments(stage)
        roles.insert(roles.index(stage.after) + 1, stage.name)
    for left, right in pairwise(roles):
        produced, consumed = STAGES.get(left).produces, STAGES.get(right).consumes
        if produced is not consumed:
            problem = f"{right} consumes {consumed.__name__}, but {left} produces {produced.__name__}"
            raise ConfigError(problem, key="stages", value=f"{left} → {right}", hint="choose another `after`")
    return roles


def _check_arguments(stage: StageConfig) -> None:
    """Raise `ConfigError` if the constructor of a stage does not take its `args`."""
    signature = inspect.signature(STAGES.get(stage.name))
    try:
        signature.bind(None, **stage.args)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        hint = f"arguments of {stage.name}: {names or 'none'}"
        raise ConfigError(f"{stage.name}: {error}", key="stages", value=dict(stage.args), hint=hint) from error


def connect_stages(stages: list[Stage[Any, Any]], pipeline: Pipeline) -> None:
    """Connect neighbouring stages by channels. Few tasks are read ahead; channels of groups are never full."""
    capacity = {Task: 1, Snapshot: 4}
    for left, right in pairwise(stages):
        name, size = f"{left.role} → {right.role}", capacity.get(left.produces, pipeline.capacity)
        if isinstance(left, DataloaderStage) and isinstance(right, GenerateStage):  # nobody holds tasks in between
            size = TASKS_READ_AHEAD
        ends = {"producer": left.role, "consumer": right.role}
        left.outbound = right.inbound = Channel[Any](name, left.produces, size, **ends, waits=pipeline.waits)


def root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that matters most: a defect before an expected stop or a lost trainer."""
    leaves = [root_cause(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return max(leaves, key=lambda leaf: not isinstance(leaf, TrainerCrashed | RunStopped | Stalled))
