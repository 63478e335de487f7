"""Validation: a second flow over the same hub, with the same agents and rewards, but no training and no ledger.

It runs beside training. With `pause_generation_for_validation`, training requests are interrupted at a token boundary
first and continue afterwards with the tokens they have.
"""

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

    def __init__(self, pipeline: Pipeline, tasks: TaskSource) -> None:
        self._pipeline, self._tasks = pipeline, tasks
        self._turn = asyncio.Lock()
        self.running = 0
        """Number of validations that were requested and are not done."""
        self.done = Signal()

    def start(self, trained: int) -> None:
        """Validate version `trained` as soon as it is served, beside training."""
        self.running += 1
        spawn_task(self._pipeline.tasks, self._run(trained), f"validate/{trained}")

    async def validate_start(self) -> None:
        """Validate the initial policy before training starts."""
        await self._validate(self._pipeline.headway.trained)

    async def _run(self, trained: int) -> None:
        pipeline = self._pipeline
        try:
            async with self._turn:
                with pipeline.waits.waiting("validate", f"version {trained} to be served", "param_update"):
                    await pipeline.headway.changed.until(lambda: pipeline.headway.served >= trained)
                try:
                    if pipeline.settings.pause_generation_for_validation:
                        pipeline.headway.paused = True
                        await pipeline.hub.pause(RequestLane.TRAIN)
                    await self._validate(trained)
                finally:
                    if pipeline.settings.pause_generation_for_validation:
                        pipeline.hub.resume(RequestLane.TRAIN)
                        pipeline.headway.paused = False
                        pipeline.headway.changed.notify()
        finally:
            self.running -= 1
            self.done.notify()

    async def _validate(self, trained: int) -> None:
        pipeline, wanted = self._pipeline, self._pipeline.settings.val_batch_size
        tasks = list(takewhile(lambda task: task is not None, map(self._tasks.task, range(wanted))))
        pipeline.events.emit(ValidateBegin(who="validate", trained=trained))
        samples = await self._make_evaluator().evaluate(task for task in tasks if task is not None)
        rewards = [score.value for sample in samples for _, score in sample.answers]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        failed = len(tasks) * pipeline.settings.eval_answers - len(rewards)
        outcomes = mean_outcomes([episode.info for sample in samples for episode, _ in sample.answers])
        count = len(rewards)
        ended = ValidateEnd(who="validate", trained=trained, reward=mean, samples=count, failed=failed, **outcomes)
        pipeline.events.emit(ended)
        pipeline.on_validated(trained, samples)

    def _make_evaluator(self) -> SampleEvaluator:
        pipeline = self._pipeline
        return SampleEvaluator(
            hub=pipeline.hub,
            environments=pipeline.backends.environments,
            reward=pipeline.backends.reward,
            settings=replace(
                pipeline.settings,
                group_size=pipeline.settings.eval_answers,
                redundant_members=0,
                env_scheduling="async",
                is_num_return_sequences_expand=True,
                sampling=pipeline.settings.eval_sampling or pipeline.settings.sampling,
            ),
            events=pipeline.events,
            decode=pipeline.backends.decode,
        )
