"""Sums over sequences of packed actions, importance ratios, and the way from packed actions to rows and back.

Packed means one dimension: the actions of all sequences of a micro-batch one after the other (or interleaved), beside
them the number of the sequence that each belongs to. Padding needs no special case because it is masked.

Guarantees: sums and means are differentiable; empty sequences give 0, never NaN. A log-ratio is clamped to
±`MAX_LOG_RATIO` before its exponential is taken (e²⁰ ≈ 5e8, far outside every clip range), so ratios are never infinite
or NaN for finite or −inf log-probabilities. Beyond the clamp the gradient through the ratio is 0, since such an action
says nothing about the policy that is trained. Actions of one sequence must be in the order of time; sequences need not
be contiguous.

Legend: N actions, M masked actions among them, S sequences, T columns (longest sequence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest absolute log-ratio whose exponential is taken."""

RatioLevel = Literal["token", "sequence", "geometric"]
"""Ratio per action, per sequence as a product, or per sequence as a geometric mean."""


def sum_by_sequence(x_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Return the sum of `x_N` over the actions of each sequence, [S]."""
    return x_N.new_zeros(sequences).index_add(0, sequence_N, x_N)


def count_by_sequence(mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Return the number of masked actions of each sequence, [S], as integers."""
    return sum_by_sequence(mask_N.long(), sequence_N, sequences)


def mean_by_sequence(x_N: Tensor, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Return the mean of `x_N` over the masked actions of each sequence, [S]; 0 where there are none."""
    sums_S = sum_by_sequence(torch.where(mask_N, x_N, torch.zeros_like(x_N)), sequence_N, sequences)
    return sums_S / count_by_sequence(mask_N, sequence_N, sequences).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """The place of each masked action when every sequence becomes a row without gaps."""

    position_M: Tensor
    """Index of the action among the N packed ones."""
    row_M: Tensor
    column_M: Tensor
    length_S: Tensor
    """Masked actions of each sequence."""
    packed: int
    """N."""

    @classmethod
    def of(cls, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> RowLayout:
        picked_M = mask_N.nonzero().squeeze(1)
        order_M = torch.argsort(sequence_N[picked_M], stable=True)
        row_M = sequence_N[picked_M][order_M]
        length_S = torch.bincount(row_M, minlength=sequences)
        start_S = length_S.cumsum(0) - length_S
        column_M = torch.arange(row_M.shape[0], device=row_M.device) - start_S[row_M]
        packed = mask_N.shape[0]
        return cls(position_M=picked_M[order_M], row_M=row_M, column_M=column_M, length_S=length_S, packed=packed)

    def to_rows(self, x_N: Tensor) -> Tensor:
        """Lay packed values out as rows, [S, T], with zeros behind the end of each row."""
        longest = int(self.length_S.max()) if self.length_S.numel() else 0
        x_ST = x_N.new_zeros(self.length_S.shape[0], longest)
        x_ST[self.row_M, self.column_M] = x_N[self.position_M]
        return x_ST

    def to_packed(self, x_ST: Tensor) -> Tensor:
        """Pack rows, [N], with zeros where the mask is off."""
        x_N = x_ST.new_zeros(self.packed)
        x_N[self.position_M] = x_ST[self.row_M, self.column_M]
        return x_N

    def place_at_end(self, x_S: Tensor) -> Tensor:
        """Put one number per sequence on its last masked action, [N]; an empty sequence loses its number."""
        x_N = x_S.new_zeros(self.packed)
        last_M = self.column_M == self.length_S[self.row_M] - 1
        x_N[self.position_M[last_M]] = x_S[self.row_M[last_M]]
        return x_N


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp `log_ratio` to the range in which its exponential is harmless."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(logp_N: Tensor, base_N: Tensor) -> Tensor:
    """Return exp(ℓ − ℓ_base) per action; the base is a constant."""
    return clamp_log_ratio(logp_N - base_N.detach()).exp()


def importance_ratio_at(
    level: RatioLevel, logp_N: Tensor, base_N: Tensor, mask_N: Tensor, sequence_N: Tensor, sequences: int
) -> Tensor:
    """Return exp(ℓ − ℓ_base) at `level`, one number per action; actions of a sequence share theirs.

    The levels of sequences read masked actions only and need whole sequences.
    """
    log_ratio_N = logp_N - base_N.detach()
    if level == "token":
        return clamp_log_ratio(log_ratio_N).exp()
    if level == "geometric":
        log_ratio_S = mean_by_sequence(log_ratio_N, mask_N, sequence_N, sequences)
    else:
        masked_N = torch.where(mask_N, log_ratio_N, torch.zeros_like(log_ratio_N))
        log_ratio_S = sum_by_sequence(masked_N, sequence_N, sequences)
    return clamp_log_ratio(log_ratio_S).exp()[sequence_N]
