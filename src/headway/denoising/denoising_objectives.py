"""Two ways to learn from denoised samples, behind one protocol.

`PolicyGradientObjective` computes the distribution of every trained step under the current weights, its
log-probability, and any policy loss against the behaviour log-probability that the engine gave; the KL to the initial
policy has a closed form. `DiffusionNftObjective` noises the pictures again and pulls velocities towards those of good
pictures. It uses no log-probabilities, so neither the sampler nor the version that made a picture matters.

Legend: N trained steps, C channels, H and W of a latent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, BatchTotals, make_action_weights, sum_weighted
from headway.algorithms.advantages import Advantages
from headway.algorithms.denoising import LatentTransition, add_noise, kl_compatible, kl_exact, logp
from headway.algorithms.diffusion_nft import DiffusionNftParams, nft_loss
from headway.algorithms.objective import PolicyMetricSums
from headway.denoising.denoising_batch import DenoisingBatch, SampleSteps
from headway.denoising.denoising_policy import DenoisingPolicy, FrozenPolicy
from headway.denoising.denoising_ranks import SINGLE_DENOISING_RANK, DenoisingRanks, MicroBatch
from headway.denoising.settings import DenoisingTrainerSettings
from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import OptimizerStepReport
from headway.trainers.local.policy_update import stack_numbers
from headway.trainers.local.training_thread import CommitGate


@dataclass(slots=True, kw_only=True, eq=False)
class DenoisingUpdateReport(OptimizerStepReport):
    """Metrics of an update of a denoising model."""

    loss: float = 0.0
    kl_loss: float = 0.0
    denoiser_rows: int = 0
    """Rows that the model computed a velocity with gradients for."""

    def all_reduce(self, ranks: DenoisingRanks) -> None:
        """Add the counts of the other ranks."""
        sums = self.sums
        named = {} if sums is None else {one.name: getattr(sums, one.name) for one in fields(sums)}
        maxima = [name for name in named if name.endswith("_max")]
        added = [name for name in named if name not in maxima]
        counts = (self.loss, self.kl_loss, self.micro_batches, self.denoiser_rows)
        total, largest = ranks.all_reduce(
            stack_numbers([*counts, *(named[name] for name in added)]), stack_numbers([named[one] for one in maxima])
        )
        self.loss, self.kl_loss = float(total[0]), float(total[1])
        self.micro_batches, self.denoiser_rows = int(total[2]), int(total[3])
        if named:
            values = [*total[len(counts) :], *largest]
            self.sums = PolicyMetricSums(**dict(zip([*added, *maxima], values, strict=True)))

    def metrics(self, batch: DenoisingBatch) -> dict[str, float]:
        """Return the metrics by the names they are logged under."""
        steps = max(self.steps, 1)
        return {
            **self.common_metrics(batch, len(batch.rows)),
            "loss": self.loss / steps,
            "pg_loss": (self.loss - self.kl_loss) / steps,
            "kl_loss": self.kl_loss / steps,
            "denoiser_rows": float(self.denoiser_rows),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenoisingUpdate:
    """One update of the policy: the whole batch, its advantages, and the report that gathers its sums."""

    batch: DenoisingBatch
    advantages: Advantages
    version: int
    gate: CommitGate
    report: DenoisingUpdateReport = field(default_factory=DenoisingUpdateReport)


class DenoisingObjective(ABC):
    """Computes the gradients of a batch. `reference` is the initial policy, if it is needed and is no LoRA."""

    ends_only: ClassVar[bool]
    """Whether training uses only the latents after steps."""
    optimizer: Optimizer
    """The optimizer that moves the weights."""

    def __init__(
        self,
        policy: DenoisingPolicy,
        settings: DenoisingTrainerSettings,
        reference: FrozenPolicy | None,
        ranks: DenoisingRanks,
    ) -> None:
        self._policy, self._settings, self._reference, self._ranks = policy, settings, reference, ranks
        self.micro_batch_samples = settings.micro_batch_samples
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> Optimizer:
        return self._ranks.make_optimizer(self._policy.trainable(), self._settings.local.optimizer, None)

    def add_proximal_logps(self, batch: DenoisingBatch, gate: CommitGate) -> DenoisingBatch:
        """Return the batch with log-probabilities under the current weights, if the objective needs them."""
        return batch

    @abstractmethod
    def add_gradients(self, rows: Sequence[SampleSteps], update: DenoisingUpdate) -> None:
        """Add up the gradients of one mini-batch."""


class PolicyGradientObjective(DenoisingObjective):
    """Policy gradients on denoising steps."""

    ends_only = False

    def add_proximal_logps(self, batch: DenoisingBatch, gate: CommitGate) -> DenoisingBatch:
        if not self._settings.local.proximal or batch.proximal_N is not None:
            return batch
        found_N = compute_step_logps(self._policy, batch, self.micro_batch_samples, gate, self._ranks)
        return replace(batch, proximal_N=found_N)

    def add_gradients(self, rows: Sequence[SampleSteps], update: DenoisingUpdate) -> None:
        batch, advantages = update.batch, update.advantages
        inside_N = torch.zeros_like(advantages.mask_N)
        inside_N[rows[0].first : rows[-1].end] = True
        totals = BatchTotals.of(advantages.mask_N & inside_N, batch.sequence_N, len(batch.rows))
        may_skip = self._settings.local.objective.skips_zero_advantages and self._settings.kl_coef is None
        useful = [row for row in rows if not may_skip or _has_advantage(row, advantages)]
        update.report.skipped |= {row.first for row in rows} - {row.first for row in useful}
        for part in self._ranks.split(useful, self.micro_batch_samples):
            update.gate.check()
            self._add_micro_batch(part, totals, update)

    def _add_micro_batch(self, part: MicroBatch, totals: BatchTotals, update: DenoisingUpdate) -> None:
        """Run forward and backward of one micro-batch."""
        rows = part.rows
        batch, advantages, report = update.batch, update.advantages, update.report
        steps = _StepInputs.of(self._policy, batch, rows)
        transition = steps.transition(self._policy)
        at, objective = steps.index_N, self._settings.local.objective
        actions = Actions(
            logp_N=logp(steps.after_NCHW, *transition),
            behaviour_N=batch.behaviour_N[at],
            advantage_N=advantages.advantage_N[at],
            mask_N=advantages.mask_N[at],
            sequence_N=batch.sequence_N[at],
            sequences=len(batch.rows),
            proximal_N=None if batch.proximal_N is None else batch.proximal_N[at],
            reward_N=None if batch.reward_S is None else batch.reward_S[batch.sequence_N[at]],
        )
        result = objective(actions, totals)
        loss = result.loss
        if self._settings.kl_coef is not None:
            weight_N = make_action_weights(
                objective.mode, actions.sequence_N, totals, norm_length=objective.norm_length, dtype=loss.dtype
            )
            kl = sum_weighted(self._kl(transition, steps), actions.mask_N, weight_N) * self._settings.kl_coef
            loss = loss + kl
            report.kl_loss += part.weight * float(kl.detach())
        (loss * part.weight).backward()  # type: ignore[no-untyped-call]
        sums = result.sums if part.weight else result.sums.make_zeros()
        report.sums = sums if report.sums is None else report.sums + sums
        if part.weight:
            report.loss += float(loss.detach())
            report.micro_batches += 1
            report.denoiser_rows += len(at)

    def _kl(self, transition: LatentTransition, steps: _StepInputs) -> Tensor:
        """Return the KL of each step to the initial policy, [N]."""
        with torch.no_grad(), self._policy.initial_policy(self._reference):
            reference = steps.transition(self._policy, self._reference)
        if self._settings.kl_mode == "compatible" and self._settings.denoising.sampler == "sde":
            return kl_compatible(transition.mean, reference.mean, transition.std, steps.next_N - steps.s_N)
        return kl_exact(transition.mean, reference.mean, transition.std)


def compute_step_logps(
    policy: DenoisingPolicy,
    batch: DenoisingBatch,
    micro_batch_samples: int,
    gate: CommitGate,
    ranks: DenoisingRanks = SINGLE_DENOISING_RANK,
) -> Tensor:
    """Return the log-probability of every trained step under the current weights, without gradients, [N]."""
    found_N = torch.zeros_like(batch.behaviour_N)
    with torch.no_grad():
        for part in ranks.split(batch.rows, micro_batch_samples):
            gate.check()
            steps = _StepInputs.of(policy, batch, part.rows)
            found_N[steps.index_N] += part.weight * logp(steps.after_NCHW, *steps.transition(policy))
    return ranks.all_reduce(found_N, found_N[:0])[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StepInputs:
    """The trained steps of a micro-batch on the device."""

    index_N: Tensor
    """Positions of the steps in the batch."""
    x_NCHW: Tensor
    after_NCHW: Tensor
    s_N: Tensor
    next_N: Tensor
    prompts: list[str]

    @classmethod
    def of(cls, policy: DenoisingPolicy, batch: DenoisingBatch, rows: Sequence[SampleSteps]) -> _StepInputs:
        index = torch.cat([torch.arange(row.first, row.end) for row in rows])
        device = batch.behaviour_N.device
        steps = [(row, number) for row in rows for number in row.trained]
        s_N, next_N = policy.noise_levels([row.path_length for row, _ in steps], [number for _, number in steps])
        return cls(
            index_N=index.to(device),
            x_NCHW=batch.before_NCHW[index].to(device),
            after_NCHW=batch.after_NCHW[index].to(device),
            s_N=s_N,
            next_N=next_N,
            prompts=[row.prompt for row, _ in steps],
        )

    def transition(self, policy: DenoisingPolicy, values: FrozenPolicy | None = None) -> LatentTransition:
        """Return the distributions of the steps, under the policy or under the copy `values`."""
        return policy.transition(self.x_NCHW, self.s_N, self.next_N, self.prompts, values)


class DiffusionNftObjective(DenoisingObjective):
    """DiffusionNFT: regression of velocities on pictures that are noised again.

    The old policy follows the trained one slowly; it is part of the optimizer's state.
    """

    ends_only = True

    def _make_optimizer(self) -> Optimizer:
        self._old, optimizer = self._policy.freeze(), self._settings.local.optimizer
        return self._ranks.make_optimizer(self._policy.trainable(), optimizer, self._old.values)

    @property
    def _params(self) -> DiffusionNftParams:
        return self._settings.nft or DiffusionNftParams()

    def add_gradients(self, rows: Sequence[SampleSteps], update: DenoisingUpdate) -> None:
        levels = self._settings.nft_levels
        for part in self._ranks.split(rows, self.micro_batch_samples):
            update.gate.check()
            loss = self._loss(part.rows, update).sum() * part.weight / (len(rows) * levels)
            if not bool(loss.isfinite()):
                raise TrainerError(f"step {update.version + 1}: a loss that is not finite")
            loss.backward()  # type: ignore[no-untyped-call]
            if part.weight:
                update.report.loss += float(loss.detach())
                update.report.micro_batches += 1
                update.report.denoiser_rows += len(part.rows) * levels

    def _loss(self, rows: Sequence[SampleSteps], update: DenoisingUpdate) -> Tensor:
        """Return the loss of each sample at each of its noise levels."""
        batch, levels = update.batch, self._settings.nft_levels
        device = batch.behaviour_N.device
        last = torch.tensor([row.end - 1 for row in rows]).repeat_interleave(levels)
        x0 = batch.after_NCHW[last].to(device)
        draws = [self._draw_noise(row, update.version) for row in rows]
        s_N = torch.cat([s for s, _ in draws]).to(device)
        x_s = add_noise(x0, torch.cat([noise for _, noise in draws]).to(device), s_N)
        prompts = [row.prompt for row in rows for _ in range(levels)]
        v = self._policy.velocity(x_s, s_N, prompts)
        with torch.no_grad():
            v_old = self._policy.velocity(x_s, s_N, prompts, self._old)
            v_ref = self._reference_velocity(x_s, s_N, prompts)
        advantage_N = update.advantages.advantage_N[last.to(device)]
        return nft_loss(v, v_old, x0, x_s, s_N, advantage_N, self._params, v_ref)

    def _reference_velocity(self, x_s: Tensor, s_N: Tensor, prompts: Sequence[str]) -> Tensor | None:
        if not self._params.kl_coef:
            return None
        with self._policy.initial_policy(self._reference):
            return self._policy.velocity(x_s, s_N, prompts, self._reference)

    def _draw_noise(self, row: SampleSteps, version: int) -> tuple[Tensor, Tensor]:
        """Draw noise levels of the sample's own path, and noise: a function of seed, sample and version."""
        name = f"{self._settings.seed}/{version}/{row.sample.sample_id}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")
        generator, levels = torch.Generator().manual_seed(seed), self._settings.nft_levels
        path = self._policy.make_timesteps(row.path_length)[:-1]
        s_L = path[torch.randint(len(path), (levels,), generator=generator)]
        return s_L, torch.randn(levels, *self._policy.shape, generator=generator)


def _has_advantage(row: SampleSteps, advantages: Advantages) -> bool:
    """Return whether any step of the sample has an advantage other than 0."""
    part = slice(row.first, row.end)
    return bool(((advantages.advantage_N[part] != 0) & advantages.mask_N[part]).any())
