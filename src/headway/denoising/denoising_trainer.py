"""A trainer of denoising models, and the learner that its thread runs: policy, reference, updates and scores.

One update goes from samples to trained steps (`denoising_batch`), to advantages of the whole batch, to gradients,
micro-batch by micro-batch, and to the optimizer step. Two objectives exist behind `DenoisingObjective`: policy losses
on log-probabilities of the steps taken, and DiffusionNFT, which noises the pictures again.

Guarantees: `learn` changes everything or nothing, as in `trainers.local.optimizer_steps`. Denominators are those of the
whole mini-batch. If memory runs out, the same step is computed in smaller micro-batches, which changes no gradient.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from headway.algorithms.advantages import Advantages
from headway.algorithms.kl import KlController
from headway.denoising.denoising_batch import DenoisingBatch, SampleSteps, make_denoising_batch
from headway.denoising.denoising_objectives import (
    DenoisingObjective,
    DenoisingUpdate,
    DenoisingUpdateReport,
    DiffusionNftObjective,
    PolicyGradientObjective,
    compute_step_logps,
)
from headway.denoising.denoising_ranks import SINGLE_DENOISING_RANK, DenoisingRanks
from headway.denoising.settings import DenoisingTrainerSettings
from headway.errors import TrainerError
from headway.trainers.base import ScoreKind
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.local_trainer import ThreadedTrainer
from headway.trainers.local.optimizer_steps import (
    StepLearner,
    apply_optimizer_steps,
    iterate_mini_batches,
    retry_on_oom,
)
from headway.trainers.local.policy_update import compute_advantages
from headway.trainers.local.training_thread import CommitGate
from headway.types import Batch, SampleGroup
from headway.weights.base import PublishingStore

T = TypeVar("T")


class DenoisingLearner(StepLearner):
    """The policy, and a frozen copy of the initial policy if the settings need one."""

    def __init__(
        self,
        model: Any,
        settings: DenoisingTrainerSettings,
        *,
        kl: KlController | None = None,
        ranks: DenoisingRanks = SINGLE_DENOISING_RANK,
    ) -> None:
        super().__init__(settings.local, kl)
        needs_reference = settings.kl_coef is not None or (settings.nft is not None and settings.nft.kl_coef > 0)
        has_copy = needs_reference and settings.local.lora is None
        self.ranks = ranks
        self.policy = ranks.make_policy(model, settings, has_copy + (settings.nft is not None))
        self.reference = self.policy.freeze() if has_copy else None
        objective = PolicyGradientObjective if settings.nft is None else DiffusionNftObjective
        self.objective: DenoisingObjective = objective(self.policy, settings, self.reference, ranks)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.objective.optimizer]

    @property
    def has_half_weights(self) -> bool:
        return False  # weights stay in float32, and products are rounded by autocast

    def weights(self) -> dict[str, Tensor]:
        return self.policy.weights()

    def save_model_config(self, directory: Path) -> None:
        self.policy.model.save_config(directory)

    @property
    def device(self) -> str:
        return self.settings.device

    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        steps = make_denoising_batch(
            batch.groups,
            trained=batch.trained,
            shape=self.policy.shape,
            ends_only=self.objective.ends_only,
            device=self.device,
        )
        if not steps.rows:
            raise TrainerError(f"step {batch.trained + 1}: a batch without a single trained step")
        steps = self._retry_on_oom(lambda: self.objective.add_proximal_logps(steps, gate))
        advantages = compute_advantages(steps, self.settings.advantages, self.kl.coef)
        report = self._retry_on_oom(lambda: self._update(steps, advantages, gate))
        self.kl.update(advantages.kl, len(steps.rows))
        self.version += 1
        return {**report.metrics(steps), "micro_batch_samples": float(self.objective.micro_batch_samples)}

    def _retry_on_oom(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; if memory runs out, repeat it with micro-batches of half the size."""
        return retry_on_oom(work, self._halve_micro_batches, self.device)

    def _halve_micro_batches(self, failure: str) -> None:
        self.ranks.on_out_of_memory(failure)
        if self.objective.micro_batch_samples == 1:
            raise TrainerError(f"a single sample does not fit into memory: {failure}")
        self.objective.micro_batch_samples //= 2

    def _update(self, batch: DenoisingBatch, advantages: Advantages, gate: CommitGate) -> DenoisingUpdateReport:
        """Apply all optimizer steps of one batch, or none."""
        update = DenoisingUpdate(batch=batch, advantages=advantages, version=self.version, gate=gate)
        mini_batches = list(iterate_mini_batches(batch.rows, self.settings))

        def add_gradients(rows: Sequence[SampleSteps]) -> None:
            self.objective.add_gradients(rows, update)

        apply_optimizer_steps(
            [self.objective.optimizer], mini_batches, add_gradients, update.report, self.version, gate
        )
        update.report.all_reduce(self.ranks)
        return update.report

    def _compute_logps(self, batch: DenoisingBatch, gate: CommitGate) -> Tensor:
        return compute_step_logps(self.policy, batch, self.objective.micro_batch_samples, gate, self.ranks)

    def _score(self, kind: ScoreKind, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        """Return a log-probability for each step of each sample; 0 for steps that are not trained."""
        batch = make_denoising_batch([group], trained=0, shape=self.policy.shape, ends_only=False, device=self.device)
        logps = iter(self._compute_logps(batch, gate).tolist())
        trained = {row.sample.sample_id: set(row.trained) for row in batch.rows}
        return [
            [
                next(logps) if number in trained.get(sample.sample_id, ()) else 0.0
                for number in range(len(sample.episode.turns[0].generation.actions))
            ]
            for sample in group.samples
        ]


class DenoisingTrainer(ThreadedTrainer[DenoisingLearner]):
    """Trains the `Denoiser` that `make_model` returns, the same at every call. The caller closes the store."""

    def __init__(
        self,
        make_model: Callable[[], Any],
        settings: DenoisingTrainerSettings,
        store: PublishingStore,
        *,
        make_kl: Callable[[], KlController] | None = None,
        ranks: DenoisingRanks = SINGLE_DENOISING_RANK,
    ) -> None:
        self._make_model, self._make_kl, self._denoising, self._ranks = make_model, make_kl, settings, ranks
        super().__init__(settings.local, store)

    def _make_learner(self) -> DenoisingLearner:
        kl = self._make_kl() if self._make_kl else None
        return DenoisingLearner(self._make_model(), self._denoising, kl=kl, ranks=self._ranks)
