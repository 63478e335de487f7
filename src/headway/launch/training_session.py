"""A whole run: check everything, open the directory, start the parts, train, leave a page behind.

Guarantees: nothing is started before model, data, rewards, trackers and directory have been checked. However the run
ends (done, stopped, failed, interrupted), its children are gone, its log is closed and its state is on the disk.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config import ResolvedConfig
from headway.data import DataSources, fingerprint, make_sources
from headway.errors import ConfigError
from headway.flow.backends import Backends
from headway.flow.training_flow import AsyncTrainingFlow, RunSummary
from headway.launch.environment_pool import EnvironmentPool, make_environment_pool, make_episode_sources
from headway.launch.language_components import PolicyInfo, TrainingComponents, make_backends
from headway.launch.model_families import make_run_components, select_model_family
from headway.launch.placement import Placement, check_tensor_parallel_model, plan_placement
from headway.launch.run_directory import EVENTS_FILE, RunDirectory, make_scale_handler, serve_control_socket
from headway.launch.sample_logs import ImageSampleLog, SampleLog
from headway.launch.transports import check_version_directory
from headway.monitor.event_log import EventLog, EventSink, JsonlSink, LoggedEvent
from headway.monitor.events import ErrorReport, RunBegin, RunEnd
from headway.monitor.machine_facts import describe_machine
from headway.rewards.reward_registry import make_rewards
from headway.settings import make_run_settings
from headway.version import VERSION

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and two moments, in fp32."""
_VERSION_BYTES_PER_PARAMETER = 4
"""For each parameter, at most."""
_TICK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that has been checked and can start."""

    resolved: ResolvedConfig
    policy: PolicyInfo
    sources: DataSources
    place: Placement

    @property
    def directory(self) -> Path:
        return Path(self.resolved.config.output_dir)

    @property
    def checkpoints(self) -> Path:
        given = self.resolved.config.checkpoint_dir
        return Path(given) if given else self.directory / "checkpoints"


def prepare_run(resolved: ResolvedConfig) -> PreparedRun:
    """Check and read everything that a run needs, without starting or writing any of it. Raises `ConfigError`."""
    config = resolved.config
    agentic = resolved.derived.pipeline == "agentic"
    if not (config.pretrain or config.actor_train.model_args.model_name_or_path):
        raise ConfigError("which model is to be trained?", key="pretrain", value=None, hint="a directory or a name")
    if not config.rewards and not agentic:
        raise ConfigError("nothing judges the answers", key="rewards", value={}, hint="such as rewards: {math: {}}")
    make_rewards(config.rewards, answer=config.actor_train.data_args.answer)
    where, kind = plan_placement(resolved), select_model_family(resolved)
    policy = kind.find_policy(resolved)
    _check_context_length(resolved, policy)
    kind.check_lengths(resolved, policy)
    check_tensor_parallel_model(where.layout, policy.path)
    sources = make_episode_sources(resolved, policy) if agentic else make_sources(resolved, policy.tokenizer)
    kind.check_sources(policy, sources)
    return PreparedRun(resolved=resolved, policy=policy, sources=sources, place=where)


def _check_context_length(resolved: ResolvedConfig, policy: PolicyInfo) -> None:
    """A model whose positions end before a sequence does cannot answer at all."""
    wanted, derived = resolved.derived.sequence_length, resolved.derived
    if policy.positions is not None and wanted > policy.positions:
        raise ConfigError(
            f"the model in {policy.path} knows {policy.positions} positions, and a sequence may have "
            f"{derived.prompt_length} of the prompt + {derived.response_length} of the answer",
            key="sequence_length",
            value=wanted,
            hint=f"prompt_length + response_length of at most {policy.positions}",
        )


@contextmanager
def open_run_directory(prepared: PreparedRun) -> Iterator[RunDirectory]:
    """The run's directory, locked, identified and with room for a checkpoint. Raises `ConfigError`."""
    with RunDirectory(prepared.directory) as directory:
        resume = prepared.resolved.config.resume
        if directory.started and resume == "never":
            raise ConfigError(
                "holds a run already, and resume is never",
                key="output_dir",
                value=str(directory.path),
                hint="choose another output_dir, or resume: auto",
            )
        directory.check_room(prepared.policy.parameters * CHECKPOINT_BYTES_PER_PARAMETER, prepared.checkpoints)
        check_version_directory(prepared.place.route, prepared.policy.parameters * _VERSION_BYTES_PER_PARAMETER)
        data = fingerprint(prepared.sources.train)
        directory.identify(prepared.resolved, {"pretrain": str(prepared.policy.path), "data": data})
        if not directory.started and resume not in ("auto", "never"):
            directory.adopt(Path(resume))
        yield directory


async def run_training(
    prepared: PreparedRun,
    directory: RunDirectory,
    *,
    sinks: Sequence[EventSink] = (),
    tick: Callable[[float], None] | None = None,
    on_interrupt: Callable[[str], None] = lambda how: None,
) -> RunSummary:
    """Run to the end, or until somebody interrupts. `tick` is called a few times a second with the log's time.

    The first interrupt ends the run cleanly; `on_interrupt` is told. The second, or one before the parts are up,
    raises `CancelledError` as soon as everything is released.
    """
    loop = asyncio.get_running_loop()
    resumed, before_s, began_s = directory.started, directory.last_event_s(), loop.time()

    def clock() -> float:
        return before_s + loop.time() - began_s

    events = EventLog(clock, *sinks)
    machinery = make_run_components(prepared.resolved, prepared.policy, prepared.place, directory.path / "logs")
    worlds = make_environment_pool(prepared.resolved, prepared.policy)
    backends = make_backends(prepared.resolved, prepared.policy, machinery, prepared.sources, worlds)
    flow = _make_flow(prepared, directory, backends, events)
    with _EventFileSink(directory.path / EVENTS_FILE, flow) as log:
        events.attach(log)
        with _InterruptHandler(flow, on_interrupt) as interrupts:  # before anybody can see that it runs
            events.emit(
                RunBegin(
                    who="run", resumed=resumed, trained=directory.trained(), machine=describe_machine(), headway=VERSION
                )
            )
            ticking = None if tick is None else asyncio.ensure_future(_call_periodically(tick, clock))
            try:
                await machinery.start()
                gc.collect()
                gc.freeze()  # modules and models are not garbage: a full collection would look at all of them
                interrupts.ready = True
                async with _open_control_socket(directory, flow, events):
                    summary = await flow.run()
                events.emit(
                    RunEnd(who="run", trained=summary.trained, finished=summary.finished, reason=summary.reason)
                )
                return summary
            finally:
                if ticking is not None:
                    ticking.cancel()
                await _close_components(machinery, worlds)


@asynccontextmanager
async def _open_control_socket(
    directory: RunDirectory, flow: AsyncTrainingFlow, events: EventLog
) -> AsyncIterator[None]:
    """The run can be spoken to; where the disk has no room for sockets, it goes on without."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve_control_socket(directory.path, make_scale_handler(flow)))
        except OSError as error:
            events.emit(ErrorReport(who="control", error="OSError", message=f"cannot be spoken to: {error.strerror}"))
        yield


async def _close_components(machinery: TrainingComponents, worlds: EnvironmentPool) -> None:
    """Worlds last: whatever process is left then has been started by one of them."""
    try:
        await machinery.close()
    finally:
        await worlds.close()


def _make_flow(
    prepared: PreparedRun, directory: RunDirectory, backends: Backends, events: EventLog
) -> AsyncTrainingFlow:
    config, validation = prepared.resolved.config, prepared.sources.validation
    data = config.actor_train.data_args
    return AsyncTrainingFlow(
        backends=backends,
        settings=make_run_settings(prepared.resolved, held_out=0 if validation is None else len(validation)),
        events=events,
        run_dir=directory.path,
        checkpoint_dir=prepared.checkpoints,
        clock=asyncio.get_running_loop().time,
        on_trained=SampleLog(directory.path / "samples.jsonl", prompt=data.prompt, answer=data.answer),
        on_validated=ImageSampleLog(directory.path / "images.jsonl", prompt=data.prompt),
    )


class _EventFileSink:
    """The log on the disk; where it cannot be written, the run stops cleanly instead of going on unrecorded."""

    def __init__(self, path: Path, flow: AsyncTrainingFlow) -> None:
        self._flow, self._failed = flow, False
        self._file = path.open("a", encoding="utf-8", newline="\n")
        self._sink = JsonlSink(self._file)

    def __enter__(self) -> _EventFileSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._attempt(self._file.close)

    def __call__(self, event: LoggedEvent) -> None:
        if not self._failed:
            self._attempt(lambda: self._sink(event))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._failed = True
            self._flow.stop(f"the event log cannot be written: {error.strerror}")


class _InterruptHandler:
    """SIGINT and SIGTERM while a run is at work: the first asks it to stop, the second ends it where it stands."""

    def __init__(self, flow: AsyncTrainingFlow, on_interrupt: Callable[[str], None]) -> None:
        self.ready = False
        """The parts are up: there is something to stop cleanly."""
        self._flow, self._on_interrupt, self._asked = flow, on_interrupt, False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    def __enter__(self) -> _InterruptHandler:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt, number)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _interrupt(self, number: int) -> None:
        assert self._task is not None
        if self._asked or not self.ready:
            self._task.cancel()
            return
        self._asked, name = True, signal.Signals(number).name
        self._flow.stop(f"stopped by {name}")
        self._on_interrupt(name)


async def _call_periodically(tick: Callable[[float], None], clock: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        tick(clock())
