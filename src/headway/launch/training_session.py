"""A training run from the first check to the last event: prepare it, open its directory, start it, train.

Guarantees: nothing is started before model, data, rewards and directory have been checked. However a run ends (done,
stopped, failed, interrupted), its child processes are gone, its event log is closed and its state is on disk.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from headway.config import ResolvedConfig
from headway.data import DataSources, make_sources
from headway.errors import ConfigError
from headway.flow.backends import Backends, RunContext, StopRequest
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary, order_stages
from headway.launch.components import LaunchContext, ModelFamily, make_backends, make_run_components
from headway.launch.denoising_components import DenoisingModelFamily
from headway.launch.environment_pool import make_environment_pool, make_episode_sources
from headway.launch.language_components import LanguageModelFamily
from headway.launch.reward_components import check_reward_models, connect_reward_models
from headway.models.model_shapes import find_model_shape
from headway.models.policy_info import PolicyInfo
from headway.monitor.event_files import EventFileWriter
from headway.monitor.event_log import EventLog, EventSink
from headway.monitor.events import BackendDown, BackendUp, ErrorReport, RunBegin, RunEnd, RunReady, SpanBegin, SpanEnd
from headway.monitor.resource_usage import describe_machine
from headway.monitor.run_status import RunStatus
from headway.placement.placement import Placement, plan_memory, plan_placement
from headway.placement.required_packages import check_packages
from headway.placement.server_requirements import uses_external_engines
from headway.processes.loop_watchdog import LoopWatchdog
from headway.rewards.reward_registry import RoutedReward, make_run_rewards, open_reward_workers
from headway.runs.group_log import GroupLog
from headway.runs.hub_upload import check_hub_access
from headway.runs.run_changes import WEIGHTS, hash_reward_code, hash_weights
from headway.runs.run_directory import RunDirectory, check_disk_space, read_checkpoint_version
from headway.runs.run_observer import RunObserver
from headway.runs.sample_logs import SampleLog
from headway.settings import make_run_settings
from headway.trainers.base import OffloadReporter, Trainer
from headway.types import Batch
from headway.version import VERSION
from headway.weights.transports import VERSIONS_ON_DISK

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: weights and two moments, in fp32."""
_VERSION_BYTES_PER_PARAMETER = 4
"""Largest size of a version of the weights."""
_TICK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that has been checked and can start."""

    resolved: ResolvedConfig
    policy: PolicyInfo
    sources: DataSources
    placement: Placement
    family: ModelFamily
    notes: Sequence[str] = ()
    """Sentences that a user should read before the run starts."""
    working_directory: Path = field(default_factory=Path.cwd)
    """Directory that relative paths of the configuration belong to."""

    @property
    def directory(self) -> Path:
        """Directory of the run, absolute from the moment at which it was prepared."""
        return self.working_directory / Path(self.resolved.config.output_dir).expanduser()

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        given = self.resolved.config.checkpoint_dir
        return self.working_directory / Path(given).expanduser() if given else self.directory / "checkpoints"

    def make_context(self, logs: Path | None) -> LaunchContext:
        """Return what the components of the run are made from; their output goes to `logs`."""
        return LaunchContext(resolved=self.resolved, policy=self.policy, placement=self.placement, logs=logs)


def select_model_family(resolved: ResolvedConfig) -> ModelFamily:
    """Return the family of the model that the configuration trains."""
    return DenoisingModelFamily() if resolved.derived.pipeline == "denoising" else LanguageModelFamily()


def prepare_run(resolved: ResolvedConfig, *, on_phase: Callable[[str], None] = lambda what: None) -> PreparedRun:
    """Check and read everything that a run needs, without starting or writing any of it. Raises `ConfigError`.

    `on_phase` gets the name of what is looked at from now on.
    """
    config = resolved.config
    agentic = resolved.derived.pipeline == "agentic"
    if not (config.pretrain or config.actor_train.model_args.model_name_or_path):
        raise ConfigError("which model is to be trained?", key="pretrain", value=None, hint="a directory or a name")
    manager = config.train_env_manager
    if manager is not None and not (manager.tags or config.custom_envs):
        hint = "such as train_env_manager: {tags: [frozen_lake]}; or, without agents, data and rewards"
        raise ConfigError("which environments do the agents act in?", key="train_env_manager.tags", value=[], hint=hint)
    if not config.rewards and not agentic:
        raise ConfigError("nothing judges the answers", key="rewards", value={}, hint="such as rewards: {math: {}}")
    check_packages(resolved)
    if config.push_to_hub:
        check_hub_access(config.push_to_hub, "push_to_hub")
    reward = make_run_rewards(config)
    order_stages(config.stages, critic=resolved.derived.needs_critic)
    on_phase("the model (torch and transformers are imported first)")
    placement, family = plan_placement(resolved), select_model_family(resolved)
    policy = family.find_policy(resolved)
    _check_context_length(resolved, policy)
    doubts = _check_vocabulary(policy)
    problem = family.find_adapter_problem(policy) if placement.transport.adapters else None
    if resolved.derived.pipeline != "denoising" and (placement.budget is None or problem):
        placement = plan_memory(resolved, placement, find_model_shape(policy.path), merges=problem is not None)
    family.check_policy(resolved, policy, placement)
    check_reward_models(resolved)
    on_phase("data")
    sources = make_episode_sources(resolved, policy) if agentic else make_sources(resolved, policy.tokenizer)
    family.check_sources(policy, sources)
    resolved = _count_steps(resolved, sources)
    if config.resume not in ("auto", "never"):
        read_checkpoint_version(Path(config.resume).expanduser())
    own_notes = reward.notes if isinstance(reward, RoutedReward) else ()
    notes = (*resolved.notes, *doubts, *placement.notes, *sources.notes, *own_notes)
    notes += () if problem is None else (f"adapters are merged into whole weights for the engines: {problem}",)
    compares = config.weight_transfer.compare_served
    if compares and (uses_external_engines(resolved) or resolved.derived.pipeline == "denoising"):
        notes += ("weight_transfer.compare_served has no effect: only our engines of language models have checksums",)
    return PreparedRun(
        resolved=resolved, policy=policy, sources=sources, placement=placement, family=family, notes=notes
    )


def _count_steps(resolved: ResolvedConfig, sources: DataSources) -> ResolvedConfig:
    """Return the configuration with the training steps that `max_epochs` passes make; a pass has whole batches only."""
    config, batch = resolved.config, resolved.derived.groups_per_step
    if config.max_epochs is None:
        return resolved
    if sources.rows is None:
        note = "max_epochs: changes nothing here; these environments have no end, and max_steps ends the run"
        return replace(resolved, notes=(*resolved.notes, note))
    steps = config.max_epochs * max(1, sources.rows // batch)
    if not resolved.provenance["max_steps"].startswith("derived: "):
        steps = min(steps, config.max_steps)
    if steps == config.max_steps:
        return resolved
    origin = f"derived: max_epochs: {config.max_epochs} × ⌊{sources.rows} rows / {batch}⌋"
    provenance = {**resolved.provenance, "max_steps": origin}
    return replace(resolved, config=replace(config, max_steps=steps), provenance=provenance)


def _check_context_length(resolved: ResolvedConfig, policy: PolicyInfo) -> None:
    """Reject sequences that are longer than the positions of the model."""
    wanted, derived = resolved.derived.sequence_length, resolved.derived
    if policy.positions is not None and wanted > policy.positions:
        problem = f"the model in {policy.path} knows {policy.positions} positions, and a sequence may have "
        problem += f"{derived.prompt_length} of the prompt + {derived.response_length} of the answer"
        hint = f"prompt_length + response_length of at most {policy.positions}"
        raise ConfigError(problem, key="sequence_length", value=wanted, hint=hint)


def _check_vocabulary(policy: PolicyInfo) -> tuple[str, ...]:
    """Reject a tokenizer that has more tokens than its model, and return a note if it has far fewer."""
    shape = find_model_shape(policy.path)
    if policy.tokenizer is None or shape is None:
        return ()
    tokens, known = len(policy.tokenizer), shape.vocabulary
    problem = f"its tokenizer has {tokens:,} tokens, and the model knows {known:,}: do they belong together?"
    if tokens > 1.01 * known:  # a few may have been added that no text contains
        raise ConfigError(problem, key="pretrain", value=str(policy.path))
    return (f"pretrain: {problem}",) if tokens < 0.8 * known else ()


@contextmanager
def open_run_directory(prepared: PreparedRun) -> Iterator[RunDirectory]:
    """Lock the run's directory, check its space and identity, and write the configuration. Raises `ConfigError`."""
    with RunDirectory(prepared.directory) as directory:
        resume = prepared.resolved.config.resume
        directory.refuse_lost_ledger(prepared.checkpoints)
        identity = identify_run(prepared)
        directory.compare_identity(prepared.resolved, *identity)  # what is refused makes no directory for checkpoints
        _check_disk_space(prepared)
        directory.write_identity(prepared.resolved, *identity)
        if not directory.started and resume not in ("auto", "never"):
            directory.start_from_checkpoint(Path(resume).expanduser())
        yield directory


def identify_run(prepared: PreparedRun) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a resumed run cannot change, and hashes of what its options name."""
    sources, contents = prepared.sources, hash_reward_code(prepared.resolved)
    if sources.validation is not None:
        contents["the held-out data"] = sources.validation.fingerprint()
    model = prepared.policy.path
    return {"pretrain": str(model), WEIGHTS: hash_weights(model), "data": sources.train.fingerprint()}, contents


def _check_disk_space(prepared: PreparedRun) -> None:
    """Check that checkpoints, and versions that travel by disk, can be written. Raises `ConfigError`."""
    parameters, transport = prepared.policy.parameters, prepared.placement.transport
    checkpoint_bytes = parameters * CHECKPOINT_BYTES_PER_PARAMETER
    check_disk_space(prepared.checkpoints, checkpoint_bytes, key="checkpoint_dir", contents="one checkpoint needs")
    if transport.kind == "disk":
        needed, path = VERSIONS_ON_DISK * parameters * _VERSION_BYTES_PER_PARAMETER, Path(transport.directory)
        contents = f"{VERSIONS_ON_DISK} versions need"
        check_disk_space(path, needed, key="weight_transfer.directory", contents=contents)


async def run_training(
    prepared: PreparedRun,
    directory: RunDirectory,
    *,
    sinks: Sequence[EventSink] = (),
    tick: Callable[[float], None] | None = None,
    show: Callable[[RunStatus], None] | None = None,
    show_every_s: float = 1.0,
    on_interrupt: Callable[[str, bool], None] = lambda how, is_clean: None,
) -> RunSummary:
    """Train to the end, or until an interrupt. `tick` is called twice a second with the time of the event log, and
    `show` with the status of the run, every `show_every_s`.

    The first SIGINT or SIGTERM stops the run cleanly. The second, or one before all components are up, raises
    `CancelledError` as soon as everything is released. `on_interrupt` is called with the name of each, and whether the
    run stops cleanly. Code that blocks the event loop is named, and gets a `KeyboardInterrupt` instead.
    """
    trained, steps = directory.count_trained_steps(), prepared.resolved.config.max_steps
    observer = RunObserver(directory.path, trained=trained, steps=steps, show=show, show_every_s=show_every_s)
    with _InterruptHandler(on_interrupt) as interrupts, observer:  # installed before the first event is visible
        async with open_run_context(
            prepared, directory, sinks=sinks, tick=tick, on_pending=observer.note_pending
        ) as context:
            flow = AsyncTrainingFlow(trainer=context)
            interrupts.stop_cleanly_with(context.stop_request)
            watchdog = LoopWatchdog(partial(_report_block, context.events), on_block=observer.note_block)
            with watchdog as interrupts.watchdog:
                async with observer.watch(flow, context.events):
                    observer.summary = summary = await flow.run()
            trained, finished, reason = summary.trained, summary.finished, summary.reason
            context.events.emit(RunEnd(who="run", trained=trained, finished=finished, reason=reason))
            return summary


def _report_block(events: EventLog, message: str) -> None:
    events.emit(ErrorReport(who="run", error="LoopBlocked", message=message))


@asynccontextmanager
async def open_run_context(
    prepared: PreparedRun,
    directory: RunDirectory,
    *,
    sinks: Sequence[EventSink] = (),
    tick: Callable[[float], None] | None = None,
    on_pending: Callable[[Sequence[str]], None] = lambda names: None,
) -> AsyncIterator[RunContext]:
    """Start the components of a run and return what `AsyncTrainingFlow` needs. The end of the block releases all.

    `on_pending` gets the names of the components that are not up yet, each time that they change.
    """
    loop = asyncio.get_running_loop()
    resumed, earlier_s, start_s = directory.started, directory.read_last_event_s(), loop.time()

    def clock() -> float:
        return earlier_s + loop.time() - start_s

    events = EventLog(clock, *sinks)
    launch = prepared.make_context(directory.path / "logs")
    components = make_run_components(launch, prepared.family)
    environments = make_environment_pool(prepared.resolved, prepared.policy)
    reward = make_run_rewards(prepared.resolved.config, directory.path / "logs")
    connect_reward_models(reward, launch, partial(_report_reward_model, events))
    backends = make_backends(prepared.resolved, prepared.policy, components, prepared.sources, environments, reward)
    context = _make_run_context(prepared, directory, backends, events)
    _show_offload(components.trainer, events)
    with EventFileWriter(directory.path, on_failure=context.stop_request.make) as log:
        events.attach(log)
        trained, machine = directory.count_trained_steps(), describe_machine()
        events.emit(RunBegin(who="run", resumed=resumed, trained=trained, machine=machine, headway=VERSION))
        calls = [lambda now_s: log.flush()] if tick is None else [lambda now_s: log.flush(), tick]
        ticking = asyncio.ensure_future(_call_periodically(calls, clock))
        try:
            on_pending(["reward workers"])
            async with open_reward_workers(reward):
                await components.start(on_pending)
                events.emit(RunReady(who="run"))
                gc.collect()
                gc.freeze()  # a full collection would visit all modules and models, which are never garbage
                yield context
        finally:
            ticking.cancel()
            try:
                await components.close()
            finally:
                await environments.close()  # kills every process that is left, so it comes last


def _report_reward_model(events: EventLog, name: str, reason: str) -> None:
    events.emit(BackendDown(who=name, reason=reason) if reason else BackendUp(who=name))


def _show_offload(trainer: Trainer, events: EventLog) -> None:
    """Show optimizer steps that move moments between host and GPU as spans of the timeline."""
    loop, numbers = asyncio.get_running_loop(), count()
    open_spans: list[int] = []

    def emit(begins: bool) -> None:
        if begins:
            open_spans[:] = [next(numbers)]  # one that a crash has left open stays so
            events.emit(SpanBegin(who="optimizer", span=open_spans[0], name="moments from the host and back"))
        elif open_spans:
            events.emit(SpanEnd(who="optimizer", span=open_spans.pop()))

    if isinstance(trainer, OffloadReporter):
        trainer.report_offload_to(lambda begins: loop.call_soon_threadsafe(emit, begins))


def _make_run_context(
    prepared: PreparedRun, directory: RunDirectory, backends: Backends, events: EventLog
) -> RunContext:
    config, validation = prepared.resolved.config, prepared.sources.validation
    data = config.actor_train.data_args
    samples = SampleLog(directory.path, prompt=data.prompt, answer=data.answer, decode=backends.decode)
    groups = GroupLog(directory.path, prepared.policy.tokenizer.decode, prompt=data.prompt, answer=data.answer)

    def write_batch(batch: Batch, trained: int) -> None:
        samples.write_batch(batch, trained)
        groups.write_batch(batch, trained)

    return RunContext(
        backends=backends,
        settings=make_run_settings(prepared.resolved, held_out=0 if validation is None else len(validation)),
        events=events,
        run_dir=directory.path,
        checkpoint_dir=prepared.checkpoints,
        clock=asyncio.get_running_loop().time,
        on_trained=write_batch,
        on_dropped=groups.write_dropped,
        on_validated=samples.write_validation,
        stages=config.stages,
    )


class _InterruptHandler:
    """Handles SIGINT and SIGTERM: the first stops the run cleanly, the second cancels it."""

    def __init__(self, on_interrupt: Callable[[str, bool], None]) -> None:
        self._stop_request: StopRequest | None = None
        self._on_interrupt, self._stopping = on_interrupt, False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self.watchdog: LoopWatchdog | None = None
        """Knows whether the loop can handle a signal. `None`: it can."""

    def stop_cleanly_with(self, stop_request: StopRequest) -> None:
        """Let the first interrupt make `stop_request`; until then an interrupt cancels the run."""
        self._stop_request = stop_request

    def __enter__(self) -> _InterruptHandler:
        self._earlier = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt, number)
            signal.signal(number, self._interrupt_blocked_loop)  # called as well, and at once
        return self

    def __exit__(self, *exception: object) -> None:
        for number, earlier in self._earlier.items():
            self._loop.remove_signal_handler(number)
            if earlier is not None:  # the default would end the process silently on a late SIGTERM
                signal.signal(number, earlier)

    def _interrupt_blocked_loop(self, number: int, frame: object) -> None:
        if self.watchdog is not None and self.watchdog.is_blocked:
            raise KeyboardInterrupt

    def _interrupt(self, number: int) -> None:
        assert self._task is not None
        name = signal.Signals(number).name
        if self._stopping or self._stop_request is None:
            self._on_interrupt(name, False)
            self._task.cancel()
            return
        self._stopping = True
        self._stop_request.make(f"stopped by {name}")
        self._on_interrupt(name, True)


async def _call_periodically(calls: Sequence[Callable[[float], None]], clock: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        for call in calls:
            call(clock())
