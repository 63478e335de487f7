"""The reward stage: waits for outstanding scores, drops groups that teach nothing, computes advantages.

With `with_reward: false` scoring starts here, and only when the whole batch was drawn.
"""

import asyncio
from dataclasses import replace

from headway.errors import RewardError
from headway.flow.batch_gate import BatchGate
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.monitor.events import GroupReady
from headway.rewards.base import has_zero_variance
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.rollout_loop import SCORES
from headway.types import DropReason, SampleGroup, Score


@register_stage("reward")
class RewardStage(Stage[SampleGroup, SampleGroup]):
    """Consumes and produces: sample groups. Waits for: scores; without `with_reward` for a whole batch first. Ends
    when: the stage before it ends."""

    consumes = produces = SampleGroup

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.width = pipeline.capacity
        self._gate = None if pipeline.settings.with_reward else BatchGate(pipeline)

    async def loop(self) -> None:
        async with OrderedTaskGroup() as tasks:
            watch = None if self._gate is None else tasks.create_task(self._gate.watch(), name="reward/batches")
            await super().loop()
            if watch is not None:
                watch.cancel()

    async def process(self, item: SampleGroup) -> SampleGroup | None:
        if self._gate is not None:
            await self._wait_for_batch(self._gate, item.group_id)
        scores = await self._scores(item)
        if scores is None:
            return None
        rewards = [score.value for score in scores]
        equal = self.pipeline.settings.filter_zero_variance and len(rewards) > 1 and has_zero_variance(rewards)
        rejected = any(one.rejects(item.task, rewards) for one in self.pipeline.settings.group_filters)
        replaced = equal or rejected
        if replaced and not self.pipeline.zero_variance.keep(item.group_id, self.pipeline.headway.ready_count):
            reason = DropReason.ZERO_VARIANCE if equal else DropReason.FILTERED
            self.pipeline.drop(item.group_id, reason, who=self.role)
            return None
        advantages = self.pipeline.backends.estimator(rewards)
        rows = zip(item.samples, scores, advantages, strict=True)
        samples = tuple(replace(sample, score=score, advantage=advantage) for sample, score, advantage in rows)
        self.pipeline.loop.close(item.group_id)
        graded = replace(item, samples=samples)
        self.pipeline.recorder.grade(graded)
        reward = sum(rewards) / len(rewards)
        self.pipeline.events.emit(GroupReady(who=self.role, group=item.group_id, reward=reward, equal=equal or None))
        return graded

    async def _wait_for_batch(self, gate: BatchGate, group_id: int) -> None:
        self.settle(running=-1, listening=1)
        try:
            with self.pipeline.waits.waiting(self.role, "the whole batch to be drawn", "generate"):
                await gate.wait(group_id)
        finally:
            self.settle(running=1, listening=-1)

    async def _scores(self, group: SampleGroup) -> list[Score] | None:
        """Return a score for every member; `None` if the group was dropped or a member is generated again."""
        run = self.pipeline.loop.runs.get(group.group_id)
        if run is None or not self.pipeline.is_live(group.group_id):
            return None
        futures = [self.pipeline.loop.score(run, sample.episode) for sample in group.samples]
        waiting = [future for future in futures if not future.done()]
        if waiting:
            what = f"{len(waiting)} scores of group {group.group_id}"
            with self.pipeline.waits.waiting(self.role, what, SCORES):
                await asyncio.wait(waiting)
        if not self.pipeline.is_live(group.group_id):
            return None
        for sample, future in zip(group.samples, futures, strict=True):
            if future.cancelled() or isinstance(future.exception(), RewardError):
                self.pipeline.replace_member(group.group_id, sample.sample_id, DropReason.REWARD_FAILED)
                return None
        return [future.result() for future in futures]
