"""What a flow works with: its back ends behind protocols, real or simulated, and the context of one run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.config import StageConfig
from headway.data.task_sources import TaskSource
from headway.engines.base import Engine
from headway.environments.base import EnvironmentFactory
from headway.monitor.event_log import EventLog
from headway.rewards.base import Reward, group_relative_advantages
from headway.rollout.environment_agent import Decode
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.settings import RunSettings
from headway.trainers.base import Scorer, Trainer
from headway.types import Batch, DropReason, EpisodeGroup, Score
from headway.weights.base import WeightTransport

DropSink = Callable[[EpisodeGroup, Mapping[str, Score], DropReason, int], None]

Estimator = Callable[[Sequence[float]], Sequence[float]]
"""A function from the rewards of a group to the advantages of its members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReserve:
    """Makes further engines while a run is under way."""

    make: Callable[[str], Engine]
    """Makes an engine of the given name, not started yet. The maker also closes it at the end of the run."""
    most: int
    """Largest number of engines that this placement allows."""
    why: str
    """Reason for that limit, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """The back ends of one run."""

    trainer: Trainer
    engines: Sequence[Engine]
    transport: WeightTransport
    tasks: TaskSource
    environments: EnvironmentFactory
    reward: Reward
    estimator: Estimator = group_relative_advantages
    logp: Scorer | None = None
    """Scorer of proximal log-probabilities. `None`: the stage passes groups through."""
    ref_logp: Scorer | None = None
    critic: Scorer | None = None
    """Scorer of values. `None`: there is no critic stage."""
    validation_tasks: TaskSource | None = None
    decode: Decode | None = None
    """Turns actions into text, for rewards and environments that read text. `None`: none does."""
    reserve: EngineReserve | None = None
    """Makes engines that join later. `None`: none may join."""
    lent: Sequence[Engine] = ()
    """Engines on the trainer's devices, which work while the trainer waits."""
    engines_sleep: bool = False
    """Whether engines free their memory while the trainer uses devices that they share."""
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Devices of `train`, `logp`, `ref_logp`, `critic` and `generate`. Roles that share devices take turns."""


class StopRequest:
    """Asks a run to end cleanly, with a checkpoint. It can be made before there is a flow."""

    def __init__(self) -> None:
        self.reason = ""
        self._requested = asyncio.Event()

    @property
    def is_made(self) -> bool:
        return self._requested.is_set()

    def make(self, reason: str) -> None:
        """Ask the run to stop at the next opportunity."""
        self.reason = reason
        self._requested.set()

    async def wait(self) -> None:
        await self._requested.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that `AsyncTrainingFlow` needs for one run. `headway.open_run` makes it from a configuration."""

    backends: Backends
    settings: RunSettings
    events: EventLog
    run_dir: Path
    clock: Callable[[], float]
    checkpoint_dir: Path | None = None
    """Directory of the checkpoints. `None`: `checkpoints` in `run_dir`."""
    on_trained: Callable[[Batch, int], None] | None = None
    """Gets every trained batch with the version that it made."""
    on_dropped: DropSink | None = None
    """Gets what was finished of a dropped group, the scores that are known, the reason, and the step under way."""
    on_validated: Callable[[int, Sequence[EvaluatedSample]], None] | None = None
    """Gets the samples of every validation with the validated version."""
    stages: Sequence[StageConfig] = ()
    """Stages of the user's own."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """Ends the run cleanly, like `AsyncTrainingFlow.stop`."""
