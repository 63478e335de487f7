"""Sums over sequences of packed actions, and the way from packed actions to rows and back.

Packed means one dimension: the actions of all sequences of a micro-batch one after the other (or interleaved),
beside them the number of the sequence each belongs to. Padding needs no special case: it is masked.

Guarantees: sums and means are differentiable, empty sequences give 0 and never NaN. Actions of one sequence must be
in the order of time; sequences need not be contiguous. Does not split sequences: that is the trainer's choice.

Legend: N actions, M masked actions among them, S sequences, T columns (longest sequence).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sequence_sums(x_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sum of `x_N` over the actions of each sequence, [S]."""
    return x_N.new_zeros(sequences).index_add(0, sequence_N, x_N)


def sequence_lengths(mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Masked actions of each sequence, [S], as integers."""
    return sequence_sums(mask_N.long(), sequence_N, sequences)


def sequence_means(x_N: Tensor, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Mean of `x_N` over the masked actions of each sequence, [S]; 0 where there are none."""
    sums_S = sequence_sums(torch.where(mask_N, x_N, torch.zeros_like(x_N)), sequence_N, sequences)
    return sums_S / sequence_lengths(mask_N, sequence_N, sequences).clamp(min=1)


def row_ids(mask_BT: Tensor) -> Tensor:
    """Sequence numbers of a padded [B, T] batch, flattened to [B·T]: the number of the row."""
    rows, columns = mask_BT.shape
    return torch.arange(rows, device=mask_BT.device).repeat_interleave(columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Where each masked action sits when every sequence becomes a row without gaps."""

    position_M: Tensor
    """Index of the action among the N packed ones."""
    row_M: Tensor
    column_M: Tensor
    length_S: Tensor
    """Masked actions of each sequence."""
    packed: int
    """N."""

    @classmethod
    def of(cls, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Rows:
        picked_M = mask_N.nonzero().squeeze(1)
        order_M = torch.argsort(sequence_N[picked_M], stable=True)
        row_M = sequence_N[picked_M][order_M]
        length_S = torch.bincount(row_M, minlength=sequences)
        start_S = length_S.cumsum(0) - length_S
        column_M = torch.arange(row_M.shape[0], device=row_M.device) - start_S[row_M]
        return cls(
            position_M=picked_M[order_M],
            row_M=row_M,
            column_M=column_M,
            length_S=length_S,
            packed=mask_N.shape[0],
        )

    def spread(self, x_N: Tensor) -> Tensor:
        """Packed → [S, T], zeros behind the end of each row."""
        longest = int(self.length_S.max()) if self.length_S.numel() else 0
        x_ST = x_N.new_zeros(self.length_S.shape[0], longest)
        x_ST[self.row_M, self.column_M] = x_N[self.position_M]
        return x_ST

    def gather(self, x_ST: Tensor) -> Tensor:
        """[S, T] → packed, zeros where the mask is off."""
        x_N = x_ST.new_zeros(self.packed)
        x_N[self.position_M] = x_ST[self.row_M, self.column_M]
        return x_N

    def at_end(self, x_S: Tensor) -> Tensor:
        """One number per sequence → packed, on its last masked action; empty sequences lose theirs."""
        x_N = x_S.new_zeros(self.packed)
        last_M = self.column_M == self.length_S[self.row_M] - 1
        x_N[self.position_M[last_M]] = x_S[self.row_M[last_M]]
        return x_N
