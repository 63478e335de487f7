"""One update: advantages of the whole batch, gradients micro-batch by micro-batch, then the step.

Guarantees: all or nothing, as `steps` says. Denominators are those of the whole mini-batch, so micro-batches, packing
and skipped rows change no gradient.

Legend: N actions of the batch, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.algorithms import (
    Actions,
    Advantages,
    AdvantageSettings,
    BatchTotals,
    PolicyMetricSums,
    RewardBatch,
    compute_value_loss,
    estimate_advantages,
    make_action_weights,
    sum_weighted,
)
from headway.algorithms.actions import require_input
from headway.errors import TrainerError
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import apply_optimizer_steps, iterate_mini_batches
from headway.trainers.local.policy_model import CriticModel, PolicyModel
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenBatch, TokenRow
from headway.trainers.local.training_thread import CommitGate
from headway.trainers.local.tree_packing import TokenPack


class ScoredBatch(Protocol):
    """What advantages are made of."""

    @property
    def groups(self) -> int: ...
    @property
    def reward_S(self) -> Tensor | None: ...  # noqa: N802
    @property
    def advantage_S(self) -> Tensor: ...  # noqa: N802
    @property
    def group_S(self) -> Tensor: ...  # noqa: N802
    @property
    def mask_N(self) -> Tensor: ...  # noqa: N802
    @property
    def sequence_N(self) -> Tensor: ...  # noqa: N802


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainableState:
    """What an update moves."""

    policy: PolicyModel
    optimizer: Optimizer
    critic: CriticModel | None = None
    critic_optimizer: Optimizer | None = None
    team: RankGroup = SINGLE_RANK

    @property
    def optimizers(self) -> list[Optimizer]:
        return [one for one in (self.optimizer, self.critic_optimizer) if one is not None]


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateReport:
    """What there is to say about an update, gathered while it runs."""

    sums: PolicyMetricSums | None = None
    steps: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    value_loss: float = 0.0
    entropy: Tensor | float = 0.0
    """Summed over the actions that were looked at."""
    packed_tokens: int = 0
    micro_batches: int = 0
    skipped: set[int] = field(default_factory=set)
    """Rows that had nothing to teach."""

    def join(self, team: RankGroup) -> None:
        """Take in what the others of the team have counted."""
        mine = {} if self.sums is None else {one.name: getattr(self.sums, one.name) for one in fields(PolicyMetricSums)}
        most = [name for name in mine if name.endswith("_max")]
        added = [name for name in mine if name not in most]
        counted = (self.value_loss, self.entropy, self.packed_tokens, self.micro_batches)
        sums, largest = team.joined(
            _numbers([*counted, *(mine[name] for name in added)]), _numbers([mine[name] for name in most])
        )
        self.value_loss, self.entropy = float(sums[0]), sums[1]
        self.packed_tokens, self.micro_batches = int(sums[2]), int(sums[3])
        if mine:
            self.sums = PolicyMetricSums(**dict(zip([*added, *most], [*sums[len(counted) :], *largest], strict=True)))

    def metrics(self, batch: TokenBatch) -> dict[str, float]:
        """By the names they are logged under."""
        found = {} if self.sums is None else self.sums.summary()
        for name in ("loss", "pg_loss", "kl_loss"):
            found[name] = found.get(name, 0.0) / max(self.steps, 1)
        return {
            **found,
            "entropy": float(self.entropy) / max(found.get("actions", 0.0), 1.0),
            "grad_norm": self.grad_norm / max(self.steps, 1),
            "learning_rate": self.learning_rate,
            "value_loss": self.value_loss / max(self.steps, 1),
            "optimizer_steps": float(self.steps),
            "micro_batches": float(self.micro_batches),
            "samples": float(len(batch.rows)),
            "tokens": float(batch.sequence_N.numel()),
            "packed_tokens": float(self.packed_tokens),
            "unpacked_tokens": float(sum(len(row.tokens) for row in batch.rows)),
            "skipped_samples": float(len(self.skipped)),
            "masked_samples": float(len(batch.rows) - len(_with_some(batch.rows, batch.mask_N))),
            "lag_mean": float(batch.lag_N.mean()),
            "lag_max": float(batch.lag_N.max()),
            "reward": 0.0 if batch.reward_S is None else float(batch.reward_S.mean()),
        }


def _numbers(values: Sequence[Tensor | float]) -> Tensor:
    """One after the other, where the first tensor among them is."""
    device = next((value.device for value in values if isinstance(value, Tensor)), "cpu")
    return (
        torch.tensor([], dtype=torch.float64, device=device)
        if not values
        else torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    )


def compute_advantages(
    batch: ScoredBatch, params: AdvantageSettings | None, kl_coef: float, more: Mapping[str, Any] | None = None
) -> Advantages:
    """From scores by the configured estimator, or each sample's own. `more` is what some estimators read beside."""
    if params is None:
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
        **(more or {}),
    )
    return estimate_advantages(rewards, params, kl_coef=kl_coef)


def make_estimator_inputs(batch: TokenBatch) -> dict[str, Any]:
    """Beside the scores."""
    return {
        "logp_N": batch.behaviour_N if batch.proximal_N is None else batch.proximal_N,
        "reference_N": batch.reference_N,
        "value_N": batch.value_N,
        "steps": batch.steps,
    }


def update_policy(
    trained: TrainableState,
    batch: TokenBatch,
    made: Advantages,
    settings: LocalSettings,
    version: int,
    gate: CommitGate,
) -> UpdateReport:
    """All optimizer steps of one batch, or none."""
    report = UpdateReport()
    minis = list(iterate_mini_batches(batch.rows, settings))

    def gradients(rows: Sequence[TokenRow]) -> None:
        _gradients(trained, batch, made, rows, settings, report, gate)

    apply_optimizer_steps(trained.optimizers, minis, gradients, report, version, gate)
    report.join(trained.team)
    return report


def _gradients(
    trained: TrainableState,
    batch: TokenBatch,
    made: Advantages,
    rows: Sequence[TokenRow],
    settings: LocalSettings,
    report: UpdateReport,
    gate: CommitGate,
) -> None:
    """Add up the gradients of one mini-batch."""
    inside_N = torch.zeros_like(made.mask_N)
    inside_N[rows[0].first : rows[-1].first + len(rows[-1].actions)] = True
    totals = BatchTotals.of(made.mask_N & inside_N, batch.sequence_N, len(batch.rows))
    unmasked = _with_some(rows, made.mask_N)
    skips = settings.objective.skips_zero_advantages
    taught = _with_some(rows, made.mask_N & (made.advantage_N != 0)) if skips else unmasked
    report.skipped |= {row.first for row in rows} - {row.first for row in taught}
    for pack in trained.team.packs(taught, settings):
        gate.check()
        _policy_part(trained.policy, batch, made, pack, totals, settings, report)
    if trained.critic is not None:
        for pack in trained.team.packs(unmasked, settings):
            gate.check()
            report.value_loss += _critic_part(trained.critic, batch, made, pack, totals, settings)


def _with_some(rows: Sequence[TokenRow], which_N: Tensor) -> list[TokenRow]:
    """Those with an action among `which_N`."""
    which = which_N.cpu().numpy()
    return [row for row in rows if which[row.first : row.first + len(row.actions)].any()]


def _policy_part(
    policy: PolicyModel,
    batch: TokenBatch,
    made: Advantages,
    pack: TokenPack,
    totals: BatchTotals,
    settings: LocalSettings,
    report: UpdateReport,
) -> None:
    """Forward and backward of one pack."""
    out, at = policy.logps(pack), pack.action_N

    def here(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else x_N[at]

    rewards_N = None if batch.reward_S is None else batch.reward_S[batch.sequence_N[at]]
    actions = Actions(
        logp_N=out.logp_N,
        behaviour_N=batch.behaviour_N[at],
        advantage_N=made.advantage_N[at],
        mask_N=made.mask_N[at],
        sequence_N=batch.sequence_N[at],
        sequences=len(batch.rows),
        proximal_N=here(batch.proximal_N),
        reference_N=here(batch.reference_N),
        reward_N=rewards_N,
        entropy_N=out.entropy_N if settings.objective.entropy_coef else out.entropy_N.detach(),
    )
    result = settings.objective(actions, totals)
    result.loss.backward()  # type: ignore[no-untyped-call]
    report.sums = result.sums if report.sums is None else report.sums + result.sums
    report.entropy = report.entropy + (out.entropy_N.detach() * actions.mask_N).sum()
    if at.numel():
        report.packed_tokens += pack.token_L.numel()
        report.micro_batches += 1


def _critic_part(
    critic: CriticModel,
    batch: TokenBatch,
    made: Advantages,
    pack: TokenPack,
    totals: BatchTotals,
    settings: LocalSettings,
) -> float:
    value_N, at = critic.values(pack), pack.action_N
    old_N = require_input(batch.value_N, "values", "the critic")[at]
    return_N = require_input(made.return_N, "returns", "the critic")[at]
    error_N = compute_value_loss(value_N, old_N.to(value_N.dtype), return_N.to(value_N.dtype), settings.value_clip)
    weight_N = make_action_weights("token-mean", batch.sequence_N[at], totals, norm_length=1, dtype=value_N.dtype)
    loss = sum_weighted(error_N, made.mask_N[at], weight_N)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
