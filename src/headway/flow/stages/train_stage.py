"""train: takes a batch inside the bound, makes one update of it, writes down what was trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headway.errors import BackendError, TrainerCrashed
from headway.flow.checkpointing import save_checkpoint
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_controller import GroupSlot
from headway.monitor.events import GroupTrain, StepBegin, StepEnd
from headway.rollout.concurrency import OrderedTaskGroup
from headway.types import Batch, SampleGroup, Snapshot


@register_stage("train")
class TrainStage(Stage[SampleGroup, Snapshot]):
    """Consumes: sample groups. Produces: snapshots. Waits for: a full batch inside the bound. Ends when: the last
    step is done, or the source is exhausted."""

    consumes = SampleGroup
    produces = Snapshot

    async def loop(self) -> None:
        async with OrderedTaskGroup() as tasks:
            intake = tasks.create_task(self._intake(), name="train/intake")
            while self.line.headway.trained < self.line.settings.max_steps:
                batch = await self._next_batch()
                if batch is None:
                    break
                self.settle(running=1)
                snapshot = await self._step(batch)
                self.settle(running=-1, emitting=1)
                assert self.outbound is not None
                await self.outbound.send(snapshot)
                self.settle(emitting=-1)
                await self._after_step()
            intake.cancel()

    async def _intake(self) -> None:
        """Moves groups from the channel into the buffer as they come, whatever training does."""
        assert self.inbound is not None
        while True:
            group = await self.inbound.receive()
            if self.line.is_live(group.group_id):
                self.line.group_ready(group)

    async def _next_batch(self) -> list[GroupSlot] | None:
        headway = self.line.headway
        self.settle(listening=1)
        try:
            while (batch := headway.choose()) is None:
                if self.line.stuck_for_good():
                    return None
                with self.line.waits.waiting(self.role, "a full batch inside the bound", "reward"):
                    await headway.changed.wait()
            return batch
        finally:
            self._listening -= 1

    async def _step(self, tickets: Sequence[GroupSlot]) -> Snapshot:
        """One update: the moment of consumption, the work, the record."""
        line, headway = self.line, self.line.headway
        reliability = line.settings.reliability
        headway.begin_step(tickets)
        spread = line.spread.take(ticket.number for ticket in tickets) if line.settings.filter_zero_variance else {}
        groups = tuple(ticket.group for ticket in tickets if ticket.group is not None)
        batch = Batch(trained=headway.trained, groups=groups)
        self._report(tickets, batch)
        line.versions_changed()
        async with line.devices.hold(self.role, reliability.lock_timeout_s):
            metrics = await self._train(batch)
            headway.end_step(tickets)  # at once: between the update and its record there is no point to be stopped at
            line.books.train(groups, headway.trained)
            line.versions_changed()
            self._report_end(batch, headway.trained, spread, metrics)
            line.on_trained(batch, headway.trained)
        return Snapshot(version=headway.trained, metrics=metrics)

    async def _train(self, batch: Batch) -> dict[str, float]:
        """The trainer's own work, tried again where that makes sense; a trainer that hangs is lost."""
        trainer, reliability = self.line.backends.trainer, self.line.settings.reliability

        async def once() -> dict[str, float]:
            try:
                async with asyncio.timeout(reliability.train_timeout_s):
                    return dict(await trainer.train(batch))
            except TimeoutError:
                limit = reliability.train_timeout_s
                raise TrainerCrashed(f"step {batch.trained + 1}: not done after {limit} s") from None

        while True:
            try:
                return await self.attempt(f"step {batch.trained + 1}", once, retries=reliability.step_retries)
            except BackendError as error:
                if error.fatal:
                    raise
                self.line.recovery.exhausted(self.role, error)

    def _report(self, tickets: Sequence[GroupSlot], batch: Batch) -> None:
        events = self.line.events
        events.emit(StepBegin(who=self.role, trained=batch.trained, groups=len(tickets)))
        for ticket, group in zip(tickets, batch.groups, strict=True):
            in_queue = batch.trained - max(ticket.finished_at, 0)
            events.emit(
                GroupTrain(
                    who=self.role,
                    group=group.group_id,
                    trained=batch.trained,
                    oldest=group.oldest,
                    in_flight=batch.trained - group.oldest - in_queue,
                    in_queue=in_queue,
                    samples=len(group.samples),
                    actions=group.actions,
                )
            )

    def _report_end(self, batch: Batch, trained: int, spread: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        samples = [sample for group in batch.groups for sample in group.samples]
        rewards = [sample.score.value for sample in samples if sample.score is not None]
        self.line.events.emit(
            StepEnd(
                who=self.role,
                trained=trained,
                groups=len(batch.groups),
                samples=len(samples),
                actions=batch.actions,
                reward=sum(rewards) / max(len(rewards), 1),
                **spread,
                metrics={f"train/{name}": value for name, value in metrics.items()},
            )
        )

    async def _checkpoint(self) -> None:
        """Tried again where that makes sense: a full disk may be emptied, a dead trainer is not."""
        retries = self.line.settings.reliability.step_retries
        self.settle(running=1)
        try:
            await self.attempt("checkpoint", lambda: save_checkpoint(self.line), retries=retries)
        except BackendError as error:
            if error.fatal:
                raise
            self.line.recovery.exhausted(self.role, error)
        finally:
            self.settle(running=-1)

    async def _after_step(self) -> None:
        """Between two steps: checkpoints and validation."""
        line, trained = self.line, self.line.headway.trained
        if line.settings.save_steps and trained % line.settings.save_steps == 0:
            await self._checkpoint()
        last = trained == line.settings.max_steps
        if line.settings.eval_steps and (last or trained % line.settings.eval_steps == 0):
            line.on_validate(trained)
