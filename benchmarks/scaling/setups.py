"""Simulates one cell of a table: the real flow on the virtual clock, with response lengths that depend on the prompt.

Two things are added to the simulator of the package:

* `PromptLengthEnvironments`: members of a group share a factor, because a hard prompt makes all its answers long.
  Without it whole groups on one worker would balance by themselves, and prompt replication would gain nothing.
* `RoundFeeder`: when too few groups of a batch teach anything, a whole further batch is generated. That is what the
  baseline of the queue-scheduling table does; the package's own `batch` only refills what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.config import ReliabilityConfig
from headway.config.simulation_config import SimulationConfig
from headway.environments.base import Observation, SingleTurnEnvironment
from headway.flow.stages.generate_stage import FEEDERS, BatchFeeder
from headway.flow.staleness_policies import CandidateGroup, DropPolicy, SchedulerSnapshot
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.event_log import LoggedEvent
from headway.monitor.events import StepEnd
from headway.registry import STALENESS_POLICIES
from headway.seeding import make_rng
from headway.settings import RunSettings
from headway.sim.simulated_environment import SimulatedReward
from headway.sim.simulated_run import Scenario, play_scenario
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import SamplingParams, Task

NO_DEADLINES = ReliabilityConfig(
    request_timeout_s=1e7,
    episode_timeout_s=1e7,
    train_timeout_s=1e7,
    lock_timeout_s=1e7,
    stall_timeout_s=1e7,
    transfer_timeout_s=1e7,
)
"""Deadlines that never pass, because the tables are about speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLengths:
    """Response lengths: `mean` × a lognormal factor of the prompt × one of the response, cut off at `longest`."""

    mean: float
    """Mean length before the cut-off."""
    prompt_spread: float
    """σ of the logarithm that all members of a group share."""
    spread: float
    """σ of the logarithm of each response."""
    longest: int = 32_768
    easy_is_short: bool = False
    """Whether prompts whose answers are all right have answers below the mean."""

    def scale_to(self, longest: int) -> ResponseLengths:
        """Return lengths of the same shape for another limit."""
        return replace(self, mean=self.mean * longest / self.longest, longest=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One calibration: lengths of responses and costs of everything."""

    name: str
    lengths: ResponseLengths | None
    """None to use those of the simulation."""
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    fold_to: int = 64
    """Prompts per step that asynchronous runs are folded down to (see `Setup.fold`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run."""

    workload: Workload
    settings: RunSettings
    train: int
    infer: int = 0
    """0 if the engines take turns with the trainer on its devices."""
    warmup: int = 0
    fold: int = 1
    """Simulates 1/fold of the prompts on 1/fold of the GPUs, which is the same work and the same tail for every GPU.
    Only for asynchronous runs, where no step waits for the slowest of all GPUs."""
    seed: int = 1


class RoundFeeder(BatchFeeder):
    """Starts whole batches until enough groups are useful.

    It needs `staleness_policy="rounds"` and a batch of spare slots.
    """

    def may_start(self) -> bool:
        headway = self._headway
        if headway.paused or headway.stepping or headway.served < headway.trained:
            return False
        size = headway.settings.groups_per_step
        if self._left == 0 and headway.in_flight == 0 and headway.ready_count < size:
            self._left = size
        return self._left > 0


class RoundPolicy(DropPolicy):
    """Makes a batch only when everything that was started has ended."""

    def select(self, groups: Sequence[CandidateGroup], snapshot: SchedulerSnapshot) -> list[CandidateGroup] | None:
        return super().select(groups, snapshot) if all(group.is_ready for group in groups) else None


FEEDERS["rounds"] = RoundFeeder
STALENESS_POLICIES.register("rounds", RoundPolicy)


class FixedLengthEnvironment(SingleTurnEnvironment):
    """A single turn of a given length."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=task.prompt, hint=self._length)


class PromptLengthEnvironments:
    """Makes single turns with lengths that are drawn per prompt and per response."""

    def __init__(self, lengths: ResponseLengths, simulation: SimulationConfig, *, seed: int) -> None:
        self._lengths, self._seed = lengths, seed
        self._reward = SimulatedReward(simulation.reward, seed=seed)
        self._prompts: dict[int, float] = {}
        self._episodes: dict[int, int] = {}
        self._mu = math.log(lengths.mean) - (lengths.prompt_spread**2 + lengths.spread**2) / 2

    def __call__(self, task: Task) -> FixedLengthEnvironment:
        position = task.position
        episode = self._episodes[position] = self._episodes.get(position, -1) + 1
        if position not in self._prompts:
            self._prompts[position] = self._draw_prompt_factor(position)
        response_factor = make_rng(self._seed, "length", position, episode).gauss(0.0, self._lengths.spread)
        length = math.exp(self._mu + self._prompts[position] + response_factor)
        return FixedLengthEnvironment(min(max(round(length), 1), self._lengths.longest))

    def _draw_prompt_factor(self, position: int) -> float:
        """Return the logarithm of the factor that all answers to a prompt share."""
        factor = make_rng(self._seed, "prompt length", position).gauss(0.0, self._lengths.prompt_spread)
        if self._lengths.easy_is_short and self._reward.success_probability(position) in (0.0, 1.0):
            return -abs(factor)
        return factor


class StepEndTimes:
    """A sink that keeps the times when training steps ended, and nothing else, so that a big run stays cheap."""

    def __init__(self) -> None:
        self.ends_s: list[float] = [0.0]

    def __call__(self, event: LoggedEvent) -> None:
        if isinstance(event.event, StepEnd):
            self.ends_s.append(event.time_s)


def make_folded_scenario(setup: Setup) -> Scenario:
    """Return the scenario of a setup, folded."""
    if setup.train % setup.fold or setup.infer % setup.fold or setup.settings.groups_per_step % setup.fold:
        raise ValueError(f"{setup.train}T{setup.infer}I does not fold into {setup.fold} parts")
    train, infer = setup.train // setup.fold, setup.infer // setup.fold
    settings = replace(
        setup.settings,
        groups_per_step=setup.settings.groups_per_step // setup.fold,
        sampling=SamplingParams(max_new_tokens=setup.workload.lengths.longest if setup.workload.lengths else 1_000_000),
    )
    return Scenario(
        settings=settings,
        simulation=setup.workload.simulation,
        train_devices=tuple(range(train)),
        infer_devices=tuple(range(train, train + infer)) if infer else tuple(range(train)),
        seed=setup.seed,
    )


@cache
def simulate_step_s(setup: Setup) -> float:
    """Return the mean seconds per training step after the warm-up."""
    scenario, sink = make_folded_scenario(setup), StepEndTimes()

    def prepare(flow: AsyncTrainingFlow) -> None:
        lengths = setup.workload.lengths
        if lengths is not None:
            environments = PromptLengthEnvironments(lengths, scenario.simulation, seed=scenario.seed)
            flow.backends = replace(flow.backends, environments=environments)

    with TemporaryDirectory(prefix="headway-scaling-") as scratch:
        summary = run_on_virtual_clock(play_scenario(scenario, run_dir=Path(scratch), sinks=[sink], on_flow=prepare))
    if not summary.finished:
        raise RuntimeError(f"{setup}: {summary.reason}")
    return (sink.ends_s[-1] - sink.ends_s[setup.warmup]) / (len(sink.ends_s) - 1 - setup.warmup)
