"""Which samples of a batch are trained, how much each counts, and whether an episode or a turn is one sample.

The difficulty of a prompt is measured by the mean score of its group: `difficulty_mask` leaves out groups that are
nearly always or nearly never right. `difficulty_loss_weight` reads the field `difficulty` of a task (0 to 1, harder is
larger), and `length_loss_weight` counts long answers less. Weights of a batch have a mean of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headway.algorithm_traits import is_greedy_member
from headway.types import Sample, SampleGroup

_DIFFICULTY = "difficulty"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSelection:
    """The options of the module's docstring, and `mask_truncated_samples`."""

    mask_truncated: bool = False
    """Leave truncated samples out of the loss; they stay in the statistics of their group."""
    score_range: tuple[float, float] | None = None
    """Train only groups whose mean score lies between these two, both excluded."""
    by_difficulty: bool = False
    by_length: bool = False
    by_turn: bool = False
    """Each turn of an episode is a sequence of its own in the loss, and in ratios over sequences."""

    def select(self, groups: Sequence[SampleGroup]) -> list[bool]:
        """Return for every sample with actions whether it is trained."""
        return [
            self._has_fitting_score(group)
            and not (self.mask_truncated and sample.episode.cut_off)
            and not is_greedy_member(sample.sample_id)
            for group in groups
            for sample in group.samples
            if sample.actions
        ]

    def weigh(self, samples: Sequence[Sample]) -> list[float] | None:
        """Return the weight of every sample in the loss, or None if all count the same."""
        if not (self.by_difficulty or self.by_length) or not samples:
            return None
        weights = [1.0] * len(samples)
        if self.by_difficulty:
            weights = [weight * _weigh_difficulty(sample) for weight, sample in zip(weights, samples, strict=True)]
        if self.by_length:
            lengths = [sample.actions for sample in samples]
            spread = max(lengths) - min(lengths) or 1
            shares = [(length - min(lengths)) / spread for length in lengths]
            weights = [weight * (1.5 - share) for weight, share in zip(weights, shares, strict=True)]
        mean = fmean(weights)
        return [weight / mean for weight in weights]

    def _has_fitting_score(self, group: SampleGroup) -> bool:
        scores = [sample.score.value for sample in group.samples if sample.score is not None]
        if self.score_range is None or not scores:
            return True
        low, high = self.score_range
        return low < fmean(scores) < high


TRAIN_EVERYTHING = SampleSelection()
"""Every sample is trained and counts the same."""


def _weigh_difficulty(sample: Sample) -> float:
    value = sample.episode.task.data.get(_DIFFICULTY)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1.0
    return 0.5 + 1.5 * min(max(float(value), 0.0), 1.0)
