"""What a practitioner looks at after a step, kept as sums so that micro-batches and ranks add up exactly.

Nothing here leaves the device until `summary`: a micro-batch costs no synchronisation. All tensors are scalars
without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headway.algorithms.ratio import bounded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicySums:
    """Sums over trained actions (fields ending in `_max`: the largest), and parts of the loss, which add up too."""

    loss: Tensor
    pg_loss: Tensor
    kl_loss: Tensor
    """Before its coefficient."""
    entropy_mean: Tensor
    """Entropy under the aggregation of the loss; 0 where none was given."""
    actions: Tensor
    clipped: Tensor
    dropped: Tensor
    """Actions that the mismatch filters took out."""
    ratio: Tensor
    """exp(ℓ − ℓ_b), as all of `ratio_*`."""
    ratio_squared: Tensor
    ratio_max: Tensor
    k1: Tensor
    """ℓ_b − ℓ: the plain estimate of KL(behaviour ‖ policy)."""
    k3: Tensor
    """r − 1 − log r: the same, never negative."""
    mismatch_k3: Tensor
    """The same for ℓ_p instead of ℓ: what trainer and engine disagree about; 0 without ℓ_p."""
    mismatch_ratio_max: Tensor
    advantage: Tensor

    def __add__(self, other: PolicySums) -> PolicySums:
        """Of two micro-batches, or two ranks."""
        return PolicySums(**{name: _join(name, getattr(self, name), getattr(other, name)) for name in _NAMES})

    def summary(self) -> dict[str, float]:
        """Plain numbers by the names they are logged under; a batch without actions gives zeros."""
        value = {name: float(getattr(self, name)) for name in _NAMES}
        actions = max(value["actions"], 1.0)
        squares = value["ratio_squared"] * actions
        return {
            "loss": value["loss"],
            "pg_loss": value["pg_loss"],
            "kl_loss": value["kl_loss"],
            "entropy": value["entropy_mean"],
            "actions": value["actions"],
            "clip_fraction": value["clipped"] / actions,
            "dropped_fraction": value["dropped"] / actions,
            "ratio_mean": value["ratio"] / actions,
            "ratio_max": value["ratio_max"],
            "ess": value["ratio"] ** 2 / squares if squares > 0 else 0.0,
            "behaviour_kl_k1": value["k1"] / actions,
            "behaviour_kl": value["k3"] / actions,
            "mismatch_kl": value["mismatch_k3"] / actions,
            "mismatch_ratio_max": value["mismatch_ratio_max"],
            "advantage_mean": value["advantage"] / actions,
        }


_NAMES = tuple(field.name for field in fields(PolicySums))


def _join(name: str, one: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(one, other) if name.endswith("_max") else one + other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divergence:
    """How far one policy is from the one that acted, summed over trained actions."""

    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    k1: Tensor
    k3: Tensor


def divergence(logp_N: Tensor, behaviour_N: Tensor, mask_N: Tensor) -> Divergence:
    """Ratios and KL of `logp_N` against `behaviour_N`."""
    with torch.no_grad():
        log_ratio_N = bounded(torch.where(mask_N, logp_N - behaviour_N, torch.zeros_like(logp_N)))
        ratio_N = torch.where(mask_N, log_ratio_N.exp(), torch.zeros_like(log_ratio_N))
        return Divergence(
            ratio=ratio_N.sum(),
            ratio_squared=ratio_N.square().sum(),
            ratio_max=torch.cat([ratio_N.flatten(), ratio_N.new_zeros(1)]).amax(),
            k1=-log_ratio_N.sum(),
            k3=(torch.expm1(log_ratio_N) - log_ratio_N).sum(),
        )
