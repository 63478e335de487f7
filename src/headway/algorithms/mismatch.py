"""Correction of the mismatch between trainer and engine, whose probabilities differ even with the same weights.

The correction multiplies any policy loss by the weight min(exp(ℓ_p − ℓ_b), C), and drops actions or sequences whose
exp(ℓ_p − ℓ_b) leaves [low, high]. Both are constants for the gradient. Filters work one after the other: a filter of
sequences reads the actions that the filters before it kept. A dropped action leaves the numerator only; denominators
stay those of the batch (`actions.py`), so dropping many actions makes the step smaller and never noisier.

The levels of sequences need whole sequences. Legend: N packed actions, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import RatioLevel, importance_ratio_at
from headway.config import TrainInferCorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeightSettings:
    """The truncated importance weight."""

    level: RatioLevel = "token"
    upper_bound: float = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioFilterSettings:
    """One mask: ratios inside [low, high] stay."""

    level: RatioLevel = "token"
    low: float = 0.8
    high: float = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCorrection:
    """The whole correction; without weight and filters it changes nothing."""

    weight: ImportanceWeightSettings | None = None
    filters: tuple[RatioFilterSettings, ...] = ()

    @property
    def active(self) -> bool:
        """Whether ℓ_p is read at all."""
        return self.weight is not None or bool(self.filters)

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether the weight or a filter reads sequences."""
        levels = [one.level for one in self.filters] + ([self.weight.level] if self.weight else [])
        return any(level != "token" for level in levels)


NO_CORRECTION = MismatchCorrection()


def make_mismatch_correction(config: TrainInferCorrectionConfig) -> MismatchCorrection:
    """Read `train_infer_correction`; what is not enabled is left out."""
    weight = config.is_weight
    return MismatchCorrection(
        weight=ImportanceWeightSettings(level=weight.weight_type, upper_bound=weight.upper_bound)
        if weight.enabled
        else None,
        filters=tuple(
            RatioFilterSettings(level=one.agg_type, low=one.ratio_low, high=one.ratio_high)
            for one in config.filters
            if one.enabled
        ),
    )


def importance_weight(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    params: ImportanceWeightSettings,
) -> Tensor:
    """Return min(exp(ℓ_p − ℓ_b), C) at the configured level, without gradient."""
    ratio_N = importance_ratio_at(params.level, proximal_N, behaviour_N, mask_N, sequence_N, sequences)
    return ratio_N.detach().clamp(max=params.upper_bound)


def filter_mask(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    filters: Sequence[RatioFilterSettings],
) -> Tensor:
    """Return `mask_N` without what the filters drop."""
    kept_N = mask_N
    with torch.no_grad():
        for one in filters:
            ratio_N = importance_ratio_at(one.level, proximal_N, behaviour_N, kept_N, sequence_N, sequences)
            kept_N = kept_N & (ratio_N >= one.low) & (ratio_N <= one.high)
    return kept_N
