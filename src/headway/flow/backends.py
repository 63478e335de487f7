"""Everything a flow drives, behind protocols: the very same flow runs on real and on simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.data.task_sources import TaskSource
from headway.engines.base import Engine
from headway.environments.base import EnvironmentFactory
from headway.rewards.base import Reward, group_relative_advantages
from headway.rollout.environment_agent import Decode
from headway.trainers.base import Scorer, Trainer
from headway.weights.base import WeightTransport

Estimator = Callable[[Sequence[float]], Sequence[float]]
"""Rewards of a group → advantages of its members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReserve:
    """Where further engines come from."""

    make: Callable[[str], Engine]
    """By name. Not started yet; whoever made it also closes it at the end."""
    most: int
    """Engines that a run on this placement can have."""
    why: str
    """It cannot have more, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """The parts of one run."""

    trainer: Trainer
    engines: Sequence[Engine]
    transport: WeightTransport
    tasks: TaskSource
    environments: EnvironmentFactory
    reward: Reward
    estimator: Estimator = group_relative_advantages
    logp: Scorer | None = None
    """Proximal log-probabilities; `None`: the stage passes groups through."""
    ref_logp: Scorer | None = None
    critic: Scorer | None = None
    """`None`: there is no critic stage."""
    validation_tasks: TaskSource | None = None
    decode: Decode | None = None
    """Actions as text, for rewards and environments that read; `None`: they do not."""
    reserve: EngineReserve | None = None
    """Engines that may join; `None`: it stays with those of the start."""
    lent: Sequence[Engine] = ()
    """Engines on the trainer's devices: they work while it waits."""
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Devices of `train`, `logp`, `ref_logp`, `critic`, `generate`; roles that share some take turns."""
