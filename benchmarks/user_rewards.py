"""What a verdict of a user's reward costs: in a worker process, and in the process of the run.

    python benchmarks/user_rewards.py [--write]

The functions do nothing, so that all time is that of the way to them and back. `alone` asks one call after another,
`together` 64 at once. CPU time of the controller is what delays the scheduler; the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from headway.rewards.base import Reward
from headway.rewards.reward_registry import make_reward
from headway.rewards.user_function import FunctionReward, load_function
from headway.rewards.user_reward_workers import WorkerReward
from headway.types import DenoisingStep, Episode, FinishReason, Generation, Image, Task, Turn

RESULT = Path(__file__).parents[1] / "docs" / "results" / "user_rewards.md"
CALLS, TOGETHER, ROUNDS = 512, 64, 5


def judge_text(text: str, task_data: dict[str, Any]) -> float:
    return 1.0


async def judge_text_async(text: str, task_data: dict[str, Any]) -> float:
    return 1.0


def judge_image(image: Any, task_data: dict[str, Any]) -> float:
    return float(image.shape[0])


def make_episode(side: int = 0) -> Episode:
    """One answer of 1,000 characters, or one picture."""
    drawn = Image(height=side, width=side, pixels=bytes(3 * side * side))
    actions = (DenoisingStep(image=drawn),) if side else ()
    made = Generation(actions=actions, logps=(), runs=(), finish=FinishReason.STOP, text="x" * 1000)
    data = {"prompt": "p" * 500, "answer": "42"}
    return Episode(sample_id="1.0", task=Task(position=0, data=data), turns=(Turn(observation=(), generation=made),))


def list_cases() -> Iterator[tuple[str, str, Reward, Episode]]:
    """Yield what is judged, where, by which reward, and the episode."""
    functions = {"text": judge_text, "text, async": judge_text_async, "picture 512 × 512": judge_image}
    for what, function in functions.items():
        episode = make_episode(512 if "picture" in what else 0)
        yield what, "worker process", make_reward(f"{Path(__file__).resolve()}:{function.__name__}"), episode
        yield what, "process of the run", FunctionReward(load_function(function, what, {}, "answer")), episode


async def measure(reward: Reward, episode: Episode, together: int) -> tuple[float, float]:
    """Return microseconds of wall-clock and of the controller's CPU time for a call."""
    episodes = [replace(episode, sample_id=f"1.{number}") for number in range(together)]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(CALLS // together):
        await asyncio.gather(*(reward.score(one) for one in episodes))
    return (time.perf_counter() - begin_s) * 1e6 / CALLS, (time.process_time() - begin_cpu_s) * 1e6 / CALLS


async def measure_all() -> list[str]:
    lines = ["| what is judged | where | alone: µs | CPU | 64 together: µs | CPU |", "|---|---|---:|---:|---:|---:|"]
    for what, where, reward, episode in list_cases():
        await reward.score(episode)
        found = [[await measure(reward, episode, together) for _ in range(ROUNDS)] for together in (1, TOGETHER)]
        figures = [f"{median(column):.0f}" for rounds in found for column in zip(*rounds, strict=True)]
        lines.append(f"| {what} | {where} | {' | '.join(figures)} |")
        print(lines[-1], flush=True)
        if isinstance(reward, WorkerReward):
            reward.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    write, table = parser.parse_args().write, asyncio.run(measure_all())
    if write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        head = "# The cost of a user's reward\n\n`python benchmarks/user_rewards.py --write`"
        facts = f"{when}, commit {commit}, {platform.machine()}, Python {platform.python_version()}"
        about = f"Medians of {ROUNDS} rounds of {CALLS} calls; CPU is that of the controller. The functions do nothing."
        RESULT.write_text(f"{head}: {facts}.\n{about}\n\n" + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
