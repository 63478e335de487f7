"""One update of the policy: advantages of the whole batch, gradients micro-batch by micro-batch, optimizer steps.

Guarantees: all or nothing, as `optimizer_steps` describes. Denominators are those of the whole mini-batch, so
micro-batches, packing and skipped rows change no gradient.

Legend: N actions of the batch, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.actions import Actions, BatchTotals, make_action_weights, require_input, sum_weighted
from headway.algorithms.advantages import Advantages, AdvantageSettings, RewardBatch, estimate_advantages
from headway.algorithms.mismatch import compute_mean_weight
from headway.algorithms.objective import PolicyMetricSums
from headway.algorithms.returns import compute_value_loss
from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import OptimizerStepReport, apply_optimizer_steps, iterate_mini_batches
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import ScoredBatch, TokenBatch, TokenRow
from headway.trainers.local.training_thread import CommitGate
from headway.trainers.local.tree_packing import TokenPack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainableState:
    """Models and optimizers that an update changes."""

    policy: PolicyModel
    optimizer: Optimizer
    critic: CriticModel | None = None
    critic_optimizer: Optimizer | None = None
    ranks: RankGroup = SINGLE_RANK

    @property
    def optimizers(self) -> list[Optimizer]:
        return [one for one in (self.optimizer, self.critic_optimizer) if one is not None]


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateReport(OptimizerStepReport):
    """Metrics of an update of a language model."""

    value_loss: float = 0.0
    entropy: Tensor | float = 0.0
    """Sum over all actions of all micro-batches."""
    packed_tokens: int = 0

    def all_reduce(self, ranks: RankGroup) -> None:
        """Add the counts of the other ranks."""
        sums = self.sums
        named = {} if sums is None else {one.name: getattr(sums, one.name) for one in fields(sums)}
        maxima = [name for name in named if name.endswith("_max")]
        added = [name for name in named if name not in maxima]
        counts = (self.value_loss, self.entropy, self.packed_tokens, self.micro_batches)
        total, largest = ranks.all_reduce(
            stack_numbers([*counts, *(named[name] for name in added)]), stack_numbers([named[name] for name in maxima])
        )
        self.value_loss, self.entropy = float(total[0]), total[1]
        self.packed_tokens, self.micro_batches = int(total[2]), int(total[3])
        if named:
            values = [*total[len(counts) :], *largest]
            self.sums = PolicyMetricSums(**dict(zip([*added, *maxima], values, strict=True)))

    def metrics(self, batch: TokenBatch) -> dict[str, float]:
        """Return all metrics by the names they are logged under."""
        found, steps = self.common_metrics(batch, len(batch.rows)), max(self.steps, 1)
        for name in ("loss", "pg_loss", "kl_loss"):
            found[name] = found.get(name, 0.0) / steps
        return {
            **found,
            "entropy": float(self.entropy) / max(found.get("actions", 0.0), 1.0),
            "value_loss": self.value_loss / steps,
            "tokens": float(batch.sequence_N.numel()),
            "packed_tokens": float(self.packed_tokens),
            "unpacked_tokens": float(sum(len(row.tokens) for row in batch.rows)),
            "masked_samples": float(len(batch.rows) - len(_select_rows(batch.rows, batch.mask_N))),
        }


def stack_numbers(values: Sequence[Tensor | float]) -> Tensor:
    """Stack numbers in float64 on the device of the first tensor among them."""
    device = next((value.device for value in values if isinstance(value, Tensor)), "cpu")
    if not values:
        return torch.tensor([], dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])


def compute_advantages(
    batch: ScoredBatch, settings: AdvantageSettings | None, kl_coef: float, **estimator_inputs: Any
) -> Advantages:
    """Compute advantages by the configured estimator; without settings, broadcast each sample's own advantage.

    `estimator_inputs` are further fields of `RewardBatch`.
    """
    if settings is None:
        advantage_N = batch.advantage_S[batch.sequence_N]
        return Advantages(advantage_N=advantage_N, mask_N=batch.mask_N, return_N=None, kl=0.0)
    if batch.reward_S is None:
        raise TrainerError("a sample without a score, and the estimator needs all of them")
    rewards = RewardBatch(
        reward_S=batch.reward_S,
        group_S=batch.group_S,
        groups=batch.groups,
        mask_N=batch.mask_N,
        sequence_N=batch.sequence_N,
        **estimator_inputs,
    )
    return estimate_advantages(rewards, settings, kl_coef=kl_coef)


def update_policy(
    state: TrainableState,
    batch: TokenBatch,
    advantages: Advantages,
    settings: LocalSettings,
    version: int,
    gate: CommitGate,
) -> UpdateReport:
    """Do all optimizer steps of one batch, or none."""
    mean_weight = _compute_mean_weight(batch, advantages.mask_N, settings)
    update = _Update(state, batch, advantages, settings, gate, mean_weight, version >= settings.critic_warmup)
    mini_batches = list(iterate_mini_batches(batch.rows, settings))
    optimizers = state.optimizers if update.trains_policy else state.optimizers[1:]
    if optimizers:
        apply_optimizer_steps(optimizers, mini_batches, update.accumulate_gradients, update.report, version, gate)
    else:
        gate.commit()
    update.report.all_reduce(state.ranks)
    return update.report


@dataclass(slots=True, eq=False)
class _Update:
    """The gradients of one batch, mini-batch by mini-batch."""

    _state: TrainableState
    _batch: TokenBatch
    _advantages: Advantages
    _settings: LocalSettings
    _gate: CommitGate
    _mean_weight: float = 1.0
    """What the weights of the mismatch correction are divided by."""
    trains_policy: bool = True
    """Whether the critic has had its steps alone."""
    report: UpdateReport = field(default_factory=UpdateReport)

    def accumulate_gradients(self, rows: Sequence[TokenRow]) -> None:
        """Add up the gradients of one mini-batch."""
        batch, mask_N, advantage_N = self._batch, self._advantages.mask_N, self._advantages.advantage_N
        totals = replace(_count_totals(rows, batch, mask_N), mean_weight=self._mean_weight)
        unmasked = _select_rows(rows, mask_N)
        skips = self._settings.objective.skips_zero_advantages
        trained = _select_rows(rows, mask_N & (advantage_N != 0)) if skips else unmasked
        self.report.skipped |= {row.first for row in rows} - {row.first for row in trained}
        for pack in self._state.ranks.make_packs(trained, self._settings) if self.trains_policy else ():
            self._gate.check()
            self._backward_policy(pack, totals)
        if self._state.critic is not None:
            self.report.value_loss += add_critic_gradients(
                self._state.critic, rows, batch, self._advantages, self._settings, self._state.ranks, self._gate
            )

    def _backward_policy(self, pack: TokenPack, totals: BatchTotals) -> None:
        """Run forward and backward of the policy on one pack."""
        batch, report, objective, at = self._batch, self.report, self._settings.objective, pack.action_N
        logps = self._state.policy.logps(pack)

        def select(x_N: Tensor | None) -> Tensor | None:
            return None if x_N is None else x_N[at]

        actions = Actions(
            logp_N=logps.logp_N,
            behaviour_N=batch.behaviour_N[at],
            advantage_N=self._advantages.advantage_N[at],
            mask_N=self._advantages.mask_N[at],
            sequence_N=batch.loss_sequence[at],
            sequences=batch.loss_sequences,
            proximal_N=select(batch.proximal_N),
            reference_N=select(batch.reference_N),
            reward_N=None if batch.reward_S is None else batch.reward_S[batch.sequence_N[at]],
            turn_N=batch.steps.step_N[at],
            turns=batch.steps.sample_K.numel(),
            entropy_N=logps.entropy_N if objective.entropy_coef else logps.entropy_N.detach(),
        )
        result = objective(actions, totals)
        result.loss.backward()  # type: ignore[no-untyped-call]
        report.sums = result.sums if report.sums is None else report.sums + result.sums
        report.entropy = report.entropy + (logps.entropy_N.detach() * actions.mask_N).sum()
        if at.numel():
            report.packed_tokens += pack.token_L.numel()
            report.micro_batches += 1


def add_critic_gradients(
    critic: CriticModel,
    rows: Sequence[TokenRow],
    batch: TokenBatch,
    targets: Advantages,
    settings: LocalSettings,
    ranks: RankGroup,
    gate: CommitGate,
) -> float:
    """Add up the critic's gradients of one mini-batch; return this rank's part of the loss."""
    totals, found = _count_totals(rows, batch, targets.mask_N), 0.0
    for pack in ranks.make_packs(_select_rows(rows, targets.mask_N), settings):
        gate.check()
        value_N, at = critic.values(pack), pack.action_N
        old_N = require_input(batch.value_N, "values", "the critic")[at]
        return_N = require_input(targets.return_N, "returns", "the critic")[at]
        error_N = compute_value_loss(value_N, old_N.to(value_N.dtype), return_N.to(value_N.dtype), settings.value_clip)
        weight_N = make_action_weights(
            "token-mean", batch.loss_sequence[at], totals, norm_length=1, dtype=value_N.dtype
        )
        loss = sum_weighted(error_N, targets.mask_N[at], weight_N)
        loss.backward()  # type: ignore[no-untyped-call]
        found += float(loss.detach())
    return found


def _count_totals(rows: Sequence[TokenRow], batch: TokenBatch, mask_N: Tensor) -> BatchTotals:
    """Return the denominators of one mini-batch."""
    inside_N = torch.zeros_like(mask_N)
    inside_N[rows[0].first : rows[-1].first + len(rows[-1].actions)] = True
    return BatchTotals.of(mask_N & inside_N, batch.loss_sequence, batch.loss_sequences)


def _compute_mean_weight(batch: TokenBatch, mask_N: Tensor, settings: LocalSettings) -> float:
    """Return the mean weight of the whole batch where weights are divided by it, else 1; every rank has all of it."""
    weight = settings.objective.mismatch.weight
    if weight is None or not weight.normalised:
        return 1.0
    proximal_N = require_input(batch.proximal_N, "proximal_N", "train_infer_correction")
    inputs = (proximal_N, batch.behaviour_N, mask_N, batch.loss_sequence, batch.loss_sequences)
    return compute_mean_weight(*inputs, weight, batch.steps.step_N, batch.steps.sample_K.numel())


def _select_rows(rows: Sequence[TokenRow], mask_N: Tensor) -> list[TokenRow]:
    """Return the rows that have an action inside `mask_N`."""
    mask = mask_N.cpu().numpy()
    return [row for row in rows if mask[row.first : row.first + len(row.actions)].any()]
