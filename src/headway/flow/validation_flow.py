"""Validation: a second flow over the same hub, with the same agents and rewards, but no training and no ledger.

It runs beside training. Guarantees: the score of version v contains only answers made wholly by v. The train stage
goes on once v is served; weight updates wait until all answers are there, and the requests run on no engine that serves
another version. Scoring delays nobody. If every engine with v is lost after training went on, the validation begins
anew with the version that is served then, and is labelled with that one.

`validation.mixed_versions` lets weights change meanwhile, and the score says that it is mixed. With
`pause_generation_for_validation`, training requests are interrupted at a token boundary first and continue afterwards
with the tokens they have.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import takewhile

from headway.data.task_sources import TaskSource
from headway.errors import BackendError
from headway.flow.pipeline import Pipeline
from headway.monitor.events import ErrorReport, ValidateBegin, ValidateEnd
from headway.rollout.concurrency import OrderedTaskGroup, Signal, spawn_task
from headway.rollout.replica import RequestLane
from headway.rollout.sample_evaluation import EvaluatedSample, SampleEvaluator, count_failures, mean_outcomes


class VersionLost(BackendError):
    """No engine has the version that is being validated any more, and none can get it."""


class ValidationFlow:
    """Validates one version at a time."""

    def __init__(self, pipeline: Pipeline, tasks: TaskSource) -> None:
        self._pipeline, self._tasks = pipeline, tasks
        self._mixed = pipeline.settings.mixed_version_validation
        self._turn = asyncio.Lock()
        self.running = 0
        """Number of validations that were requested and are not done."""
        self.done = Signal()

    async def start(self, trained: int) -> None:
        """Validate version `trained` beside training. Return once training can go on without replacing it."""
        self.running += 1
        begun = asyncio.Event()
        spawn_task(self._pipeline.tasks, self._run(trained, begun), f"validate/{trained}")
        with self._pipeline.waits.waiting("train", f"the validation of version {trained} to begin", "validate"):
            await begun.wait()

    async def validate_start(self) -> None:
        """Validate the initial policy before training starts."""
        await self._validate(self._pipeline.headway.trained, asyncio.Event())

    async def _run(self, trained: int, begun: asyncio.Event) -> None:
        pipeline = self._pipeline
        if self._mixed:
            begun.set()
        try:
            async with self._turn:
                with pipeline.waits.waiting("validate", f"version {trained} to be served", "param_update"):
                    await pipeline.headway.changed.until(lambda: pipeline.headway.served >= trained)
                await self._validate(trained, begun)
        except asyncio.CancelledError:
            message = f"the run stopped before version {trained} had a held-out score; it is not made up for"
            pipeline.events.emit(ErrorReport(who="validate", error="Cancelled", message=message))
            raise
        finally:
            self.running -= 1
            self.done.notify()

    async def _validate(self, trained: int, begun: asyncio.Event) -> None:
        """Validate `trained`, or a later version if that is lost. Give up when that happens too often."""
        pipeline, wanted = self._pipeline, self._pipeline.settings.val_batch_size
        tasks = [task for task in takewhile(bool, map(self._tasks.task, range(wanted))) if task is not None]
        for _ in range(pipeline.settings.reliability.sample_retries + 1):
            samples = None
            try:
                async with AsyncExitStack() as held:
                    version = await self._hold_version(trained, held)
                    begun.set()
                    pipeline.events.emit(ValidateBegin(who="validate", trained=version))
                    samples = await self._make_evaluator().evaluate(tasks, on_answered=held.aclose)
            except* VersionLost as group:
                reason = str(group.exceptions[0])
                pipeline.events.emit(ErrorReport(who="validate", error=VersionLost.__name__, message=reason))
            if samples is not None:
                self._report(version, samples if self._mixed else keep_one_version(samples, version))
                return
        missing = ("validation was given up",) * pipeline.settings.eval_answers
        self._report(version, [EvaluatedSample(task=task, answers=(), failures=missing) for task in tasks])

    async def _hold_version(self, trained: int, held: AsyncExitStack) -> int:
        """Keep a version in the engines until `held` is closed, and return it."""
        pipeline, hub, headway = self._pipeline, self._pipeline.hub, self._pipeline.headway
        if not self._mixed:
            with pipeline.waits.waiting("validate", "an update of the weights to end", "param_update"):
                await held.enter_async_context(pipeline.updater.turn)
            with pipeline.waits.waiting("validate", "an engine that serves", "hub"):
                await headway.changed.until(lambda: hub.served >= 0)
            trained = hub.served
            hub.pin_validation(trained)
            held.callback(hub.pin_validation, None)
        if pipeline.settings.pause_generation_for_validation:
            held.callback(self._resume_training_lane)
            headway.paused = True
            await hub.pause(RequestLane.TRAIN)
        if not self._mixed:
            watch = (await held.enter_async_context(OrderedTaskGroup())).create_task(self._watch(trained))
            held.callback(watch.cancel)
        return trained

    async def _watch(self, version: int) -> None:
        """Raise `VersionLost` as soon as no engine has `version` and the trainer cannot provide it either."""
        pipeline, headway = self._pipeline, self._pipeline.headway
        await headway.changed.until(lambda: headway.trained != version and not pipeline.hub.holds(version))
        raise VersionLost(f"validation begins anew: every engine with version {version} was lost")

    def _resume_training_lane(self) -> None:
        self._pipeline.hub.resume(RequestLane.TRAIN)
        self._pipeline.headway.paused = False
        self._pipeline.headway.changed.notify()

    def _report(self, version: int, samples: Sequence[EvaluatedSample]) -> None:
        rewards = [score.value for sample in samples for _, score in sample.answers]
        failures = count_failures(samples)
        ended = ValidateEnd(
            who="validate",
            trained=version,
            reward=sum(rewards) / len(rewards) if rewards else None,
            samples=len(rewards),
            failed=failures.total(),
            fault=failures.most_common(1)[0][0] if failures else None,
            mixed=self._mixed or None,
            **mean_outcomes([episode.info for sample in samples for episode, _ in sample.answers]),
        )
        self._pipeline.events.emit(ended)
        self._pipeline.on_validated(version, samples)

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
                has_greedy_member=False,
                env_scheduling="async",
                is_num_return_sequences_expand=True,
                sampling=pipeline.settings.eval_sampling or pipeline.settings.sampling,
            ),
            events=pipeline.events,
            decode=pipeline.backends.decode,
            waits=pipeline.waits,
        )


def keep_one_version(samples: Sequence[EvaluatedSample], version: int) -> list[EvaluatedSample]:
    """Return the samples without answers of which another version made a part; those count as failed."""
    kept = []
    for sample in samples:
        own = tuple(pair for pair in sample.answers if all(run.version == version for run in pair[0].runs))
        foreign = len(sample.answers) - len(own)
        failures = (*sample.failures, *["made by another version"] * foreign)
        kept.append(replace(sample, answers=own, failures=failures) if foreign else sample)
    return kept
