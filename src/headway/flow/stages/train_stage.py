"""The train stage: takes a batch inside the staleness bound, trains it, records what was trained."""

import asyncio
from collections.abc import Mapping, Sequence

from headway.errors import BackendError, TrainerCrashed
from headway.flow.checkpointing import save_checkpoint
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_controller import GroupSlot
from headway.monitor.events import GroupTrain, SpanBegin, SpanEnd, StepBegin, StepEnd
from headway.rollout.concurrency import OrderedTaskGroup
from headway.types import Batch, SampleGroup, Snapshot


@register_stage("train")
class TrainStage(Stage[SampleGroup, Snapshot]):
    """Consumes: sample groups. Produces: snapshots. Waits for: a full batch inside the bound. Ends when: the last
    step is done, or the source is exhausted."""

    consumes = SampleGroup
    produces = Snapshot

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._synced = pipeline.headway.trained
        """Newest version that went on to the engines, or that they were seeded with."""

    async def loop(self) -> None:
        async with OrderedTaskGroup() as tasks:
            intake = tasks.create_task(self._intake(), name="train/intake")
            while self.pipeline.headway.trained < self.pipeline.settings.max_steps:
                batch = await self._next_batch()
                if batch is None:
                    break
                self.settle(running=1)
                snapshot = await self._step(batch)
                self.settle(running=-1, emitting=1)
                if self.pipeline.settings.is_sync_due(snapshot.version):
                    await self._sync(snapshot)
                self.settle(emitting=-1)
                await self._after_step()
            intake.cancel()

    async def _sync(self, snapshot: Snapshot) -> None:
        """Send a version on to the engines."""
        assert self.outbound is not None
        self._synced = snapshot.version
        await self.outbound.send(snapshot)

    async def _intake(self) -> None:
        """Move groups from the channel into the buffer as they come, also during a training step."""
        assert self.inbound is not None
        while True:
            group = await self.inbound.receive()
            if self.pipeline.is_live(group.group_id):
                self.pipeline.group_ready(group)

    async def _next_batch(self) -> list[GroupSlot] | None:
        headway = self.pipeline.headway
        assert self.inbound is not None
        self.settle(listening=1)
        try:
            while (batch := headway.choose_batch()) is None:
                if headway.degraded and self._synced < headway.trained:
                    await self._sync(Snapshot(version=headway.trained))  # a synchronous run starts with these weights
                if self.pipeline.cannot_fill_batch():
                    return None
                with self.pipeline.waits.waiting(self.role, self._describe_batch, self.inbound.producer):
                    await headway.changed.wait()
            return batch
        finally:
            self._listening -= 1

    def _describe_batch(self) -> str:
        ready, wanted = self.pipeline.headway.ready_count, self.pipeline.settings.groups_per_step
        return f"a full batch inside the bound ({ready} of {wanted} groups)"

    async def _step(self, group_slots: Sequence[GroupSlot]) -> Snapshot:
        """Train one batch: judge its freshness, update the weights, record its samples."""
        pipeline, headway = self.pipeline, self.pipeline.headway
        reliability = pipeline.settings.reliability
        headway.begin_step(group_slots)
        filtered = pipeline.settings.filter_zero_variance or pipeline.settings.group_filters
        counts = pipeline.zero_variance.batch_taken(slot.number for slot in group_slots) if filtered else {}
        groups = tuple(slot.group for slot in group_slots if slot.group is not None)
        batch = Batch(trained=headway.trained, groups=groups)
        self._report(group_slots, batch)
        pipeline.versions_changed()
        async with pipeline.devices.hold(self.role, reliability.lock_timeout_s):
            pipeline.events.emit(SpanBegin(who=self.role, span=batch.trained, name=f"step {batch.trained + 1}"))
            try:
                metrics = await self._train(batch)
            finally:
                pipeline.events.emit(SpanEnd(who=self.role, span=batch.trained))
            # Nothing is awaited between the update and its record, so no cancellation can separate them.
            headway.end_step(group_slots)
            pipeline.recorder.train(groups, headway.trained)
            pipeline.versions_changed()
            self._report_end(batch, headway.trained, counts, metrics)
            pipeline.on_trained(batch, headway.trained)
        return Snapshot(version=headway.trained, metrics=metrics)

    async def _train(self, batch: Batch) -> dict[str, float]:
        """Run the trainer; retry errors that may pass. A trainer that hangs counts as crashed."""
        trainer, reliability = self.pipeline.backends.trainer, self.pipeline.settings.reliability

        async def once() -> dict[str, float]:
            try:
                async with asyncio.timeout(reliability.train_timeout_s):
                    return dict(await trainer.train(batch))
            except TimeoutError:
                limit = reliability.train_timeout_s
                raise TrainerCrashed(f"step {batch.trained + 1}: not done after {limit} s") from None

        step, samples = f"step {batch.trained + 1}", sum(len(group.samples) for group in batch.groups)
        while True:
            try:
                with self.pipeline.waits.waiting(self.role, f"{step}, {samples} samples", "trainer"):
                    return await self.attempt(step, once, retries=reliability.step_retries)
            except BackendError as error:
                if error.fatal:
                    raise
                self.degrade(error)

    def _report(self, group_slots: Sequence[GroupSlot], batch: Batch) -> None:
        emit = self.pipeline.events.emit
        emit(StepBegin(who=self.role, trained=batch.trained, groups=len(group_slots)))
        for slot, group in zip(group_slots, batch.groups, strict=True):
            in_queue = batch.trained - max(slot.finished_at, 0)
            versions = {"trained": batch.trained, "oldest": group.oldest, "in_queue": in_queue}
            versions["in_flight"] = batch.trained - group.oldest - in_queue
            sizes = {"samples": len(group.samples), "actions": group.actions}
            emit(GroupTrain(who=self.role, group=group.group_id, **versions, **sizes))

    def _report_end(self, batch: Batch, trained: int, counts: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        samples = [sample for group in batch.groups for sample in group.samples]
        rewards = [sample.score.value for sample in samples if sample.score is not None]
        reward = sum(rewards) / max(len(rewards), 1)
        sizes = {"groups": len(batch.groups), "samples": len(samples), "actions": batch.actions, **counts}
        named = {f"train/{name}": value for name, value in metrics.items()}
        named |= self.pipeline.recorder.population.end_step()
        self.pipeline.events.emit(StepEnd(who=self.role, trained=trained, reward=reward, **sizes, metrics=named))

    async def _checkpoint(self) -> None:
        """Save a checkpoint; retry errors that may pass, such as a full disk."""
        retries = self.pipeline.settings.reliability.step_retries
        self.settle(running=1)
        try:
            await self.attempt("checkpoint", lambda: save_checkpoint(self.pipeline), retries=retries)
        except BackendError as error:
            if error.fatal:
                raise
            self.degrade(error)
        finally:
            self.settle(running=-1)

    async def _after_step(self) -> None:
        """Save a checkpoint and start a validation where they are due."""
        pipeline, trained = self.pipeline, self.pipeline.headway.trained
        if pipeline.settings.save_steps and trained % pipeline.settings.save_steps == 0:
            await self._checkpoint()
        last = trained == pipeline.settings.max_steps
        if pipeline.settings.eval_steps and (last or trained % pipeline.settings.eval_steps == 0):
            await pipeline.start_validation()
