"""The packed actions of one micro-batch: everything a policy loss may read.

Guarantees (after `cleaned`): what stands at masked-out positions, NaN and infinities included, reaches neither the
loss nor the gradient; only ℓ and the entropy carry gradients; half precision is computed in float32.

Legend: N packed actions, S sequences of the batch (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import sequence_lengths
from headway.errors import InvariantBroken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actions:
    """One micro-batch. All tensors are [N]."""

    logp_N: Tensor
    """ℓ, under the weights being trained, with gradient."""
    behaviour_N: Tensor
    """ℓ_b, from the engine that made the action."""
    advantage_N: Tensor
    mask_N: Tensor
    """Actions that are trained."""
    sequence_N: Tensor
    """Which sequence of the batch each belongs to: numbers below `sequences`, the same in every micro-batch."""
    sequences: int
    """S."""
    proximal_N: Tensor | None = None
    """ℓ_p, under the weights at the start of the step: for `decoupled_ppo` and the mismatch correction."""
    reference_N: Tensor | None = None
    """ℓ_ref: for the KL term."""
    reward_N: Tensor | None = None
    """Reward of the action's sample as it was given, before any normalisation: for `topr`."""
    entropy_N: Tensor | None = None
    """Entropy of the policy at the action, with gradient where it has a coefficient."""

    def select(self, index: Tensor) -> Actions:
        """The actions at `index` (numbers or booleans): a micro-batch of this one."""
        picked: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
        return replace(self, **picked)

    def cleaned(self) -> Actions:
        """With zeros where the mask is off, constants detached, all in the precision of ℓ but at least float32."""
        mask_N, dtype = self.mask_N.bool(), torch.promote_types(self.logp_N.dtype, torch.float32)
        values: dict[str, Any] = {
            name: _clean(value if name in _LEARNED else value.detach(), mask_N, dtype)
            for name, value in self._tensors().items()
            if name not in _NOT_VALUES
        }
        return replace(self, mask_N=mask_N, **values)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


_LEARNED = frozenset({"logp_N", "entropy_N"})
_NOT_VALUES = frozenset({"mask_N", "sequence_N"})


def _clean(x_N: Tensor, mask_N: Tensor, dtype: torch.dtype) -> Tensor:
    wide_N = x_N.to(dtype)
    return torch.where(mask_N, wide_N, torch.zeros_like(wide_N))


def require_input(x_N: Tensor | None, name: str, reader: str) -> Tensor:
    """`x_N`, or an error that says who wanted it."""
    if x_N is None:
        raise InvariantBroken(f"{reader} reads {name}, and the trainer gave none")
    return x_N


AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTotals:
    """The denominators of one optimizer step."""

    actions: int
    """Trained actions of the global batch."""
    sequences: int
    """Sequences of the global batch that have any."""
    length_S: Tensor
    """Trained actions of each sequence, by its number. A rank needs those of its own sequences only."""

    @classmethod
    def of(cls, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> BatchTotals:
        """Counted over a whole batch, before it is cut."""
        length_S = sequence_lengths(mask_N.bool(), sequence_N, sequences)
        return cls(actions=int(length_S.sum()), sequences=int((length_S > 0).sum()), length_S=length_S)

    def among(self, ranks: Iterable[BatchTotals]) -> BatchTotals:
        """This rank's totals with the counts of all `ranks` (itself included)."""
        everyone = list(ranks)
        return replace(
            self,
            actions=sum(one.actions for one in everyone),
            sequences=sum(one.sequences for one in everyone),
        )

    def require_whole(self, mask_N: Tensor, sequence_N: Tensor) -> None:
        """Refuse a micro-batch that holds only part of a sequence."""
        here_S = sequence_lengths(mask_N, sequence_N, self.length_S.shape[0])
        torn = ((here_S > 0) & (here_S != self.length_S)).nonzero().flatten().tolist()
        if torn:
            raise InvariantBroken(
                f"a loss over sequences was given parts of the sequences {torn[:8]}: "
                f"{int(here_S[torn[0]])} of {int(self.length_S[torn[0]])} actions of the first"
            )


def make_action_weights(
    mode: AggregationMode, sequence_N: Tensor, totals: BatchTotals, *, norm_length: int, dtype: torch.dtype
) -> Tensor:
    """What each action counts for, [N]. `norm_length` is the constant of `seq-mean-token-sum-norm`."""
    if mode == "token-mean":
        return torch.full(sequence_N.shape, 1 / max(totals.actions, 1), dtype=dtype, device=sequence_N.device)
    per_sequence = 1 / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return per_sequence / totals.length_S.clamp(min=1).to(dtype)[sequence_N]
    if mode == "seq-mean-token-sum-norm":
        per_sequence /= norm_length
    return torch.full(sequence_N.shape, per_sequence, dtype=dtype, device=sequence_N.device)


def sum_weighted(x_N: Tensor, mask_N: Tensor, weight_N: Tensor) -> Tensor:
    """Σ w·m·x: this micro-batch's part of the batch's loss."""
    return (torch.where(mask_N, x_N, torch.zeros_like(x_N)) * weight_N).sum()
