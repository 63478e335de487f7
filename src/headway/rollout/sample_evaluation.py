"""Evaluates a policy: answers and scores tasks without training on them, for validation and `headway eval`.

Guarantees: every answer that was asked for ends with a score or with the reason why it has none, and one without a
score is part of no mean. Nothing is written to the ledger. The evaluator does not know which policy answers: the hub
does.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from headway.environments.base import EnvironmentFactory, extract_outcome
from headway.monitor.event_log import EventLog
from headway.monitor.wait_graph import WaitGraph
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
    def leave_sample(self, sample_id: str, length: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSample:
    """One task with its scored answers."""

    task: Task
    answers: tuple[tuple[Episode, Score], ...]
    """Answers that have a score; empty if the task failed."""
    failures: tuple[str, ...] = ()
    """Reasons why the other answers have none, one each."""

    @property
    def mean(self) -> float:
        return sum(score.value for _, score in self.answers) / len(self.answers)


def count_failures(samples: Iterable[EvaluatedSample]) -> Counter[str]:
    """Count the answers without a score by their reason. Reasons that differ only in numbers count as one."""
    first: dict[str, str] = {}
    found: Counter[str] = Counter()
    for sample in samples:
        for failure in sample.failures:
            reason = re.sub(r"^\w*\d+\.\d+: ", "", failure)  # the name of the sample
            found[first.setdefault(re.sub(r"\d+", "#", reason), reason)] += 1
    return found


async def _do_nothing() -> None: ...


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
    waits: WaitGraph | None = None
    """Wait-for graph of the run, in which the calls of an evaluation appear."""

    async def evaluate(
        self, tasks: Iterable[Task], on_answered: Callable[[], Awaitable[None]] = _do_nothing
    ) -> list[EvaluatedSample]:
        """Answer and score every task. Return the results in the order of the tasks.

        `on_answered` is awaited when every answer is there; some scores may still be missing then.
        """
        finished: asyncio.Queue[RunningGroup] = asyncio.Queue()
        async with OrderedTaskGroup() as group:
            loop = self._make_loop(finished, group)
            with nullcontext() if self.waits is None else self.waits.reporting(loop.waits):
                started = [loop.start(number, task) for number, task in enumerate(tasks)]
                for _ in started:
                    await finished.get()
                await on_answered()
                return [await self._collect_scores(loop, run) for run in started]

    async def _collect_scores(self, loop: RolloutLoop, run: RunningGroup) -> EvaluatedSample:
        if not run.episodes:
            missing = (run.fault or "failed",) * self.settings.group_size
            return EvaluatedSample(task=run.task, answers=(), failures=missing)
        futures = [(episode, loop.score(run, episode)) for episode in run.episodes.values()]
        await asyncio.wait([future for _, future in futures])
        loop.close(run.group_id)
        errors = {id(future): "cancelled" if future.cancelled() else future.exception() for _, future in futures}
        return EvaluatedSample(
            task=run.task,
            answers=tuple((episode, future.result()) for episode, future in futures if not errors[id(future)]),
            failures=tuple(str(error) for error in errors.values() if error),
        )

    def _make_loop(self, finished: asyncio.Queue[RunningGroup], tasks: asyncio.TaskGroup) -> RolloutLoop:
        def failed(run: RunningGroup, reason: DropReason) -> None:
            run.episodes.clear()
            run.fault = run.fault or str(reason)
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
