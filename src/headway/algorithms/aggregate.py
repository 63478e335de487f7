"""From losses of actions to one number, with denominators of the whole batch.

An aggregation is a weight per action, made of `BatchTotals`: counted once over everything that one optimizer step
sees, and handed to each micro-batch. A loss is then a plain sum of w·m·L, so that cutting a batch into micro-batches,
packing it differently or spreading it over ranks changes no gradient: gradients of the parts are *summed*. (Where a
library averages over ranks, multiply by their number.)

Masks apply to the numerator here; a batch without trained actions has the loss 0 and the gradient 0.

Legend: N packed actions, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.packing import sequence_lengths
from headway.errors import InvariantBroken

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


def action_weights(
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


def weighted_sum(x_N: Tensor, mask_N: Tensor, weight_N: Tensor) -> Tensor:
    """Σ w·m·x: this micro-batch's part of the batch's loss."""
    return (torch.where(mask_N, x_N, torch.zeros_like(x_N)) * weight_N).sum()
