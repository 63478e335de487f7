"""Answering and judging tasks without learning from them: what validation and `headway eval` do.

Guarantees: every task ends with as many verdicts as its group has members, or is counted as failed; nothing is
written into the ledger. Does not know which policy answers: that is the hub's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.environments.base import EnvironmentFactory, extract_outcome
from headway.monitor.event_log import EventLog
from headway.rewards.base import Reward
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.environment_agent import Decode
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import RequestLane
from headway.rollout.rollout_loop import RolloutLoop, RunningGroup
from headway.settings import RunSettings
from headway.types import DropReason, Episode, Score, Task


class NullSampleRecorder:
    """Validation samples are not written down."""

    def start_sample(self, sample_id: str, group_id: int) -> None: ...
    def finish_sample(self, episode: Episode) -> None: ...
    def drop_sample(self, sample_id: str, reason: DropReason) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    """One task with its answers."""

    task: Task
    answers: tuple[tuple[Episode, Score], ...]
    """Those that have a verdict; empty when the task failed."""

    @property
    def mean(self) -> float:
        """Mean reward of the answers."""
        return sum(score.value for _, score in self.answers) / len(self.answers)


def mean_outcomes(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How the episodes of environments went: shares of `success` and of `invalid` turns, mean number of `turns`."""
    found = [outcome for info in infos if "turns" in (outcome := extract_outcome(info))]
    if not found:
        return {}
    turns = sum(outcome["turns"] for outcome in found)
    judged = [outcome["success"] for outcome in found if "success" in outcome]
    return {
        **({"success": sum(judged) / len(judged)} if judged else {}),
        "turns": turns / len(found),
        "invalid": sum(outcome.get("invalid", 0.0) for outcome in found) / max(1.0, turns),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEvaluator:
    """Puts tasks to the policy behind a hub, in the lane of validation."""

    hub: InferenceHub
    environments: EnvironmentFactory
    reward: Reward
    settings: RunSettings
    """`group_size` answers to each task."""
    events: EventLog
    decode: Decode | None = None

    async def examine(self, tasks: Iterable[Task]) -> list[EvaluatedSample]:
        """Every task, judged, in the order in which they were given."""
        finished: asyncio.Queue[RunningGroup] = asyncio.Queue()
        judged: dict[int, EvaluatedSample] = {}
        async with OrderedTaskGroup() as group:
            loop = self._loop(finished, group)
            started = [loop.start(number, task).group_id for number, task in enumerate(tasks)]
            for _ in started:
                run = await finished.get()
                judged[run.group_id] = await self._verdicts(loop, run)
        return [judged[number] for number in started]

    async def _verdicts(self, loop: RolloutLoop, run: RunningGroup) -> EvaluatedSample:
        answers = []
        for episode in run.episodes.values() if run.complete else ():
            verdict = loop.score(run, episode)
            await asyncio.wait([verdict])
            if not verdict.cancelled() and verdict.exception() is None:
                answers.append((episode, verdict.result()))
        loop.close(run.group_id)
        return EvaluatedSample(task=run.task, answers=tuple(answers))

    def _loop(self, finished: asyncio.Queue[RunningGroup], tasks: asyncio.TaskGroup) -> RolloutLoop:
        def failed(run: RunningGroup, reason: DropReason) -> None:
            run.episodes.clear()
            finished.put_nowait(run)

        return RolloutLoop(
            hub=self.hub,
            environments=self.environments,
            reward=self.reward,
            settings=self.settings,
            events=self.events,
            book=NullSampleRecorder(),
            tasks=tasks,
            on_group=finished.put_nowait,
            on_failed=failed,
            lane=RequestLane.VALIDATE,
            who="validate",
            prefix="v",
            decode=self.decode,
        )
