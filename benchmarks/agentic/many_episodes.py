"""A thousand episodes at once: the whole way of an episode (scheduler, hub, host, chat tokens, ledger), no model.

The engine answers at once and the policy always says the same word, so that what is left is the cost of having so many
episodes. After every training step, when nobody plays, memory and everything that could have been left behind are
counted.
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
from headway.launch.components import PolicyInfo, TrainingComponents, make_backends
from headway.launch.environment_pool import make_environment_pool, make_episode_sources
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.settings import make_run_settings
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.simulated_weights import SimulatedTransport

LAKE: dict[str, Any] = {"size": 4, "p": 1.0, "is_slippery": False, "action_lookup": ["1", "2", "3", "4"]}
WAYS = ("coroutines that wait", "calls on threads")
"""How the steps of an environment are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What there is after a training step, when nobody plays."""

    rss_mb: float
    blocks: int
    """Of memory that Python has handed out: whatever an object is made of."""
    episodes: int
    threads: int
    tasks: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """One run."""

    way: str
    most: int
    """Episodes that were under way at once."""
    ended: int
    wall_s: float
    cpu_s: float
    held_mb: float
    """More memory with the most of them under way than before any was."""
    looks: tuple[Look, ...]

    @property
    def leaked_bytes(self) -> float:
        """Memory that an episode has left behind, after the first fifth of the steps."""
        settled = len(self.looks) // 5
        grown_mb = self.looks[-1].rss_mb - self.looks[settled].rss_mb
        return grown_mb * 2**20 / (self.ended * (len(self.looks) - 1 - settled) / len(self.looks))


class Watch:
    """Sink: counts episodes, and looks when most are under way and when nobody is."""

    def __init__(self) -> None:
        self.now = self.most = self.ended = 0
        self.most_mb = 0.0
        self.looks: list[Look] = []

    def __call__(self, event: LoggedEvent) -> None:
        if event.kind == "sample.start":
            self.now += 1
            self.most = max(self.most, self.now)
        elif event.kind == "sample.finish":
            if self.now == self.most:
                self.most_mb = max(self.most_mb, rss_mb())
            self.now -= 1
            self.ended += 1
        elif event.kind == "step.end":
            self.looks.append(look())


def look() -> Look:
    """At this process, garbage aside."""
    gc.collect()
    return Look(
        rss_mb=rss_mb(),
        blocks=sys.getallocatedblocks(),
        episodes=sum(isinstance(one, TextEpisode) for one in gc.get_objects()),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        files=len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0,
    )


def rss_mb() -> float:
    """Memory of this process now; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 2**20 if status.exists() else 0.0


def configuration(way: str, *, at_once: int, steps: int, turns: int, wait_s: float) -> ResolvedConfig:
    """Groups of eight; every training step plays all of them together."""
    slow = {"mean_s": wait_s, "std_s": wait_s / 3, "env_config": LAKE}
    worlds: dict[str, dict[str, Any]] = {
        WAYS[0]: {"env_type": "benchmarks.agentic.delayed_environment:DelayedEnvironment", "env_config": slow},
        WAYS[1]: {"env_type": "frozen_lake", "env_config": LAKE},
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
            "custom_envs": {"lake": {**worlds[way], "max_steps": turns, "max_tokens_per_step": 2}},
        }
    )


def measured(way: str, *, at_once: int = 1000, ended: int = 10_000, turns: int = 5, wait_s: float = 0.3) -> Many:
    """One run on the wall clock; a coroutine waits N(`wait_s`, a third of it) a step."""
    from headway.models.tiny_model import make_character_tokenizer

    resolved = configuration(way, at_once=at_once, steps=-(-ended // at_once), turns=turns, wait_s=wait_s)
    policy = PolicyInfo(
        path=Path("tiny"), critic=None, tokenizer=make_character_tokenizer(), parameters=1, positions=512
    )
    watch = Watch()
    gc.collect()
    before_mb, began_s, cpu_s = rss_mb(), time.monotonic(), time.process_time()
    with TemporaryDirectory(prefix="headway-episodes-") as scratch:
        asyncio.run(_played(resolved, policy, Path(scratch), watch))
    return Many(
        way=way,
        most=watch.most,
        ended=watch.ended,
        wall_s=time.monotonic() - began_s,
        cpu_s=time.process_time() - cpu_s,
        held_mb=watch.most_mb - before_mb,
        looks=tuple(watch.looks),
    )


def alone(way: str, *, at_once: int, ended: int) -> Many:
    """The same in a process of its own, which has played a few before, so that memory is that of the episodes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(partial(measured, way, at_once=16, ended=16)).result()
        return pool.submit(partial(measured, way, at_once=at_once, ended=ended)).result()


async def _played(resolved: ResolvedConfig, policy: PolicyInfo, run_dir: Path, watch: Watch) -> None:
    weights = costs.SimulatedWeightsConfig(buckets=1)
    components = TrainingComponents(
        trainer=SimulatedTrainer(costs.SimulatedTrainerConfig(save_s=0.0), weights),
        engines=[InstantEngine("engine/0", slots=1_000_000)],
        transport=SimulatedTransport(weights),
    )
    environments, clock = make_environment_pool(resolved, policy), asyncio.get_running_loop().time
    backends = make_backends(resolved, policy, components, make_episode_sources(resolved, policy), environments)
    flow = AsyncTrainingFlow(
        trainer=RunContext(
            backends=replace(backends, decode=_always),
            settings=make_run_settings(resolved),
            events=EventLog(clock, watch),
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


def _always(actions: Sequence[Any]) -> str:
    """What the policy says: to the right, into the wall."""
    return "3"
