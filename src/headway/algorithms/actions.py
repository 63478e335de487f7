"""The packed actions of one micro-batch, and how losses of single actions become the loss of a batch.

`Actions` holds everything that a policy loss may read. Its `cleaned` copy guarantees that values at masked positions
(NaN and infinities included) reach neither the loss nor the gradient, that only ℓ and the entropy carry gradients, and
that half precision is computed in float32.

An aggregation mode is a weight per action. The weights come from `BatchTotals`, which is counted once over everything
that one optimizer step sees and is handed to each micro-batch. A loss is then a plain sum of weight · mask · loss, so
micro-batches, packing and ranks change no gradient as long as gradients are summed. (Where a library averages over
ranks, multiply by their number.) A batch without trained actions has loss 0 and gradient 0.

Legend: N packed actions, S sequences of the batch (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import count_by_sequence
from headway.errors import InvariantBroken

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actions:
    """One micro-batch. All tensors are [N]."""

    logp_N: Tensor
    """ℓ, the log-probability under the weights being trained, with gradient."""
    behaviour_N: Tensor
    """ℓ_b, the log-probability that the engine reported when it made the action."""
    advantage_N: Tensor
    mask_N: Tensor
    """Actions that are trained."""
    sequence_N: Tensor
    """The sequence that each action belongs to: a number below `sequences`, the same in every micro-batch."""
    sequences: int
    """S."""
    proximal_N: Tensor | None = None
    """ℓ_p, under the weights at the start of the step. Read by `decoupled_ppo` and by the mismatch correction."""
    reference_N: Tensor | None = None
    """ℓ_ref, under the reference model. Read by the KL term."""
    reward_N: Tensor | None = None
    """Reward of the action's sample before any normalisation. Read by `topr`."""
    entropy_N: Tensor | None = None
    """Entropy of the policy at the action, with gradient where it has a coefficient."""
    turn_N: Tensor | None = None
    """The turn that each action belongs to: a number below `turns`. Read by the mismatch correction."""
    turns: int = 0

    def cleaned(self) -> Actions:
        """Return a copy with zeros where the mask is off, constants detached and at least float32 throughout."""
        mask_N, dtype = self.mask_N.bool(), torch.promote_types(self.logp_N.dtype, torch.float32)
        values: dict[str, Any] = {
            name: _zero_masked(value if name in _WITH_GRADIENT else value.detach(), mask_N, dtype)
            for name, value in self._tensors().items()
            if name not in _NOT_VALUES
        }
        return replace(self, mask_N=mask_N, **values)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


_WITH_GRADIENT = frozenset({"logp_N", "entropy_N"})
_NOT_VALUES = frozenset({"mask_N", "sequence_N", "turn_N"})


def _zero_masked(x_N: Tensor, mask_N: Tensor, dtype: torch.dtype) -> Tensor:
    wide_N = x_N.to(dtype)
    return torch.where(mask_N, wide_N, torch.zeros_like(wide_N))


def require_input(x_N: Tensor | None, name: str, reader: str) -> Tensor:
    """Return `x_N`; raise `InvariantBroken`, which names the reader, if the trainer did not supply it."""
    if x_N is None:
        raise InvariantBroken(f"{reader} reads {name}, and the trainer gave none")
    return x_N


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTotals:
    """The denominators of one optimizer step."""

    actions: int
    """Trained actions of the global batch."""
    sequences: int
    """Sequences of the global batch that have any trained action."""
    length_S: Tensor
    """Trained actions of each sequence, by its number. A rank needs those of its own sequences only."""
    mean_weight: float = 1.0
    """Mean of the mismatch weights of the whole batch, where they are divided by it."""

    @classmethod
    def of(cls, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> BatchTotals:
        """Count a whole batch, before it is cut into micro-batches."""
        length_S = count_by_sequence(mask_N.bool(), sequence_N, sequences)
        return cls(actions=int(length_S.sum()), sequences=int((length_S > 0).sum()), length_S=length_S)

    def require_whole(self, mask_N: Tensor, sequence_N: Tensor) -> None:
        """Raise `InvariantBroken` if the micro-batch holds only a part of some sequence."""
        here_S = count_by_sequence(mask_N, sequence_N, self.length_S.shape[0])
        torn = ((here_S > 0) & (here_S != self.length_S)).nonzero().flatten().tolist()
        if torn:
            raise InvariantBroken(
                f"a loss over sequences was given parts of the sequences {torn[:8]}: "
                f"{int(here_S[torn[0]])} of {int(self.length_S[torn[0]])} actions of the first"
            )


def make_action_weights(
    mode: AggregationMode, sequence_N: Tensor, totals: BatchTotals, *, norm_length: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each action, [N]. `norm_length` is the constant of `seq-mean-token-sum-norm`."""
    if mode in ("token-mean", "token-sum"):
        actions = max(totals.actions, 1) if mode == "token-mean" else 1
        return torch.full(sequence_N.shape, 1 / actions, dtype=dtype, device=sequence_N.device)
    per_sequence = 1 / max(totals.sequences, 1)
    if mode == "seq-mean-token-mean":
        return per_sequence / totals.length_S.clamp(min=1).to(dtype)[sequence_N]
    if mode == "seq-mean-token-sum-norm":
        per_sequence /= norm_length
    return torch.full(sequence_N.shape, per_sequence, dtype=dtype, device=sequence_N.device)


def sum_weighted(x_N: Tensor, mask_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return Σ weight · mask · x: this micro-batch's part of the loss of the batch."""
    return (torch.where(mask_N, x_N, torch.zeros_like(x_N)) * weight_N).sum()
