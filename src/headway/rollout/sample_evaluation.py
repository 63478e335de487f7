"""Evaluates a policy: answers and scores tasks without training on them, for validation and `headway eval`.

Guarantees: every task ends with as many scores as its group has members, or counts as failed. Nothing is written to
the ledger. The evaluator does not know which policy answers: the hub does.
"""

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
    """Records nothing: samples of a validation are not in the ledger."""

    def start_sample(self, sample_id: str, group_id: int) -> None: ...
    def finish_sample(self, episode: Episode) -> None: ...
    def drop_sample(self, sample_id: str, reason: DropReason) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    """One task with its scored answers."""

    task: Task
    answers: tuple[tuple[Episode, Score], ...]
    """Answers that have a score; empty if the task failed."""

    @property
    def mean(self) -> float:
        return sum(score.value for _, score in self.answers) / len(self.answers)


def mean_outcomes(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average the outcomes of episodes: shares of `success` and of `invalid` turns, and the number of `turns`."""
    found = [outcome for info in infos if "turns" in (outcome := extract_outcome(info))]
    if not found:
        return {}
    turns = sum(outcome["turns"] for outcome in found)
    evaluated = [outcome["success"] for outcome in found if "success" in outcome]
    return {
        **({"success": sum(evaluated) / len(evaluated)} if evaluated else {}),
        "turns": turns / len(found),
        "invalid": sum(outcome.get("invalid", 0.0) for outcome in found) / max(1.0, turns),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEvaluator:
    """Lets the policy behind a hub answer tasks, in the validation lane."""

    hub: InferenceHub
    environments: EnvironmentFactory
    reward: Reward
    settings: RunSettings
    """Settings of the run; each task gets `group_size` answers."""
    events: EventLog
    decode: Decode | None = None

    async def evaluate(self, tasks: Iterable[Task]) -> list[EvaluatedSample]:
        """Answer and score every task. Return the results in the order of the tasks."""
        finished: asyncio.Queue[RunningGroup] = asyncio.Queue()
        evaluated: dict[int, EvaluatedSample] = {}
        async with OrderedTaskGroup() as group:
            loop = self._make_loop(finished, group)
            started = [loop.start(number, task).group_id for number, task in enumerate(tasks)]
            for _ in started:
                run = await finished.get()
                evaluated[run.group_id] = await self._collect_scores(loop, run)
        return [evaluated[number] for number in started]

    async def _collect_scores(self, loop: RolloutLoop, run: RunningGroup) -> EvaluatedSample:
        answers = []
        for episode in run.episodes.values() if run.complete else ():
            score_future = loop.score(run, episode)
            await asyncio.wait([score_future])
            if not score_future.cancelled() and score_future.exception() is None:
                answers.append((episode, score_future.result()))
        loop.close(run.group_id)
        return EvaluatedSample(task=run.task, answers=tuple(answers))

    def _make_loop(self, finished: asyncio.Queue[RunningGroup], tasks: asyncio.TaskGroup) -> RolloutLoop:
        def failed(run: RunningGroup, reason: DropReason) -> None:
            run.episodes.clear()
            finished.put_nowait(run)

        return RolloutLoop(
            hub=self.hub,
            environments=self.environments,
            reward=self.reward,
            settings=self.settings,
            events=self.events,
            recorder=NullSampleRecorder(),
            tasks=tasks,
            on_group=finished.put_nowait,
            on_failed=failed,
            lane=RequestLane.VALIDATE,
            who="validate",
            prefix="v",
            decode=self.decode,
        )
