"""Everything a flow trainer's thread does: the policy, its reference, updates and scores.

One update reads top down: samples → trained steps (`batch`) → advantages of the whole batch → gradients, micro-batch by
micro-batch → the step. Two ways of learning are two objects behind `DenoisingObjective`: log-probabilities of the steps that were
taken, with any policy loss there is, and DiffusionNFT, which noises the pictures again.

Guarantees: `learn` is all or nothing, as in `trainers.local.steps`. Denominators are those of the whole mini-batch.
Where memory runs out, the same step is computed in smaller micro-batches, which changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from headway.algorithms import Advantages
from headway.algorithms.kl import KlController
from headway.denoising.denoising_batch import (
    DenoisingBatch,
    SampleSteps,
    collect_sample_steps,
    make_denoising_batch,
)
from headway.denoising.denoising_objectives import (
    DenoisingObjective,
    DenoisingTrainerSettings,
    DenoisingUpdateReport,
    DiffusionNftObjective,
    PolicyGradientObjective,
    compute_step_logps,
)
from headway.denoising.denoising_policy import DenoisingPolicy
from headway.errors import ScoringError, TrainerError
from headway.trainers.local import LocalTrainer
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.local_trainer import PublishingStore
from headway.trainers.local.optimizer_steps import (
    StepLearner,
    apply_optimizer_steps,
    iterate_mini_batches,
    retry_on_oom,
)
from headway.trainers.local.policy_update import compute_advantages
from headway.trainers.local.training_thread import CommitGate, JobAbandoned
from headway.types import Batch, SampleGroup

T = TypeVar("T")
Score = Literal["policy", "reference", "value"]


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingTrainableState:
    """What an update moves, as a checkpoint asks for it."""

    optimizer: Optimizer
    critic_optimizer: None = None


class DenoisingLearner(StepLearner):
    """The policy, and what it was at the start where that is asked for."""

    def __init__(self, model: Any, training: DenoisingTrainerSettings, *, kl: KlController | None = None) -> None:
        super().__init__()
        self.training, self.settings = training, training.local
        self.kl = kl or KlController(0.0)
        wants = training.kl_coef is not None or (training.nft is not None and training.nft.kl_coef > 0)
        frozen = deepcopy(model) if wants and training.local.lora is None else None
        self.policy = DenoisingPolicy(model, training.local, training.flow)
        self.reference: dict[str, Tensor] | None = None
        if frozen is not None:
            like = next(self.policy.model.parameters())
            self.reference = {name: one.detach().to(like) for name, one in frozen.named_parameters()}
        self.lesson: DenoisingObjective = (
            PolicyGradientObjective(self.policy, training, self.reference)
            if training.nft is None
            else DiffusionNftObjective(self.policy, training, training.nft, self.reference)
        )
        self.trained = DenoisingTrainableState(self.lesson.optimizer)

    @property
    def device(self) -> str:
        return self.settings.device

    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        steps = make_denoising_batch(
            batch.groups,
            trained=batch.trained,
            shape=self.policy.shape,
            ends_only=self.lesson.ends_only,
            device=self.device,
        )
        if not steps.rows:
            raise TrainerError(f"step {batch.trained + 1}: a batch without a single trained step")
        whole = self._fitting(lambda: self.lesson.completed(steps, gate))
        made = compute_advantages(whole, self.settings.advantages, self.kl.coef)
        report = self._fitting(lambda: self._update(whole, made, gate))
        self.kl.update(made.kl, len(steps.rows))
        self.version += 1
        return {**report.metrics(steps), "micro_batch_samples": float(self.lesson.at_once)}

    def _fitting(self, work: Callable[[], T]) -> T:
        """What `work` gives; where memory runs out, with smaller micro-batches, from then on."""
        return retry_on_oom(work, self._shrink, self.device)

    def _shrink(self, failure: str) -> None:
        if self.lesson.at_once == 1:
            raise TrainerError(f"a single sample does not fit into memory: {failure}")
        self.lesson.at_once //= 2

    def _update(self, batch: DenoisingBatch, made: Advantages, gate: CommitGate) -> DenoisingUpdateReport:
        """All optimizer steps of one batch, or none."""
        report = DenoisingUpdateReport()
        minis = list(iterate_mini_batches(batch.rows, self.settings))

        def gradients(rows: Sequence[SampleSteps]) -> None:
            self.lesson.gradients(batch, made, rows, self.version, report, gate)

        apply_optimizer_steps([self.lesson.optimizer], minis, gradients, report, self.version, gate)
        return report

    def score(self, kind: Score, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        """A log-probability for each step of each sample; 0 for those that are not trained."""
        try:
            batch = make_denoising_batch(
                [group], trained=0, shape=self.policy.shape, ends_only=False, device=self.device
            )
            numbers = iter(compute_step_logps(self.policy, batch, batch.rows, self.lesson.at_once, gate).tolist())
        except JobAbandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error
        trained = {row.sample.sample_id: set(row.places) for row in collect_sample_steps([group])}
        return [
            [
                next(numbers) if place in trained.get(sample.sample_id, ()) else 0.0
                for place in range(len(sample.episode.turns[0].generation.actions))
            ]
            for sample in group.samples
        ]


class DenoisingTrainer(LocalTrainer):
    """Trains what `make_model` gives: a `Denoiser`, the same at every call. The store stays the caller's to close."""

    def __init__(
        self,
        make_model: Callable[[], Any],
        training: DenoisingTrainerSettings,
        store: PublishingStore,
        *,
        make_kl: Callable[[], KlController] | None = None,
    ) -> None:
        self._training = training
        super().__init__(make_model, training.local, store, make_kl=make_kl)

    def _made(self) -> DenoisingLearner:  # type: ignore[override]
        return DenoisingLearner(self._make_model(), self._training, kl=self._make_kl() if self._make_kl else None)
