"""validate: a second flow over the same hub. Same agents and rewards, no training, nothing in the ledger.

Runs beside training; with `pause_generation_for_validation` training requests are interrupted at an action
boundary first and go on, with what they have, afterwards.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import takewhile

from headway.data.task_sources import TaskSource
from headway.flow.pipeline import Pipeline
from headway.monitor.events import ValidateBegin, ValidateEnd
from headway.rollout.concurrency import Signal, spawn_task
from headway.rollout.replica import RequestLane
from headway.rollout.sample_evaluation import SampleEvaluator, mean_outcomes


class ValidationFlow:
    """Validates one version at a time."""

    def __init__(self, line: Pipeline, tasks: TaskSource) -> None:
        self._line, self._tasks = line, tasks
        self._turn = asyncio.Lock()
        self.running = 0
        """Validations asked for and not done."""
        self.done = Signal()

    def start(self, trained: int) -> None:
        """Validate version `trained` as soon as it is served, beside training."""
        self.running += 1
        spawn_task(self._line.tasks, self._run(trained), f"validate/{trained}")

    async def first(self) -> None:
        """Validate the policy of the start, before anything else happens."""
        await self._validate(self._line.headway.trained)

    async def _run(self, trained: int) -> None:
        line = self._line
        try:
            async with self._turn:
                with line.waits.waiting("validate", f"version {trained} to be served", "param_update"):
                    await line.headway.changed.until(lambda: line.headway.served >= trained)
                try:
                    if line.settings.pause_generation_for_validation:
                        line.headway.paused = True
                        await line.hub.pause(RequestLane.TRAIN)
                    await self._validate(trained)
                finally:
                    if line.settings.pause_generation_for_validation:
                        line.hub.resume(RequestLane.TRAIN)
                        line.headway.paused = False
                        line.headway.changed.notify()
        finally:
            self.running -= 1
            self.done.notify()

    async def _validate(self, trained: int) -> None:
        line, wanted = self._line, self._line.settings.val_batch_size
        tasks = list(takewhile(lambda task: task is not None, map(self._tasks.task, range(wanted))))
        line.events.emit(ValidateBegin(who="validate", trained=trained))
        judged = await self._examiner().examine(task for task in tasks if task is not None)
        rewards = [score.value for one in judged for _, score in one.answers]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        failed = len(tasks) * line.settings.eval_answers - len(rewards)
        line.events.emit(
            ValidateEnd(
                who="validate",
                trained=trained,
                reward=mean,
                samples=len(rewards),
                failed=failed,
                **mean_outcomes([episode.info for one in judged for episode, _ in one.answers]),
            )
        )
        line.on_validated(trained, judged)

    def _examiner(self) -> SampleEvaluator:
        line = self._line
        return SampleEvaluator(
            hub=line.hub,
            environments=line.backends.environments,
            reward=line.backends.reward,
            settings=replace(
                line.settings,
                group_size=line.settings.eval_answers,
                redundant_members=0,
                env_scheduling="async",
                is_num_return_sequences_expand=True,
                sampling=line.settings.eval_sampling or line.settings.sampling,
            ),
            events=line.events,
            decode=line.backends.decode,
        )
