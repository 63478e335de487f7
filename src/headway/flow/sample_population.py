"""Measures whether training sees what rollout makes: length and reward of samples that were started, dropped, trained.

A policy that drops stragglers trains shorter answers than the model gives, and nothing in the loss shows it. So every
step reports three means of length and of reward:

* `trained`: the batch.
* `dropped`: samples that should have been trained and were not, with the actions that they had. Groups that were
  filtered for what they contain (equal rewards, a stage of a plugin) are left out: dropping those is intended.
* `started`: samples of the first attempt at each task, counted when they end. A task that was dropped and drawn again
  does not count again, because tasks with long answers would count many times. The final length of a sample that was
  dropped in flight is unknown, so the mean is the estimate of Kaplan and Meier, in which such a sample counts as at
  least as long as it was. Without such samples it is the plain mean.

Samples that are still under way when the run ends count nowhere. `bias/…` is trained against started since the process
began, as a share: of the started mean, or for rewards of their spread if that is larger.
"""

from collections import Counter
from collections.abc import Iterable
from math import sqrt

from headway.types import DropReason, Episode, SampleGroup

_INTENDED = (DropReason.ZERO_VARIANCE, DropReason.FILTERED)


class MeanLengthEstimate:
    """Estimates the mean of lengths of which some are only known to be at least so large."""

    def __init__(self) -> None:
        self._known: Counter[int] = Counter()
        self._at_least: Counter[int] = Counter()

    def add(self, length: int, *, finished: bool) -> None:
        """Count one sample; one that did not finish would have become at least `length` long."""
        (self._known if finished else self._at_least)[length] += 1

    def update(self, other: "MeanLengthEstimate") -> None:
        """Count everything that `other` has counted."""
        self._known.update(other._known)
        self._at_least.update(other._at_least)

    def mean(self) -> float | None:
        """Return the estimate; `None` if no finished sample was counted."""
        if not self._known:
            return None
        at_risk, share, mean, before = self._known.total() + self._at_least.total(), 1.0, 0.0, 0
        for length in sorted(self._known | self._at_least):
            mean += share * (length - before)
            share *= 1 - self._known[length] / at_risk
            at_risk -= self._known[length] + self._at_least[length]
            before = length
        return mean


class RunningMean:
    """Mean and spread of numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self._squares += value * value

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def spread(self) -> float:
        """Return the standard deviation."""
        return sqrt(max(0.0, self._squares / self.count - (self.total / self.count) ** 2)) if self.count else 0.0


class _Counts:
    """What has ended since some moment."""

    def __init__(self) -> None:
        self.started = MeanLengthEstimate()
        self.lengths = {"dropped": RunningMean(), "trained": RunningMean()}
        self.rewards = {"started": RunningMean(), "dropped": RunningMean(), "trained": RunningMean()}


class SamplePopulation:
    """Follows every sample of training from its start to its end."""

    def __init__(self, drawn_again: Iterable[int] = ()) -> None:
        """`drawn_again` are the positions of tasks that an earlier process dropped."""
        self._drawn_again = set(drawn_again)
        self._repeated_groups: set[int] = set()
        """Groups under way that are not the first attempt at their task."""
        self._repeated: set[str] = set()
        """Samples of these groups."""
        self._finished: dict[str, int] = {}
        """Lengths of finished samples that have not ended, by sample id."""
        self._rewards: dict[str, float] = {}
        self._cancelled: dict[str, bool] = {}
        """Samples dropped in flight whose length is not final yet, and whether they are of a first attempt."""
        self._overdue: set[str] = set()
        """Those of them that were cancelled before the last step ended. A task that never began never reports."""
        self._step, self._run = _Counts(), _Counts()

    def start_group(self, group_id: int, position: int) -> None:
        if position in self._drawn_again:
            self._repeated_groups.add(group_id)

    def start_sample(self, sample_id: str, group_id: int) -> None:
        if group_id in self._repeated_groups:
            self._repeated.add(sample_id)

    def finish_sample(self, episode: Episode) -> None:
        self._finished[episode.sample_id] = sum(run.count for run in episode.runs)

    def grade(self, group: SampleGroup) -> None:
        self._rewards.update((s.sample_id, s.score.value) for s in group.samples if s.score is not None)

    def drop_sample(self, sample_id: str, reason: DropReason) -> None:
        """Count a dropped sample. One in flight is counted by `leave_sample`, which knows its length."""
        length, reward, first = self._forget(sample_id)
        if reason in _INTENDED:
            return
        if length is None:
            self._cancelled[sample_id] = first
        else:
            self._add("dropped", length, reward, first=first)

    def leave_sample(self, sample_id: str, length: int) -> None:
        """Note that nothing generates this sample any more, and how long it is."""
        first = self._cancelled.pop(sample_id, None)
        if first is not None:
            self._add("dropped", length, None, first=first, finished=False)

    def drop_group(self, group_id: int, position: int, reason: DropReason) -> None:
        """Forget a group whose samples were dropped."""
        self._repeated_groups.discard(group_id)
        if reason.regenerates:
            self._drawn_again.add(position)

    def train(self, group: SampleGroup) -> None:
        """Count the samples of a trained group."""
        self._repeated_groups.discard(group.group_id)
        self._drawn_again.discard(group.task.position)
        for sample in group.samples:
            _, _, first = self._forget(sample.sample_id)
            length = sum(run.count for run in sample.episode.runs)
            self._add("trained", length, None if sample.score is None else sample.score.value, first=first)

    def end_step(self) -> dict[str, float]:
        """Return the numbers of the step that ends, by the names of their curves, and begin the next step."""
        step, run = self._step, self._run
        run.started.update(step.started)
        found: dict[str, float | None] = {"length/started": step.started.mean()}
        found |= {f"length/{name}": mean.mean() for name, mean in step.lengths.items()}
        found |= {f"reward/{name}": mean.mean() for name, mean in step.rewards.items()}
        found["bias/length"] = _compare(run.lengths["trained"].mean(), run.started.mean())
        rewards = run.rewards
        found["bias/reward"] = _compare(
            rewards["trained"].mean(), rewards["started"].mean(), least=rewards["started"].spread()
        )
        self._step = _Counts()
        for sample_id in self._overdue:
            self._cancelled.pop(sample_id, None)
        self._overdue = set(self._cancelled)
        return {name: value for name, value in found.items() if value is not None}

    def _forget(self, sample_id: str) -> tuple[int | None, float | None, bool]:
        """Return the length of a finished sample, its reward, and whether it was of the first attempt at its task."""
        first = sample_id not in self._repeated
        self._repeated.discard(sample_id)
        return self._finished.pop(sample_id, None), self._rewards.pop(sample_id, None), first

    def _add(self, name: str, length: int, reward: float | None, *, first: bool, finished: bool = True) -> None:
        if first:
            self._step.started.add(length, finished=finished)
        for counts in (self._step, self._run):
            counts.lengths[name].add(length)
            if reward is not None:
                counts.rewards[name].add(reward)
                if first:
                    counts.rewards["started"].add(reward)


def _compare(trained: float | None, started: float | None, least: float = 0.0) -> float | None:
    """Return the difference as a share of `started`, or of `least` if that is larger."""
    if trained is None or started is None:
        return None
    scale = max(abs(started), least)
    return round((trained - started) / scale, 9) if scale else 0.0  # sums in another order differ in the last digits
