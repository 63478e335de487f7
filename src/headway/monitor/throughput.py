"""Measures how fast a run is: steps, seconds per step, samples and actions per second, reward per step.

Seconds per step run from one step end to the next, which is what a user waits for; `train_s` is the part of it from
the step's begin to its end. Samples and actions are counted when they are trained on, so dropped ones do not look like
progress. One small record is kept per step, and nothing per sample.

The reward of a step is what `StepEnd` reports; without one it is the mean over its samples of the group rewards that
`GroupReady` announced.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.monitor.event_record import Event
from headway.monitor.events import (
    GroupDrop,
    GroupReady,
    GroupTrain,
    RequestEnd,
    RunBegin,
    RunReady,
    StepBegin,
    StepEnd,
    ValidateEnd,
)
from headway.monitor.measured_window import EventHandler, WindowClock

MISMATCH_LIMIT = 0.02
"""KL per token between trainer and engines above which something is wrong; rounding to bf16 makes a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step."""

    trained: int
    """Optimizer updates done after it."""
    end_s: float
    seconds: float
    """Time since the end of the step before; of a first step, since the components were up and validated."""
    train_s: float
    """Seconds since its own begin."""
    groups: int
    samples: int
    actions: int
    reward: float | None
    generated: int = 0
    """Actions of the requests that ended since the end of the step before, those of validation included."""
    lag: float = 0.0
    """Mean over its samples, in versions."""
    replaced: int = 0
    """Groups with equal rewards that were replaced by others."""
    filled: int = 0
    """Groups with equal rewards that it was trained on because there were too few others."""
    tflop: float = 0.0
    """Operations that its mathematics needed, in 10¹², if the trainer reports them."""
    peak_tflops: float = 0.0
    """Operations per second that the chip can do, in 10¹²; 0 if not known."""
    mismatch: float | None = None
    """KL per token of the trainer from the engines under the same weights. Known only if all samples have lag 0 and
    one optimizer step was made, so that nothing else can cause it."""

    @property
    def is_mismatched(self) -> bool:
        """Whether the engines answered with something else than the policy that is trained."""
        return self.mismatch is not None and self.mismatch > MISMATCH_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSummary:
    """Speed of a run."""

    steps: tuple[StepRecord, ...]
    """Every step of the run, warm-up included."""
    samples: int
    """Samples trained, in the whole run."""
    actions: int
    """Actions trained, in the whole run."""
    step_mean_s: float
    step_p50_s: float
    step_p95_s: float
    train_mean_s: float
    train_tflops: float
    """10¹² operations per second while it trains; 0 if not known."""
    mfu: float
    """Share of what the chip can do; 0 if not known."""
    samples_per_s: float
    actions_per_s: float
    reward_first: float | None
    reward_last: float | None
    """Means over the first and the last tenth of the steps that have a reward."""


class ThroughputRecorder:
    """Accumulates one record per step."""

    def __init__(self, clock: WindowClock) -> None:
        self._clock = clock
        self.steps: list[StepRecord] = []
        self._group_rewards: dict[int, float] = {}
        self._open_groups: list[tuple[GroupTrain, float | None]] = []
        """Groups of the steps that have not ended, with their announced rewards."""
        self._begun_s: float | None = None
        self._resumed_s: float | None = None
        self.generated = 0
        """Actions generated since the end of the last step."""
        self.handlers: Mapping[type[Event], EventHandler] = {
            RunBegin: self._begin_run,
            RunReady: self._begin_steps,
            ValidateEnd: self._begin_steps,
            RequestEnd: self._end_request,
            GroupReady: self._make_group_ready,
            GroupDrop: self._drop_group,
            GroupTrain: lambda _, event: self._open_groups.append((event, self._group_rewards.pop(event.group, None))),
            StepBegin: self._begin_step,
            StepEnd: self._end_step,
        }

    def _begin_run(self, time_s: float, event: RunBegin) -> None:
        """Forget the step under way, which the new process makes again; the pause between the two is no step's."""
        self._open_groups.clear()
        self._begun_s = None
        self._resumed_s = time_s

    def _begin_steps(self, time_s: float, event: RunReady | ValidateEnd) -> None:
        """Count the seconds of the first step from here: start and first validation are over, and no group runs yet."""
        if isinstance(event, RunReady) or not (self.steps or event.trained):
            self._resumed_s = time_s

    def _end_request(self, time_s: float, event: RequestEnd) -> None:
        self.generated += event.actions

    def _make_group_ready(self, time_s: float, event: GroupReady) -> None:
        reward = _finite(event.reward)
        if reward is not None:
            self._group_rewards[event.group] = reward

    def _drop_group(self, time_s: float, event: GroupDrop) -> None:
        self._group_rewards.pop(event.group, None)

    def _begin_step(self, time_s: float, event: StepBegin) -> None:
        self._begun_s = time_s

    def _end_step(self, time_s: float, event: StepEnd) -> None:
        # Usually the groups of one step, more after a failed one; groups of steps to come have later versions.
        groups = [(group, reward) for group, reward in self._open_groups if group.trained < event.trained]
        self._open_groups = [pair for pair in self._open_groups if pair[0].trained >= event.trained]
        samples = sum(group.samples for group, _ in groups)
        lag = sum(group.samples * (group.trained - group.oldest) for group, _ in groups)
        rewarded = sum(group.samples for group, reward in groups if reward is not None)
        reward = _finite(event.reward)
        if reward is None and rewarded:
            reward = sum(group.samples * value for group, value in groups if value is not None) / rewarded
        before_s, metrics = self._find_previous_end_s(), event.metrics
        has_mismatch = not lag and metrics.get("train/optimizer_steps") == 1
        self.steps.append(
            StepRecord(
                trained=event.trained,
                end_s=time_s,
                seconds=time_s - before_s,
                train_s=time_s - (before_s if self._begun_s is None else self._begun_s),
                groups=len(groups),
                samples=samples,
                actions=sum(group.actions for group, _ in groups),
                reward=reward,
                generated=self.generated,
                lag=lag / max(1, samples),
                replaced=event.replaced or 0,
                filled=event.filled or 0,
                tflop=_finite(metrics.get("train/tflop")) or 0.0,
                peak_tflops=_finite(metrics.get("train/peak_tflops")) or 0.0,
                mismatch=_finite(metrics.get("train/behaviour_kl")) if has_mismatch else None,
            )
        )
        self._begun_s = self._resumed_s = None
        self.generated = 0

    def _find_previous_end_s(self) -> float:
        """Return the time that the seconds of the step under way are counted from."""
        if self._resumed_s is not None:
            return self._resumed_s
        return self.steps[-1].end_s if self.steps else self._clock.first_s or 0.0

    def throughput(self) -> ThroughputSummary:
        """Return what is known so far."""
        window = self._clock.window()
        measured = self.steps[-window.steps :] if window.steps else []
        seconds = sorted(step.seconds for step in measured)
        length_s = window.seconds or 1.0
        train_s = sum(step.train_s for step in measured)
        tflops = sum(step.tflop for step in measured) / (train_s or 1.0)
        peak = max((step.peak_tflops for step in measured), default=0.0)
        rewards = [step.reward for step in self.steps if step.reward is not None]
        tenth = max(1, len(rewards) // 10)
        return ThroughputSummary(
            steps=tuple(self.steps),
            samples=sum(step.samples for step in self.steps),
            actions=sum(step.actions for step in self.steps),
            step_mean_s=_mean(seconds),
            step_p50_s=compute_quantile(seconds, 0.50),
            step_p95_s=compute_quantile(seconds, 0.95),
            train_mean_s=_mean([step.train_s for step in measured]),
            train_tflops=tflops,
            mfu=tflops / peak if peak else 0.0,
            samples_per_s=sum(step.samples for step in measured) / length_s,
            actions_per_s=sum(step.actions for step in measured) / length_s,
            reward_first=_mean(rewards[:tenth]) if rewards else None,
            reward_last=_mean(rewards[-tenth:]) if rewards else None,
        )


def compute_quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, linear between neighbours; 0 without any values."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
