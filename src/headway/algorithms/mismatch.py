"""Correction of the mismatch between trainer and engine, whose probabilities differ even with the same weights.

The correction multiplies any policy loss by the weight min(exp(ℓ_p − ℓ_b), C), and drops actions or sequences whose
exp(ℓ_p − ℓ_b), or exp(ℓ_p) − exp(ℓ_b), leaves [low, high], or whose distance k2 or k3 is above a bound. Both are
constants for the gradient. Filters work one after the other: a filter of sequences reads the actions that the filters
before it kept. A dropped action leaves the numerator only; denominators stay those of the batch (`actions.py`), so
dropping many actions makes the step smaller and never noisier.

The levels of sequences and turns need whole sequences. Legend: N packed actions, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import (
    RatioLevel,
    clamp_log_ratio,
    count_by_sequence,
    importance_ratio_at,
    mean_by_sequence,
    sum_by_sequence,
)
from headway.config import TrainInferCorrectionConfig
from headway.errors import InvariantBroken

_TINY_MEAN = 1e-8
"""Mean below which weights are left as they are."""
FilterLevel = RatioLevel | Literal["largest"]
"""Levels of ratios, and sequences with the largest value of their actions."""
MismatchLevel = RatioLevel | Literal["segment"]
"""Levels of ratios, and turns with the geometric mean of their actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeightSettings:
    """The truncated importance weight."""

    level: MismatchLevel = "token"
    upper_bound: float = 1.2
    normalised: bool = False
    """Whether weights are divided by their mean over the batch (`BatchTotals.mean_weight`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioFilterSettings:
    """One mask: ratios inside [low, high], or distances up to `high`, stay, if differences are in their range too."""

    level: MismatchLevel | Literal["largest"] = "token"
    measure: Literal["ratio", "k2", "k3"] = "ratio"
    low: float = 0.8
    high: float = 1.2
    difference_low: float | None = None
    difference_high: float | None = None


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
        weight=ImportanceWeightSettings(
            level=weight.weight_type, upper_bound=weight.upper_bound, normalised=weight.batch_normalize
        )
        if weight.enabled
        else None,
        filters=tuple(
            RatioFilterSettings(
                level=one.agg_type,
                measure=one.measure,
                low=one.ratio_low,
                high=one.ratio_high,
                difference_low=one.diff_low,
                difference_high=one.diff_high,
            )
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
    turn_N: Tensor | None = None,
    turns: int = 0,
) -> Tensor:
    """Return min(exp(ℓ_p − ℓ_b), C) at the configured level, without gradient."""
    part_N, parts = _choose_parts(params.level, sequence_N, sequences, turn_N, turns)
    level: RatioLevel = "geometric" if params.level == "segment" else params.level
    ratio_N = importance_ratio_at(level, proximal_N, behaviour_N, mask_N, part_N, parts)
    return ratio_N.detach().clamp(max=params.upper_bound)


def compute_mean_weight(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    params: ImportanceWeightSettings,
    turn_N: Tensor | None = None,
    turns: int = 0,
) -> float:
    """Return the mean weight of all trained actions of a batch, or of its sequences or turns where these have weights.

    Call it with the whole batch. The mean of a batch without trained actions, or of weights that vanish, is 1.
    """
    given = (proximal_N, behaviour_N, mask_N, sequence_N, sequences, params, turn_N, turns)
    weight_N = importance_weight(*given).double()
    if params.level == "token":
        found = weight_N[mask_N]
    else:
        part_N, parts = _choose_parts(params.level, sequence_N, sequences, turn_N, turns)
        found = mean_by_sequence(weight_N, mask_N, part_N, parts)[count_by_sequence(mask_N, part_N, parts) > 0]
    mean = float(found.mean()) if found.numel() else 1.0
    return mean if mean > _TINY_MEAN else 1.0


def filter_mask(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    filters: Sequence[RatioFilterSettings],
    turn_N: Tensor | None = None,
    turns: int = 0,
) -> Tensor:
    """Return `mask_N` without what the filters drop."""
    kept_N = mask_N
    with torch.no_grad():
        for one in filters:
            part_N, parts = _choose_parts(one.level, sequence_N, sequences, turn_N, turns)
            level: FilterLevel = "geometric" if one.level == "segment" else one.level
            found_N = _measure(proximal_N, behaviour_N, kept_N, part_N, parts, level, one.measure)
            inside_N = (found_N <= one.high) & ((found_N >= one.low) | (one.measure != "ratio"))
            if one.difference_low is not None or one.difference_high is not None:
                difference_N = _aggregate(proximal_N.exp() - behaviour_N.exp(), level, kept_N, part_N, parts)
                inside_N &= difference_N >= (float("-inf") if one.difference_low is None else one.difference_low)
                inside_N &= difference_N <= (float("inf") if one.difference_high is None else one.difference_high)
            kept_N = kept_N & inside_N
    return kept_N


def _choose_parts(
    level: FilterLevel | Literal["segment"], sequence_N: Tensor, sequences: int, turn_N: Tensor | None, turns: int
) -> tuple[Tensor, int]:
    """Return the parts that a level is computed for: turns or sequences."""
    if level != "segment":
        return sequence_N, sequences
    if turn_N is None:
        raise InvariantBroken("a correction of turns reads turn_N, and the trainer gave none")
    return turn_N, turns


def _measure(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    part_N: Tensor,
    parts: int,
    level: FilterLevel,
    measure: Literal["ratio", "k2", "k3"],
) -> Tensor:
    """Return what a filter bounds, one number per action; actions of a part share theirs."""
    if measure == "ratio" and level != "largest":
        return importance_ratio_at(level, proximal_N, behaviour_N, mask_N, part_N, parts)
    log_N = clamp_log_ratio(proximal_N - behaviour_N)
    distance_N = {"ratio": log_N.exp(), "k2": 0.5 * log_N.square(), "k3": log_N.expm1() - log_N}[measure]
    return _aggregate(distance_N, level, mask_N, part_N, parts)


def _aggregate(x_N: Tensor, level: FilterLevel, mask_N: Tensor, part_N: Tensor, parts: int) -> Tensor:
    """Return `x_N` itself, or the mean (`geometric`), sum (`sequence`) or largest of the masked actions of a part."""
    if level == "token":
        return x_N
    if level == "geometric":
        return mean_by_sequence(x_N, mask_N, part_N, parts)[part_N]
    if level == "largest":
        low_P = x_N.new_full((parts,), -torch.inf)
        return low_P.scatter_reduce(0, part_N, x_N.masked_fill(~mask_N, -torch.inf), "amax")[part_N]
    return sum_by_sequence(torch.where(mask_N, x_N, torch.zeros_like(x_N)), part_N, parts)[part_N]
