"""A thousand episodes at once through everything but a model: scheduler, hub, host, chat template, ledger.

The engine answers at once and the policy always says the same word, so the measured cost is that of the episodes. After
every training step, when no episode runs, memory and everything that could have been left behind is counted.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.instant_engine import InstantEngine

from headway.config import ResolvedConfig, load_config
from headway.config import simulation_config as costs
from headway.environments.text_episode import TextEpisode
from headway.flow.backends import RunContext
from headway.flow.training_flow import AsyncTrainingFlow
from headway.launch.components import TrainingComponents, make_backends
from headway.launch.environment_pool import make_environment_pool, make_episode_sources
from headway.models.policy_info import PolicyInfo
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.rewards.reward_registry import make_run_rewards
from headway.settings import make_run_settings
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.simulated_weights import SimulatedTransport

LAKE: dict[str, Any] = {"size": 4, "p": 1.0, "is_slippery": False, "action_lookup": ["1", "2", "3", "4"]}
STEP_KINDS = ("coroutines that wait", "calls on threads")
"""How an environment takes its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The state of the process after a training step, when no episode runs."""

    rss_mb: float
    blocks: int
    """Memory blocks that Python has allocated."""
    episodes: int
    threads: int
    tasks: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMeasurement:
    """The result of one run."""

    step_kind: str
    most: int
    """Largest number of episodes at once."""
    ended: int
    wall_s: float
    cpu_s: float
    held_mb: float
    """Additional memory when most episodes ran."""
    snapshots: tuple[ProcessSnapshot, ...]

    @property
    def leaked_bytes(self) -> float:
        """Memory that each episode has left behind, measured after the first fifth of the steps."""
        settled = len(self.snapshots) // 5
        grown_mb = self.snapshots[-1].rss_mb - self.snapshots[settled].rss_mb
        return grown_mb * 2**20 / (self.ended * (len(self.snapshots) - 1 - settled) / len(self.snapshots))


class EpisodeCounter:
    """Event sink that counts episodes and takes snapshots."""

    def __init__(self) -> None:
        self.now = self.most = self.ended = 0
        self.most_mb = 0.0
        self.snapshots: list[ProcessSnapshot] = []

    def __call__(self, event: LoggedEvent) -> None:
        if event.kind == "sample.start":
            self.now += 1
            self.most = max(self.most, self.now)
        elif event.kind == "sample.finish":
            if self.now == self.most:
                self.most_mb = max(self.most_mb, read_rss_mb())
            self.now -= 1
            self.ended += 1
        elif event.kind == "step.end":
            self.snapshots.append(take_snapshot())


def take_snapshot() -> ProcessSnapshot:
    """Collect garbage and return the state of this process."""
    gc.collect()
    return ProcessSnapshot(
        rss_mb=read_rss_mb(),
        blocks=sys.getallocatedblocks(),
        episodes=sum(isinstance(one, TextEpisode) for one in gc.get_objects()),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        files=len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0,
    )


def read_rss_mb() -> float:
    """Return the resident memory of this process; 0 if the system does not report it."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 2**20 if status.exists() else 0.0


def make_config(step_kind: str, *, at_once: int, steps: int, turns: int, wait_s: float) -> ResolvedConfig:
    """Return a configuration with groups of eight; every training step plays all of them together."""
    slow = {"mean_s": wait_s, "std_s": wait_s / 3, "env_config": LAKE}
    environments: dict[str, dict[str, Any]] = {
        STEP_KINDS[0]: {"env_type": "benchmarks.agentic.delayed_environment:DelayedEnvironment", "env_config": slow},
        STEP_KINDS[1]: {"env_type": "frozen_lake", "env_config": LAKE},
    }
    return load_config(
        {
            "async_generation_ratio": 0,
            "filter_zero_variance": False,
            "rollout_batch_size": at_once,
            "sequence_length": 512,
            "max_steps": steps,
            "save_steps": 2,
            "eval_steps": 0,
            "train_env_manager": {"tags": ["lake"], "group_size": 8},
            "custom_envs": {"lake": {**environments[step_kind], "max_steps": turns, "max_tokens_per_step": 2}},
        }
    )


def measure_episodes(
    step_kind: str, *, at_once: int = 1000, ended: int = 10_000, turns: int = 5, wait_s: float = 0.3
) -> EpisodeMeasurement:
    """Run once on the wall clock; a coroutine waits N(`wait_s`, a third of it) per step."""
    from headway.models.tiny_model import make_character_tokenizer

    resolved = make_config(step_kind, at_once=at_once, steps=-(-ended // at_once), turns=turns, wait_s=wait_s)
    policy = PolicyInfo(
        path=Path("tiny"), critic=None, tokenizer=make_character_tokenizer(), parameters=1, positions=512
    )
    counter = EpisodeCounter()
    gc.collect()
    before_mb, began_s, cpu_s = read_rss_mb(), time.monotonic(), time.process_time()
    with TemporaryDirectory(prefix="headway-episodes-") as scratch:
        asyncio.run(_run_flow(resolved, policy, Path(scratch), counter))
    return EpisodeMeasurement(
        step_kind=step_kind,
        most=counter.most,
        ended=counter.ended,
        wall_s=time.monotonic() - began_s,
        cpu_s=time.process_time() - cpu_s,
        held_mb=counter.most_mb - before_mb,
        snapshots=tuple(counter.snapshots),
    )


def measure_in_new_process(step_kind: str, *, at_once: int, ended: int) -> EpisodeMeasurement:
    """Run in a new process that has played a few episodes before, so that its memory growth is due to the episodes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(partial(measure_episodes, step_kind, at_once=16, ended=16)).result()
        return pool.submit(partial(measure_episodes, step_kind, at_once=at_once, ended=ended)).result()


async def _run_flow(resolved: ResolvedConfig, policy: PolicyInfo, run_dir: Path, counter: EpisodeCounter) -> None:
    weights = costs.SimulatedWeightsConfig(buckets=1)
    components = TrainingComponents(
        trainer=SimulatedTrainer(costs.SimulatedTrainerConfig(save_s=0.0), weights),
        engines=[InstantEngine("engine/0", slots=1_000_000)],
        transport=SimulatedTransport(weights),
    )
    environments, clock = make_environment_pool(resolved, policy), asyncio.get_running_loop().time
    sources, reward = make_episode_sources(resolved, policy), make_run_rewards(resolved.config)
    backends = make_backends(resolved, policy, components, sources, environments, reward)
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=replace(backends, decode=_decode_always_right),
            settings=make_run_settings(resolved),
            events=EventLog(clock, counter),
            run_dir=run_dir,
            clock=clock,
        )
    )
    try:
        summary = await flow.run()
        if not summary.finished:
            raise RuntimeError(f"ended early: {summary.reason}")
    finally:
        await environments.close()


def _decode_always_right(actions: Sequence[Any]) -> str:
    """Decode every answer as a move to the right, into the wall."""
    return "3"
