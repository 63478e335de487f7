"""What a flow trainer needs to know, what it says about an update, and what a way of learning has to offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headway.algorithms import Actions, Advantages, BatchTotals, PolicyMetricSums, make_action_weights, sum_weighted
from headway.algorithms.denoising import (
    DiffusionNftParams,
    LatentTransition,
    add_noise,
    kl_compatible,
    kl_exact,
    logp,
    nft_loss,
    old_policy_decay,
    update_old_policy,
)
from headway.denoising.denoising_batch import DenoisingBatch, SampleSteps
from headway.denoising.denoising_policy import DenoisingPolicy
from headway.denoising.settings import DenoisingSettings
from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer, copy_tensors
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.training_thread import CommitGate


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingTrainerSettings:
    """One flow trainer."""

    local: LocalSettings
    """Optimizer, objective, advantages, epochs, precision, place: as for language."""
    flow: DenoisingSettings
    micro_batch_samples: int = 8
    """Samples of one forward pass, all their trained steps together."""
    kl_coef: float | None = None
    """Of the KL to the policy of the start; None: there is none. The objective's own stays off."""
    kl_mode: Literal["exact", "compatible"] = "exact"
    """The KL of two Gaussians, or what published Flow-SDE code computes, which is |dt| times that."""
    nft: DiffusionNftParams | None = None
    """DiffusionNFT instead of a policy loss."""
    nft_levels: int = 2
    """Noise levels that it looks at each picture from."""
    seed: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class DenoisingUpdateReport:
    """What there is to say about an update, gathered while it runs."""

    sums: PolicyMetricSums | None = None
    loss: float = 0.0
    kl_loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    steps: int = 0
    micro_batches: int = 0
    calls: int = 0
    skipped: set[int] = field(default_factory=set)

    def metrics(self, batch: DenoisingBatch) -> dict[str, float]:
        """By the names they are logged under."""
        found = {} if self.sums is None else self.sums.summary()
        each = max(self.steps, 1)
        return {
            **found,
            "loss": self.loss / each,
            "pg_loss": (self.loss - self.kl_loss) / each,
            "kl_loss": self.kl_loss / each,
            "grad_norm": self.grad_norm / each,
            "learning_rate": self.learning_rate,
            "optimizer_steps": float(self.steps),
            "micro_batches": float(self.micro_batches),
            "denoiser_rows": float(self.calls),
            "samples": float(len(batch.rows)),
            "skipped_samples": float(len(self.skipped)),
            "lag_mean": float(batch.lag_N.mean()),
            "lag_max": float(batch.lag_N.max()),
            "reward": 0.0 if batch.reward_S is None else float(batch.reward_S.mean()),
        }


class DenoisingObjective(Protocol):
    """How a batch teaches."""

    ends_only: bool
    """Where steps began does not matter."""
    at_once: int
    """Samples of one forward pass."""

    @property
    def optimizer(self) -> Optimizer:
        """What moves the weights."""
        ...

    def completed(self, batch: DenoisingBatch, gate: CommitGate) -> DenoisingBatch:
        """With what the lesson reads and no stage has filled, under the weights of now."""
        ...

    def gradients(
        self,
        batch: DenoisingBatch,
        made: Advantages,
        rows: Sequence[SampleSteps],
        version: int,
        report: DenoisingUpdateReport,
        gate: CommitGate,
    ) -> None:
        """Add up the gradients of one mini-batch."""
        ...


class PolicyGradientObjective:
    """Policy gradients on denoising steps."""

    ends_only = False

    def __init__(
        self, policy: DenoisingPolicy, training: DenoisingTrainerSettings, reference: Mapping[str, Tensor] | None
    ) -> None:
        self._policy, self._training, self._reference = policy, training, reference
        self.at_once = training.micro_batch_samples
        self.optimizer = Optimizer(policy.trainable(), training.local.optimizer)

    def completed(self, batch: DenoisingBatch, gate: CommitGate) -> DenoisingBatch:
        if not self._training.local.proximal or batch.proximal_N is not None:
            return batch
        return replace(batch, proximal_N=compute_step_logps(self._policy, batch, batch.rows, self.at_once, gate))

    def gradients(
        self,
        batch: DenoisingBatch,
        made: Advantages,
        rows: Sequence[SampleSteps],
        version: int,
        report: DenoisingUpdateReport,
        gate: CommitGate,
    ) -> None:
        settings = self._training.local
        inside_N = torch.zeros_like(made.mask_N)
        inside_N[rows[0].first : rows[-1].first + len(rows[-1].places)] = True
        totals = BatchTotals.of(made.mask_N & inside_N, batch.sequence_N, len(batch.rows))
        plain = settings.objective.skips_zero_advantages and self._training.kl_coef is None
        taught = [row for row in rows if not plain or _teaches(row, made)]
        report.skipped |= {row.first for row in rows} - {row.first for row in taught}
        for part in split_micro_batches(taught, self.at_once):
            gate.check()
            self._part(batch, made, part, totals, report)

    def _part(
        self,
        batch: DenoisingBatch,
        made: Advantages,
        rows: Sequence[SampleSteps],
        totals: BatchTotals,
        report: DenoisingUpdateReport,
    ) -> None:
        """Forward and backward of one micro-batch."""
        at, law, after, where = _laws(self._policy, batch, rows)
        objective = self._training.local.objective
        actions = Actions(
            logp_N=logp(after, *law),
            behaviour_N=batch.behaviour_N[at],
            advantage_N=made.advantage_N[at],
            mask_N=made.mask_N[at],
            sequence_N=batch.sequence_N[at],
            sequences=len(batch.rows),
            proximal_N=None if batch.proximal_N is None else batch.proximal_N[at],
            reward_N=None if batch.reward_S is None else batch.reward_S[batch.sequence_N[at]],
        )
        result = objective(actions, totals)
        loss = result.loss
        if self._training.kl_coef is not None:
            weight_N = make_action_weights(
                objective.mode, actions.sequence_N, totals, norm_length=objective.norm_length, dtype=loss.dtype
            )
            kl = sum_weighted(self._kl(law, where), actions.mask_N, weight_N) * self._training.kl_coef
            loss = loss + kl
            report.kl_loss += float(kl.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        report.sums = result.sums if report.sums is None else report.sums + result.sums
        report.loss += float(loss.detach())
        report.micro_batches += 1
        report.calls += len(at)

    def _kl(self, law: LatentTransition, where: dict[str, Any]) -> Tensor:
        inside = self._policy.without_adapters() if self._reference is None else nullcontext()
        with torch.no_grad(), inside:
            reference = self._policy.law(**where, values=self._reference)
        if self._training.kl_mode == "compatible" and self._training.flow.sampler == "sde":
            return kl_compatible(law.mean, reference.mean, law.std, where["next_N"] - where["s_N"])
        return kl_exact(law.mean, reference.mean, law.std)


def compute_step_logps(
    policy: DenoisingPolicy, batch: DenoisingBatch, rows: Sequence[SampleSteps], at_once: int, gate: CommitGate
) -> Tensor:
    """Of every trained step under the weights of now, without gradients, [N]."""
    found_N = torch.zeros_like(batch.behaviour_N)
    with torch.no_grad():
        for part in split_micro_batches(rows, at_once):
            gate.check()
            at, law, after, _ = _laws(policy, batch, part)
            found_N[at] = logp(after, *law)
    return found_N


def _laws(
    policy: DenoisingPolicy, batch: DenoisingBatch, rows: Sequence[SampleSteps]
) -> tuple[Tensor, LatentTransition, Tensor, dict[str, Any]]:
    """Numbers of the steps of `rows`, their laws, where they ended, and what the laws were asked with."""
    numbers = torch.cat([torch.arange(row.first, row.first + len(row.places)) for row in rows])
    device = batch.behaviour_N.device
    s_N, next_N = policy.levels(
        [row.steps for row in rows for _ in row.places], [place for row in rows for place in row.places]
    )
    where: dict[str, Any] = {
        "x_NCHW": batch.before_NCHW[numbers].to(device),
        "s_N": s_N,
        "next_N": next_N,
        "prompts": [row.prompt for row in rows for _ in row.places],
    }
    return numbers.to(device), policy.law(**where), batch.after_NCHW[numbers].to(device), where


class DiffusionNftObjective:
    """DiffusionNFT."""

    ends_only = True

    def __init__(
        self,
        policy: DenoisingPolicy,
        training: DenoisingTrainerSettings,
        params: DiffusionNftParams,
        reference: Mapping[str, Tensor] | None,
    ) -> None:
        self._policy, self._training, self._params, self._reference = policy, training, params, reference
        self.at_once = training.micro_batch_samples
        self.optimizer = OldPolicyOptimizer(policy, training.local.optimizer)

    def completed(self, batch: DenoisingBatch, gate: CommitGate) -> DenoisingBatch:
        return batch

    def gradients(
        self,
        batch: DenoisingBatch,
        made: Advantages,
        rows: Sequence[SampleSteps],
        version: int,
        report: DenoisingUpdateReport,
        gate: CommitGate,
    ) -> None:
        for part in split_micro_batches(rows, self.at_once):
            gate.check()
            loss = self._loss(batch, made, part, version).sum() / (len(rows) * self._training.nft_levels)
            if not bool(loss.isfinite()):
                raise TrainerError(f"step {version + 1}: a loss that is not finite")
            loss.backward()  # type: ignore[no-untyped-call]
            report.loss += float(loss.detach())
            report.micro_batches += 1
            report.calls += len(part) * self._training.nft_levels

    def _loss(self, batch: DenoisingBatch, made: Advantages, rows: Sequence[SampleSteps], version: int) -> Tensor:
        """Of each sample at each of its noise levels."""
        levels, device = self._training.nft_levels, batch.behaviour_N.device
        last = torch.tensor([row.first + len(row.places) - 1 for row in rows]).repeat_interleave(levels)
        x0 = batch.after_NCHW[last].to(device)
        draws = [self._drawn(row, version) for row in rows]
        s_N = torch.cat([s for s, _ in draws]).to(device)
        x_s = add_noise(x0, torch.cat([noise for _, noise in draws]).to(device), s_N)
        prompts = [row.prompt for row in rows for _ in range(levels)]
        v = self._policy.velocity(x_s, s_N, prompts)
        with torch.no_grad():
            v_old = self._policy.velocity(x_s, s_N, prompts, self.optimizer.old)
            v_ref = self._referred(x_s, s_N, prompts)
        advantage_N = made.advantage_N[last.to(device)]
        return nft_loss(v, v_old, x0, x_s, s_N, advantage_N, self._params, v_ref)

    def _referred(self, x_s: Tensor, s_N: Tensor, prompts: Sequence[str]) -> Tensor | None:
        if not self._params.kl_coef:
            return None
        with self._policy.without_adapters() if self._reference is None else nullcontext():
            return self._policy.velocity(x_s, s_N, prompts, self._reference)

    def _drawn(self, row: SampleSteps, version: int) -> tuple[Tensor, Tensor]:
        """Noise levels of the grid that the sample was made on, and noises: a function of seed, sample and step."""
        name = f"{self._training.seed}/{version}/{row.sample.sample_id}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")
        dice, levels = torch.Generator().manual_seed(seed), self._training.nft_levels
        grid = self._policy.grid(row.steps)[:-1]
        s_L = grid[torch.randint(len(grid), (levels,), generator=dice)]
        return s_L, torch.randn(levels, *self._policy.shape, generator=dice)


class OldPolicyOptimizer(Optimizer):
    """An optimizer with the old policy, which follows slowly; a checkpoint holds both."""

    def __init__(self, policy: DenoisingPolicy, settings: OptimizerSettings) -> None:
        super().__init__(policy.trainable(), settings)
        self._new = policy.trainable()
        self.old = copy_tensors(self._new)
        """By the names of the trained parameters."""

    def step(self, version: int) -> float:
        rate = super().step(version)
        update_old_policy(self.old.values(), self._new.values(), old_policy_decay(version))
        return rate

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **{f"{name}/old": one for name, one in self.old.items()}}


def split_micro_batches(rows: Sequence[SampleSteps], size: int) -> Iterator[Sequence[SampleSteps]]:
    """Whole samples, `size` at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _teaches(row: SampleSteps, made: Advantages) -> bool:
    part = slice(row.first, row.first + len(row.places))
    return bool(((made.advantage_N[part] != 0) & made.mask_N[part]).any())
