"""The stages logp, ref_logp and critic: a forward pass of a model over a group. Groups overlap as devices allow."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headway.errors import BackendError, ScoringError, TrainerCrashed
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.monitor.events import SpanBegin, SpanEnd
from headway.trainers.base import Scorer, TrainerScorer
from headway.types import DropReason, Sample, SampleGroup, VersionedScores


class ScoringStage(Stage[SampleGroup, SampleGroup]):
    """Consumes and produces: sample groups. Waits for: its devices. Ends when: the stage before it ends."""

    consumes = produces = SampleGroup

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.scorer: Scorer | None = getattr(pipeline.backends, self.role)
        self.width = pipeline.capacity if self.scorer is not None else 1

    async def loop(self) -> None:
        if self.scorer is not None:
            await super().loop()
            return
        assert self.outbound is not None
        while (item := await self.next_item()) is not None:  # there is no model to score with: pass groups on
            await self.outbound.send(item)

    async def process(self, item: SampleGroup) -> SampleGroup | None:
        assert self.scorer is not None
        scorer, reliability = self.scorer, self.pipeline.settings.reliability
        if not self.pipeline.is_live(item.group_id):
            return None
        async with self.pipeline.devices.hold(self.role, reliability.lock_timeout_s):
            if not self.pipeline.is_live(item.group_id):
                return None
            emit, span = self.pipeline.events.emit, item.group_id
            emit(SpanBegin(who=self.role, span=span, name=f"group {span}"))
            try:
                what, limit = f"{self.role} of group {item.group_id}", reliability.train_timeout_s
                call = partial(scorer.score, item)
                scored_by = "trainer" if isinstance(scorer, TrainerScorer) else f"scorer of {self.role}"
                with self.pipeline.waits.waiting(self.role, what, scored_by):
                    rows = await self.attempt(what, call, retries=reliability.step_retries, timeout_s=limit)
                check_rows(rows, item)
            except TrainerCrashed:
                raise  # the flow brings the trainer back, and continues with what the ledger has
            except BackendError as error:
                self.pipeline.drop(item.group_id, DropReason.SCORING_FAILED, who=self.role)
                self.degrade(error)
                return None
            finally:
                emit(SpanEnd(who=self.role, span=span))
        version = rows.version if isinstance(rows, VersionedScores) else None
        samples = tuple(self.fill(sample, row, version) for sample, row in zip(item.samples, rows, strict=True))
        return replace(item, samples=samples)

    def fill(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        """Return the sample with this stage's field filled. `version` is that of the scoring weights, if any."""
        raise NotImplementedError


def check_rows(rows: Sequence[Sequence[float]], group: SampleGroup) -> None:
    """Raise `ScoringError` unless there is one number for each action of each sample."""
    got = [len(row) for row in rows]
    wanted = [sample.actions for sample in group.samples]
    if got != wanted:
        raise ScoringError(f"group {group.group_id}: {got} numbers for {wanted} actions")


@register_stage("logp")
class LogpStage(ScoringStage):
    """Fills in log-probabilities under the current weights: the proximal policy of a step that starts with them."""

    def fill(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, logps=row, logps_version=version)


@register_stage("ref_logp")
class RefLogpStage(ScoringStage):
    """Fills in log-probabilities under the reference model."""

    def fill(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, ref_logps=row)


@register_stage("critic")
class CriticStage(ScoringStage):
    """Fills in the critic's values, for estimators that need them. They are V_old of the value loss, as PPO keeps the
    values of the rollout: a later step reads them as they are, up to α versions old."""

    def fill(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, values=row)
