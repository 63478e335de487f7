"""logp, ref_logp and critic: a forward pass of a model over a group. Groups overlap as far as devices allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.errors import BackendError, ScoringError
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.trainers.base import Scorer
from headway.types import DropReason, Sample, SampleGroup, VersionedScores


class ScoringStage(Stage[SampleGroup, SampleGroup]):
    """Consumes and produces: sample groups. Waits for: its devices. Ends when: the stage before it ends."""

    consumes = produces = SampleGroup

    def __init__(self, line: Pipeline) -> None:
        super().__init__(line)
        self.scorer: Scorer | None = getattr(line.backends, self.role)
        self.width = line.capacity if self.scorer is not None else 1

    async def loop(self) -> None:
        if self.scorer is not None:
            await super().loop()
            return
        assert self.outbound is not None
        while (item := await self.next_item()) is not None:  # nothing to do here but to pass groups on
            await self.outbound.send(item)

    async def process(self, item: SampleGroup) -> SampleGroup | None:
        assert self.scorer is not None
        scorer, reliability = self.scorer, self.line.settings.reliability
        if not self.line.is_live(item.group_id):
            return None
        async with self.line.devices.hold(self.role, reliability.lock_timeout_s):
            if not self.line.is_live(item.group_id):
                return None
            try:
                rows = await self.attempt(
                    f"{self.role} of group {item.group_id}",
                    lambda: scorer.score(item),
                    retries=reliability.step_retries,
                    timeout_s=reliability.train_timeout_s,
                )
                check_rows(rows, item)
            except BackendError as error:
                self.line.drop(item.group_id, DropReason.SCORING_FAILED, who=self.role)
                self.line.recovery.exhausted(self.role, error)
                return None
        version = rows.version if isinstance(rows, VersionedScores) else None
        samples = tuple(self.filled(sample, row, version) for sample, row in zip(item.samples, rows, strict=True))
        return replace(item, samples=samples)

    def filled(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        """The sample with this stage's field. `version` made it; None: it is of no version in particular."""
        raise NotImplementedError


def check_rows(rows: Sequence[Sequence[float]], group: SampleGroup) -> None:
    """One number for each action of each sample."""
    got = [len(row) for row in rows]
    wanted = [sample.actions for sample in group.samples]
    if got != wanted:
        raise ScoringError(f"group {group.group_id}: {got} numbers for {wanted} actions")


@register_stage("logp")
class LogpStage(ScoringStage):
    """Log-probabilities under the policy of now: the proximal one for a step that begins before the next version."""

    def filled(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, logps=row, logps_version=version)


@register_stage("ref_logp")
class RefLogpStage(ScoringStage):
    """Log-probabilities under the reference model."""

    def filled(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, ref_logps=row)


@register_stage("critic")
class CriticStage(ScoringStage):
    """Values, for estimators that need them. V_old is what the critic expects when a group passes here, as PPO keeps
    the values of the rollout: a step that begins later reads them as they are, up to α versions old."""

    def filled(self, sample: Sample, row: Sequence[float], version: int | None) -> Sample:
        return replace(sample, values=row)
