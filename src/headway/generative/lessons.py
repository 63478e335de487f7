"""Two ways to learn from denoised samples.

`PolicyLesson`: the law of every trained step under the weights of now, its log-probability, and any policy loss against
the behaviour log-probability that the engine gave; the KL to the policy of the start in closed form. `NftLesson`: the
pictures noised again, and velocities pulled towards those of good ones; no log-probabilities, so that neither sampler
nor version of what made them enters.

Legend: N trained steps, C channels, H and W of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from headway.algorithms import Actions, Advantages, BatchTotals, action_weights, weighted_sum
from headway.algorithms.flow import (
    NftParams,
    Transition,
    follow,
    kl_compatible,
    kl_exact,
    logp,
    nft_loss,
    noised,
    old_decay,
)
from headway.errors import TrainerError
from headway.generative.batch import Drawn, FlowBatch
from headway.generative.policy import FlowPolicy
from headway.generative.training import FlowTraining, Report
from headway.trainers.local.optimizer import Optimizer, copied
from headway.trainers.local.settings import OptimizerSettings
from headway.trainers.local.worker import Gate


class PolicyLesson:
    """Policy gradients on denoising steps."""

    ends_only = False

    def __init__(self, policy: FlowPolicy, training: FlowTraining, reference: Mapping[str, Tensor] | None) -> None:
        self._policy, self._training, self._reference = policy, training, reference
        self.at_once = training.micro_batch_samples
        self.optimizer = Optimizer(policy.trainable(), training.local.optimizer)

    def completed(self, batch: FlowBatch, gate: Gate) -> FlowBatch:
        if not self._training.local.proximal or batch.proximal_N is not None:
            return batch
        return replace(batch, proximal_N=logps_of(self._policy, batch, batch.rows, self.at_once, gate))

    def gradients(
        self, batch: FlowBatch, made: Advantages, rows: Sequence[Drawn], version: int, report: Report, gate: Gate
    ) -> None:
        settings = self._training.local
        inside_N = torch.zeros_like(made.mask_N)
        inside_N[rows[0].first : rows[-1].first + len(rows[-1].places)] = True
        totals = BatchTotals.of(made.mask_N & inside_N, batch.sequence_N, len(batch.rows))
        plain = settings.skips_zero_advantages and self._training.kl_coef is None
        taught = [row for row in rows if not plain or _teaches(row, made)]
        report.skipped |= {row.first for row in rows} - {row.first for row in taught}
        for part in micro_batches(taught, self.at_once):
            gate.check()
            self._part(batch, made, part, totals, report)

    def _part(
        self, batch: FlowBatch, made: Advantages, rows: Sequence[Drawn], totals: BatchTotals, report: Report
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
            weight_N = action_weights(
                objective.mode, actions.sequence_N, totals, norm_length=objective.norm_length, dtype=loss.dtype
            )
            kl = weighted_sum(self._kl(law, where), actions.mask_N, weight_N) * self._training.kl_coef
            loss = loss + kl
            report.kl_loss += float(kl.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        report.sums = result.sums if report.sums is None else report.sums + result.sums
        report.loss += float(loss.detach())
        report.micro_batches += 1
        report.calls += len(at)

    def _kl(self, law: Transition, where: dict[str, Any]) -> Tensor:
        inside = self._policy.without_adapters() if self._reference is None else nullcontext()
        with torch.no_grad(), inside:
            reference = self._policy.law(**where, values=self._reference)
        if self._training.kl_mode == "compatible" and self._training.flow.sampler == "sde":
            return kl_compatible(law.mean, reference.mean, law.std, where["next_N"] - where["s_N"])
        return kl_exact(law.mean, reference.mean, law.std)


def logps_of(policy: FlowPolicy, batch: FlowBatch, rows: Sequence[Drawn], at_once: int, gate: Gate) -> Tensor:
    """Of every trained step under the weights of now, without gradients, [N]."""
    found_N = torch.zeros_like(batch.behaviour_N)
    with torch.no_grad():
        for part in micro_batches(rows, at_once):
            gate.check()
            at, law, after, _ = _laws(policy, batch, part)
            found_N[at] = logp(after, *law)
    return found_N


def _laws(
    policy: FlowPolicy, batch: FlowBatch, rows: Sequence[Drawn]
) -> tuple[Tensor, Transition, Tensor, dict[str, Any]]:
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


class NftLesson:
    """DiffusionNFT."""

    ends_only = True

    def __init__(
        self, policy: FlowPolicy, training: FlowTraining, params: NftParams, reference: Mapping[str, Tensor] | None
    ) -> None:
        self._policy, self._training, self._params, self._reference = policy, training, params, reference
        self.at_once = training.micro_batch_samples
        self.optimizer = Followed(policy, training.local.optimizer)

    def completed(self, batch: FlowBatch, gate: Gate) -> FlowBatch:
        return batch

    def gradients(
        self, batch: FlowBatch, made: Advantages, rows: Sequence[Drawn], version: int, report: Report, gate: Gate
    ) -> None:
        for part in micro_batches(rows, self.at_once):
            gate.check()
            loss = self._loss(batch, made, part, version).sum() / (len(rows) * self._training.nft_levels)
            if not bool(loss.isfinite()):
                raise TrainerError(f"step {version + 1}: a loss that is not finite")
            loss.backward()  # type: ignore[no-untyped-call]
            report.loss += float(loss.detach())
            report.micro_batches += 1
            report.calls += len(part) * self._training.nft_levels

    def _loss(self, batch: FlowBatch, made: Advantages, rows: Sequence[Drawn], version: int) -> Tensor:
        """Of each sample at each of its noise levels."""
        levels, device = self._training.nft_levels, batch.behaviour_N.device
        last = torch.tensor([row.first + len(row.places) - 1 for row in rows]).repeat_interleave(levels)
        x0 = batch.after_NCHW[last].to(device)
        draws = [self._drawn(row, version) for row in rows]
        s_N = torch.cat([s for s, _ in draws]).to(device)
        x_s = noised(x0, torch.cat([noise for _, noise in draws]).to(device), s_N)
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

    def _drawn(self, row: Drawn, version: int) -> tuple[Tensor, Tensor]:
        """Noise levels of the grid that the sample was made on, and noises: a function of seed, sample and step."""
        name = f"{self._training.seed}/{version}/{row.sample.sample_id}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")
        dice, levels = torch.Generator().manual_seed(seed), self._training.nft_levels
        grid = self._policy.grid(row.steps)[:-1]
        s_L = grid[torch.randint(len(grid), (levels,), generator=dice)]
        return s_L, torch.randn(levels, *self._policy.shape, generator=dice)


class Followed(Optimizer):
    """An optimizer with the old policy, which follows slowly; a checkpoint holds both."""

    def __init__(self, policy: FlowPolicy, settings: OptimizerSettings) -> None:
        super().__init__(policy.trainable(), settings)
        self._new = policy.trainable()
        self.old = copied(self._new)
        """By the names of the trained parameters."""

    def step(self, version: int) -> float:
        rate = super().step(version)
        follow(self.old.values(), self._new.values(), old_decay(version))
        return rate

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **{f"{name}/old": one for name, one in self.old.items()}}


def micro_batches(rows: Sequence[Drawn], size: int) -> Iterator[Sequence[Drawn]]:
    """Whole samples, `size` at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _teaches(row: Drawn, made: Advantages) -> bool:
    part = slice(row.first, row.first + len(row.places))
    return bool(((made.advantage_N[part] != 0) & made.mask_N[part]).any())
