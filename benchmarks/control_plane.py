"""What the control plane itself costs: the real flow, ledger and monitor, with back ends that cost nothing.

    python benchmarks/control_plane.py [--quick] [--write]

Two tables from one run on one core. Throughput: engines, rewards and the trainer answer at once, so that samples
per second are limited by the scheduler alone. Growth: every episode waits for its environment, so that a given
number of episodes is in flight at once; the cost of a sample should not depend on how many there are.
CPU time is used throughout: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.instant_engine import InstantEngine

from headway.config import simulation_config as costs
from headway.environments.base import Observation, SingleTurnEnvironment
from headway.flow.backends import Backends, RunContext
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.monitor.events import SampleFinish, SampleStart
from headway.monitor.run_report import RunMonitor
from headway.settings import RunSettings
from headway.sim.simulated_trainer import SimulatedTrainer
from headway.sim.simulated_weights import SimulatedTransport
from headway.types import Episode, Generation, RepeatedValue, Score, Task

RESULT = Path(__file__).parent.parent / "docs" / "results" / "control_plane.md"
AIM_SAMPLES, AIM_EPISODES = 5_000, 20_000


class Prompts:
    """Endless prompts of sixteen tokens."""

    def task(self, position: int) -> Task:
        return Task(position=position, prompt=RepeatedValue(0, 16))


class CoinReward:
    """Half of the samples are right, decided by their name."""

    async def score(self, episode: Episode) -> Score:
        return Score(value=float(sum(episode.sample_id.encode()) % 2))


class WaitingTurn(SingleTurnEnvironment):
    """One turn of 64 tokens, after which the environment thinks for a while."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    async def reset(self, task: Task) -> Observation:
        return Observation(tokens=task.prompt, hint=64)

    async def step(self, generation: Generation) -> Observation:
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        return Observation(done=True)


class Concurrency:
    """Counts episodes in flight and done, and looks at the memory when there are most in flight."""

    def __init__(self) -> None:
        self.now = self.peak = self.done = self.measured_at = 0
        self.rss_mb = 0.0

    def __call__(self, event: LoggedEvent) -> None:
        kind = type(event.event)  # cheap, because this is measured too
        if kind is SampleStart:
            self.now += 1
            self.peak = max(self.peak, self.now)
        elif kind is SampleFinish:
            if self.now == self.peak > self.measured_at:
                self.measured_at, self.rss_mb = self.peak, rss_mb()
            self.now -= 1
            self.done += 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    samples: int
    peak: int
    cpu_s: float
    rss_mb: float

    @property
    def per_s(self) -> float:
        return self.samples / self.cpu_s

    @property
    def micros(self) -> float:
        return 1e6 * self.cpu_s / self.samples


def backends(wait_s: float) -> Backends:
    """Everything at once and for nothing."""
    weights = costs.SimulatedWeightsConfig(buckets=1)
    return Backends(
        trainer=SimulatedTrainer(costs.SimulatedTrainerConfig(save_s=0.0), weights),
        engines=[InstantEngine(f"engine/{n}", slots=1_000_000) for n in range(8)],
        transport=SimulatedTransport(weights),
        tasks=Prompts(),
        environments=lambda task: WaitingTurn(wait_s),
        reward=CoinReward(),
    )


def measure(groups: int, group_size: int, steps: int, wait_s: float = 0.0) -> Row:
    """One run of the flow on the wall clock; the process' CPU time over everything, start and end included."""
    concurrency = Concurrency()

    async def main(run_dir: Path) -> None:
        clock = asyncio.get_running_loop().time
        settings = RunSettings(
            groups_per_step=groups,
            group_size=group_size,
            max_steps=steps,
            async_generation_ratio=1.0,
            filter_zero_variance=False,
            save_steps=0,
            eval_steps=0,
        )
        flow = AsyncTrainingFlow(
            trainer=RunContext(
                backends=backends(wait_s),
                settings=settings,
                events=EventLog(clock, RunMonitor(), concurrency),
                run_dir=run_dir,
                clock=clock,
            )
        )
        summary = await flow.run()
        assert summary.finished, summary.reason

    gc.collect()
    before_mb = rss_mb()
    with tempfile.TemporaryDirectory() as scratch:
        start = time.process_time()
        asyncio.run(main(Path(scratch)))
        cpu_s = time.process_time() - start
    grown_mb = max(concurrency.rss_mb - before_mb, 0.0)
    return Row(samples=concurrency.done, peak=concurrency.peak, cpu_s=cpu_s, rss_mb=grown_mb)


def rss_mb() -> float:
    """Memory of this process now; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 2**20 if status.exists() else 0.0


def throughput(quick: bool) -> list[str]:
    """Samples a second by the shape of a batch."""
    lines = [
        "| groups × members | samples | µs of CPU per sample | samples per CPU-second | of the aim |",
        "|---|--:|--:|--:|--:|",
    ]
    for groups, size in ((64, 16), (128, 8), (256, 1)):
        row = measure(groups, size, 5 if quick else 20)
        share = row.per_s / AIM_SAMPLES
        lines.append(f"| {groups} × {size} | {row.samples:,} | {row.micros:.0f} | {row.per_s:,.0f} | {share:.2f}× |")
    return lines


def growth(quick: bool) -> list[str]:
    """The cost of a sample by how many episodes are in flight: all slots, twice what a step consumes."""
    lines = [
        "| episodes in flight | samples | µs of CPU per sample | against the first row | KB per episode |",
        "|--:|--:|--:|--:|--:|",
    ]
    first = 0.0
    for episodes in (100, 1_000) if quick else (100, 500, 2_000, 5_000, 10_000, AIM_EPISODES):
        per_step = episodes // 2
        steps = 3 if quick else max(8, AIM_EPISODES // per_step)
        row = measure(per_step // 10, 10, steps, wait_s=episodes / 2_500)
        first = first or row.micros
        each_kb = f"{1024 * row.rss_mb / row.peak:.1f}" if episodes >= 2_000 else "–"
        lines.append(f"| {row.peak:,} | {row.samples:,} | {row.micros:.0f} | {row.micros / first:.2f}× | {each_kb} |")
    return lines


def header() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    date = datetime.now(UTC).date().isoformat()
    return f"{date}, {platform.machine()}, Python {platform.python_version()}, commit {commit.stdout.strip() or '?'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--write", action="store_true", help=f"keep the tables in docs/results/{RESULT.name}")
    arguments = parser.parse_args()
    gc.set_threshold(100_000, 20, 50)  # as the command line does: thousands of live tasks are not garbage
    lines = ["# Control plane", "", header() + ", one core, CPU time.", ""]
    lines.append(f"Aim: {AIM_SAMPLES:,} samples a second and {AIM_EPISODES:,} concurrent episodes.")
    text = "\n".join([*lines, "", *throughput(arguments.quick), "", *growth(arguments.quick), ""])
    print(text)
    if arguments.write:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
