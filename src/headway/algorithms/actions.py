"""The packed actions of one micro-batch: everything a policy loss may read.

Guarantees (after `cleaned`): what stands at masked-out positions, NaN and infinities included, reaches neither the
loss nor the gradient; only ℓ and the entropy carry gradients; half precision is computed in float32.

Legend: N packed actions, S sequences of the batch (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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


def required(x_N: Tensor | None, name: str, reader: str) -> Tensor:
    """`x_N`, or an error that says who wanted it."""
    if x_N is None:
        raise InvariantBroken(f"{reader} reads {name}, and the trainer gave none")
    return x_N
